"""Who makes a call: the client named in its metadata."""

from __future__ import annotations

from typing import Any

from grpc import aio

from kvbridge.core.errors import TooLateError
from kvbridge.node.identity import CLIENT_FIELD, Client, Sessions


def caller(sessions: Sessions, context: aio.ServicerContext[Any, Any]) -> Client:
    """Return the client that makes this call.

    Raises:
        InvalidFieldError: the `kvbridge-client` metadata is missing or unfit.
        SessionEndedError: it names a session that has ended.
    """
    metadata = dict(context.invocation_metadata() or ())
    name = metadata.get(CLIENT_FIELD, "")
    return sessions.identify(name if isinstance(name, str) else name.decode("ascii", "replace"))


def require_time(context: aio.ServicerContext[Any, Any]) -> None:
    """Refuse to grant anything to a caller whose deadline has passed, because nobody would take it.

    A node that was frozen meets such calls when it goes on.

    Raises:
        TooLateError: the deadline has passed.
    """
    remaining_seconds = time_remaining(context)
    if remaining_seconds is not None and remaining_seconds <= 0:
        raise TooLateError("the caller's deadline passed before the node could answer")


def time_remaining(context: aio.ServicerContext[Any, Any]) -> float | None:
    """Return what the caller's deadline leaves in seconds; None if it has none."""
    # The stubs do not know that it is None for a caller without a deadline.
    remaining_seconds: float | None = context.time_remaining()
    return remaining_seconds
