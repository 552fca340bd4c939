"""Ends streams before their time, so that nothing of them stays.

A stream that its reader alone drives (`kvbridge.client.rpc`) is freed when the last of its events has been read. Its
`cancel` has no other event read, so that some 20 kB would stay for each until the process ends. Here the call below is
cancelled instead: its reader finds that it has ended, as if the other side had ended it, and reads that.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc


def break_off(stream: Any) -> None:
    """Have a stream end, from any thread; whoever reads it has to read its end."""
    code, _ = grpc.StatusCode.CANCELLED.value
    try:
        stream._call.cancel(code, "broken off here")  # noqa: SLF001 - nothing public leaves the events to be read
    except (AttributeError, TypeError):  # Another release of gRPC: rather some memory than a stream that goes on.
        stream.cancel()


def read_end(stream: Any) -> None:
    """Read what is left of a stream that was broken off or has ended, where nobody else reads it."""
    with suppress(grpc.RpcError):
        for _ in stream:
            pass
