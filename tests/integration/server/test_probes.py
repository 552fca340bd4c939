"""Health checks during a flood: an orchestrator that is not answered would restart a node that serves."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbridge.core.access import Role
from tests import builders
from tests.access import AccessFolder, refusal
from tests.api import ApiClient, acquire_request
from tests.harness import BridgeProcess, running_bridge, wait_for

ACQUIRE = "/kvbridge.v1.HandoffService/Acquire"
CHECK, WATCH = (f"/grpc.health.v1.Health/{method}" for method in ("Check", "Watch"))
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
DATA_FRAME, HEADERS_FRAME, SETTINGS_FRAME = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW = 4
UNKNOWN_SERVICE = health_pb2.HealthCheckRequest(service="none").SerializeToString()
CALLS_MAX, WATCHES_MAX, FLOOD, PROBES = 64, 8, 300, 50
SECONDS = 60.0
"""More than anything here takes; calls are held no longer."""


@pytest.fixture(scope="module")
def bridge() -> Iterator[BridgeProcess]:
    """Run a bridge that takes few calls at once, from whoever reaches it; nothing of all this surprises it."""
    with running_bridge("--concurrent-calls-max", str(CALLS_MAX)) as process:
        yield process
        process.stop()
        surprises = [line for line in process.log.splitlines() if "Traceback" in line]
        assert not surprises, "\n".join(surprises)


def own_channel(bridge: BridgeProcess) -> grpc.Channel:
    """Return a channel with a connection of its own."""
    return grpc.insecure_channel(bridge.tcp_target, [("grpc.use_local_subchannel_pool", 1)])


def assert_probes_answered(bridge: BridgeProcess, probes: int = PROBES) -> None:
    """Check health again and again, now and then over a new connection, as an orchestrator does."""
    for number in range(probes):
        if number % 10 == 0:
            channel = own_channel(bridge)
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        if number % 10 == 9:
            channel.close()


@contextmanager
def held(bridge: BridgeProcess, method: str, first: bytes | None) -> Iterator[list[Any]]:
    """Make many calls and hold on to them, without a message or with one and nothing more."""
    over = threading.Event()

    def sent() -> Iterator[bytes]:
        if first is not None:
            yield first
        over.wait(SECONDS)

    with ExitStack() as stack:
        channel = stack.enter_context(own_channel(bridge))
        stack.callback(over.set)
        begin = channel.stream_stream(method, None, None)
        calls = [begin(sent(), metadata=(("kvbridge-client", f"flood-{n}"),)) for n in range(FLOOD)]
        yield calls
        for call in calls:
            call.cancel()  # type: ignore[no-untyped-call] # the stubs lack it


@pytest.mark.parametrize(
    ("method", "first"),
    [(ACQUIRE, None), (CHECK, None), (WATCH, b""), (WATCH, None)],
    ids=["calls that never begin", "checks that never begin", "watches", "watches that never begin"],
)
def test_probes_are_answered_whatever_is_held(bridge: BridgeProcess, method: str, first: bytes | None) -> None:
    """Every place there is for such calls is taken, and those that were too many have been refused."""
    with held(bridge, method, first) as calls:
        for call in calls if first is not None else ():
            with suppress(grpc.RpcError):
                next(call)
        wait_for(lambda: sum(call.done() for call in calls) >= FLOOD - CALLS_MAX, SECONDS)
        refused = {call.code() for call in calls if call.done()}
        assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert_probes_answered(bridge)
        assert not all(call.done() for call in calls)


def test_other_calls_are_told_what_is_full() -> None:
    """And are served again once there is room."""
    # At a bridge of its own: calls of other tests may not have left all of their places yet.
    with running_bridge("--concurrent-calls-max", str(CALLS_MAX)) as process, ApiClient(process) as client:
        with held(process, ACQUIRE, None) as calls:
            wait_for(lambda: sum(call.done() for call in calls) == FLOOD - CALLS_MAX, SECONDS)
            assert refusal(lambda: client.call("Acquire", acquire_request(builders.spec()))) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_REQUESTS",
            )
        wait_for(lambda: client.acquire() is not None, SECONDS)


def test_probes_are_answered_while_unproved_calls_pour_in(tmp_path: Path) -> None:
    """Each of them is refused; none of them takes a place."""
    folder = AccessFolder(tmp_path, engine=(Role.CONSUMER,))
    over, refused = threading.Event(), [0, 0]

    def pour(number: int) -> None:
        with own_channel(process) as channel:
            call = channel.unary_unary(ACQUIRE, None, None)
            while not over.is_set():
                futures = [call.future(b"", timeout=SECONDS) for _ in range(100)]
                assert {future.code() for future in futures} == {grpc.StatusCode.UNAUTHENTICATED}
                refused[number] += len(futures)

    with running_bridge(*folder.flags, "--concurrent-calls-max", "32") as process:
        floods = [threading.Thread(target=pour, args=(number,)) for number in range(2)]
        for flood in floods:
            flood.start()
        try:
            wait_for(lambda: all(refused), SECONDS)
            assert_probes_answered(process)
            wait_for(lambda: sum(refused) > 400, SECONDS)
        finally:
            over.set()
            for flood in floods:
                flood.join()


def window(size: int) -> bytes:
    """Return the frame that says how much of each answer is taken before the reader asks for more."""
    return frame(SETTINGS_FRAME, 0, 0, struct.pack(">HI", INITIAL_WINDOW, size))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def headers_of(method: str, stream: int) -> bytes:
    """Return the frame that begins a call, without any help by a library that would read answers."""
    fields = ((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost"))
    block = b""
    for name, value in (*fields, ("content-type", "application/grpc"), ("te", "trailers")):
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return frame(HEADERS_FRAME, END_HEADERS, stream, block)


def call_of(method: str, stream: int, message: bytes | None) -> bytes:
    """Return the frames of a call with that message, or none."""
    if message is None:
        return headers_of(method, stream)
    return headers_of(method, stream) + frame(DATA_FRAME, 0, stream, struct.pack(">BI", 0, len(message)) + message)


@contextmanager
def readers_of_nothing(bridge: BridgeProcess, method: str, message: bytes | None) -> Iterator[None]:
    """Make many calls over connections from which nothing is read."""
    with ExitStack() as stack:
        for _ in range(3):
            silent = socket.socket()
            stack.callback(silent.close)
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", bridge.tcp_port))
            silent.sendall(PREFACE + b"".join(call_of(method, 2 * n + 1, message) for n in range(1000)))
        yield


@pytest.mark.parametrize(
    ("method", "message"),
    [(ACQUIRE, None), (CHECK, None), (CHECK, UNKNOWN_SERVICE), (WATCH, None), (WATCH, b"")],
    ids=["calls that never begin", "checks that never begin", "checks", "watches that never begin", "watches"],
)
def test_probes_are_answered_beside_those_who_read_nothing(
    bridge: BridgeProcess, method: str, message: bytes | None
) -> None:
    """Their answers wait in the transport; nobody waits for those."""
    with readers_of_nothing(bridge, method, message):
        assert_probes_answered(bridge)


def received(connection: socket.socket) -> Iterator[tuple[int, int, int]]:
    """Yield kind, flags and stream of each frame as it comes."""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            stream.read(int.from_bytes(head[:3]))
            yield head[3], head[4], int.from_bytes(head[5:])


def headed(frames: Iterator[tuple[int, int, int]], flag: int, number: int) -> set[int]:
    """Return the next streams of which headers with that flag come, so many of them."""
    streams = (stream for kind, flags, stream in frames if kind == HEADERS_FRAME and flags & flag)
    return set(islice(streams, number))


def test_who_loses_its_place_before_it_reads_its_answer_is_told(bridge: BridgeProcess) -> None:
    """As soon as it reads: its answer is on its way, and the end of its call comes behind."""
    watches = [2 * n + 1 for n in range(WATCHES_MAX + 4)]
    calls = [call_of(WATCH, stream, b"") for stream in watches]
    with socket.create_connection(("127.0.0.1", bridge.tcp_port), SECONDS) as slow:
        frames = received(slow)
        slow.sendall(PREFACE + window(0) + b"".join(calls[:WATCHES_MAX]))
        assert headed(frames, END_HEADERS, WATCHES_MAX) == set(watches[:WATCHES_MAX])
        slow.sendall(b"".join(calls[WATCHES_MAX:]))
        assert headed(frames, END_HEADERS, 4) == set(watches[WATCHES_MAX:])
        slow.sendall(window(65_535))
        assert headed(frames, END_STREAM, 4) < set(watches[:WATCHES_MAX])
