"""What stays of a stream that is ended before its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError
from kvbridge.client.rpc import Rpc
from kvbridge.client.security import ChannelSecurity
from kvbridge.client.streams import break_off, read_end
from kvbridge.v1 import handoff_service_pb2 as pb

MESSAGES = 3
PATIENCE_SECONDS = 20.0


@contextmanager
def served() -> Iterator[Rpc]:
    """Have downloads of three messages, which then last until their reader goes."""

    def download(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        gone = threading.Event()
        context.add_callback(gone.set)
        yield from [b"message"] * MESSAGES
        gone.wait(PATIENCE_SECONDS)

    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    methods = {"Download": grpc.unary_stream_rpc_method_handler(download)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvbridge.v1.HandoffService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    rpc = Rpc(f"127.0.0.1:{port}", ChannelSecurity())
    try:
        yield rpc
    finally:
        rpc.close()
        server.stop(None).wait()


def is_freed(stream: Any) -> bool:
    """Tell whether gRPC awaits nothing of a stream any more, which is when it frees it."""
    return not stream._state.due


@pytest.mark.parametrize("taken", range(MESSAGES + 1))
def test_nothing_stays_of_a_stream_that_is_broken_off(taken: int) -> None:
    """However much of it was read; a second time does nothing."""
    with served() as rpc:
        stream: Any = rpc.download(pb.DownloadRequest(), timeout=PATIENCE_SECONDS)
        for _ in range(taken):
            next(stream)
        assert not is_freed(stream)
        for _ in range(2):
            break_off(stream)
            read_end(stream)
            assert is_freed(stream)
        assert stream.code() is grpc.StatusCode.CANCELLED


def test_a_reader_that_waits_finds_the_end() -> None:
    """Another thread breaks the stream off."""
    with served() as rpc:
        stream: Any = rpc.download(pb.DownloadRequest(), timeout=PATIENCE_SECONDS)
        reader = threading.Thread(target=read_end, args=(stream,))
        reader.start()
        break_off(stream)
        reader.join(PATIENCE_SECONDS)
        assert is_freed(stream)


def test_a_stream_may_be_ended_after_its_channel() -> None:
    """Which ended it already."""
    with served() as rpc:
        stream: Any = rpc.download(pb.DownloadRequest(), timeout=PATIENCE_SECONDS)
        next(stream)
        rpc.close()
        break_off(stream)
        read_end(stream)
        assert is_freed(stream)


def test_nothing_stays_of_a_download_that_nobody_reads_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reader had enough, or has no time left."""
    with served() as rpc:
        streams: list[Any] = []
        download = rpc.download

        def noted(*args: Any, **named: Any) -> Any:
            streams.append(download(*args, **named))
            return streams[-1]

        monkeypatch.setattr(rpc, "download", noted)
        messages = rpc.stream(pb.DownloadRequest(), Deadline(PATIENCE_SECONDS), "client")
        next(messages)
        messages.close()  # type: ignore[attr-defined] # it is a generator
        late = Deadline(PATIENCE_SECONDS)
        messages = rpc.stream(pb.DownloadRequest(), late, "client")
        next(messages)
        monkeypatch.setattr(Deadline, "passed", True)
        with pytest.raises(CallFailedError, match="DEADLINE_EXCEEDED"):
            next(messages)
        assert len(streams) == 2
        assert all(is_freed(stream) for stream in streams)


def test_another_release_of_grpc_still_ends_its_streams() -> None:
    """What is not public may be gone; then `cancel` is left."""

    class Stream:
        def __init__(self, **attributes: Any) -> None:
            self.cancelled = 0
            self.__dict__.update(attributes)

        def cancel(self) -> None:
            self.cancelled += 1

    for stream in (Stream(), Stream(_call=object())):
        break_off(stream)
        assert stream.cancelled == 1
