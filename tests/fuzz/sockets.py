"""Sockets: packets at the descriptor socket, and the wire that bytes of payloads take between nodes."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import TransferEncoding, form_of
from kvbridge.link import tcp
from kvbridge.link.port import TransferFailedError
from kvbridge.memory.descriptor_connection import ConnectionState, DescriptorConnection
from kvbridge.memory.descriptor_port import DescriptorSocketLimits, PeerCredentials, SessionInfo
from kvbridge.memory.descriptor_wire import PROTOCOL_VERSION, close_all, receive_response
from kvbridge.memory.errors import DescriptorProtocolError, DescriptorRefusedError, RefusalCode
from kvbridge.v1 import descriptor_socket_pb2 as pb
from tests.fuzz.target import Target

_STREAM_BYTES_MAX = 4096
"""As much as is read of an input: it has to fit a socket's buffer."""
_SINK_BYTES = 64
REQUEST = tcp.BulkRequest(client_name="node.other", lease_token="t" * 32)
_ARENA_ID = "arena"
_PEER = PeerCredentials(pid=1, uid=1, gid=1)
_LENGTH = struct.Struct("<H")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _run_on_stream(content: bytes, work: Callable[[socket.socket], Coroutine[Any, Any, object]]) -> None:
    """Let `work` read `content` and then the end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(content[:_STREAM_BYTES_MAX])
        theirs.shutdown(socket.SHUT_WR)
        ours.setblocking(False)
        _loop().run_until_complete(work(ours))


def _run_bulk_request(content: bytes) -> None:
    async def work(connection: socket.socket) -> None:
        try:
            request = await tcp.read_request(connection)
        except (InvalidFieldError, TransferFailedError):
            return
        assert all(part.isascii() and len(part) <= tcp.REQUEST_PART_BYTES_MAX for part in request.parts)
        assert request.client_name
        assert request.lease_token

    _run_on_stream(content, work)


def _bulk_requests() -> Sequence[bytes]:
    """Return requests as `tcp.receive` sends them."""
    requests = [
        REQUEST,
        tcp.BulkRequest(client_name="node.other", lease_token="t" * 32, tenant="team", bearer="b" * 40),
        replace(REQUEST, form=form_of(TransferEncoding.INT8, 3)),
    ]
    return [_sent(request) for request in requests]


def _sent(request: tcp.BulkRequest) -> bytes:
    async def ask(connection: socket.socket) -> None:
        with suppress(TransferFailedError):
            await tcp.receive(connection, request, _Sink())

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.shutdown(socket.SHUT_WR)
        _loop().run_until_complete(ask(ours))
        return theirs.recv(_STREAM_BYTES_MAX)


class _Sink:
    """Room for a small payload."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_SINK_BYTES))

    @property
    def remaining_bytes(self) -> int:
        return len(self._memory)

    def room(self) -> list[memoryview]:
        return [self._memory] if self._memory else []

    def advance(self, nbytes: int) -> None:
        self._memory = self._memory[nbytes:]

    def write(self, chunk: memoryview) -> None:
        self._memory[: len(chunk)] = chunk
        self.advance(len(chunk))


def _run_bulk_answer(content: bytes) -> None:
    async def work(connection: socket.socket) -> None:
        sink = _Sink()
        try:
            await tcp.receive(connection, REQUEST, sink)
        except TransferFailedError:
            return
        assert not sink.remaining_bytes

    _run_on_stream(content, work)


def _bulk_answers() -> Sequence[bytes]:
    return [struct.pack("<Q", _SINK_BYTES) + bytes(_SINK_BYTES), struct.pack("<Q", 1) + b"x"]


class _Arena:
    """An empty file."""

    size_bytes = 0

    def writable_descriptor(self) -> int:
        return os.open(os.devnull, os.O_RDWR)

    def readonly_descriptor(self) -> int:
        return os.open(os.devnull, os.O_RDONLY)


class _Port:
    """A node with one arena that counts its sessions."""

    def __init__(self) -> None:
        self.sessions = 0

    def attach(self, peer: PeerCredentials) -> SessionInfo:
        assert peer is _PEER
        self.sessions += 1
        return SessionInfo(session_token="session.token", tenant="default", epoch=1)

    def arena(self, session_token: str, arena_id: str) -> _Arena:
        assert session_token == "session.token"
        if arena_id != _ARENA_ID:
            raise DescriptorRefusedError(RefusalCode.ARENA_UNKNOWN, f"no arena {arena_id}")
        return _Arena()

    def ended(self, session_token: str) -> None:
        assert session_token == "session.token"
        self.sessions -= 1


def _run_descriptor_requests(content: bytes) -> None:
    """Send several packets, each behind its length, and hang up: the session is over, and nothing else happened."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    port = _Port()

    async def work() -> None:
        connection = DescriptorConnection(ours, _PEER, port, DescriptorSocketLimits(), lambda _: None)
        for packet in _split(content):
            try:
                theirs.sendmsg([packet], [], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
            except OSError:
                break
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if connection.state is ConnectionState.ENDED:
                break
        connection.end()

    failures: list[dict[str, Any]] = []
    _loop().set_exception_handler(lambda _, context: failures.append(context))
    with theirs:
        _loop().run_until_complete(work())
    assert not failures, failures
    assert port.sessions == 0


def _split(content: bytes) -> list[bytes]:
    """Return up to eight packets, none of them empty."""
    packets: list[bytes] = []
    while len(content) > _LENGTH.size and len(packets) < 8:
        (length,) = _LENGTH.unpack_from(content)
        packet, content = content[_LENGTH.size : _LENGTH.size + length], content[_LENGTH.size + length :]
        if packet:
            packets.append(packet)
    return packets


def _descriptor_requests() -> Sequence[bytes]:
    requests = [
        pb.DescriptorSocketRequest(request_number=1, attach=pb.AttachRequest(protocol_version=PROTOCOL_VERSION)),
        pb.DescriptorSocketRequest(request_number=2, arena=pb.ArenaRequest(arena_id=_ARENA_ID, writable=True)),
        pb.DescriptorSocketRequest(request_number=3, arena=pb.ArenaRequest(arena_id="other")),
    ]
    packed = [request.SerializeToString() for request in requests]
    return [b"".join(_LENGTH.pack(len(packet)) + packet for packet in packed[:count]) for count in (1, 2, 3)]


def _run_descriptor_response(content: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        theirs.send(content[:_STREAM_BYTES_MAX] or b"\0")
        try:
            _, descriptors = receive_response(ours)
        except DescriptorProtocolError:
            return
        close_all(descriptors)


def _descriptor_responses() -> Sequence[bytes]:
    responses = [
        pb.DescriptorSocketResponse(
            request_number=1, attach=pb.AttachResponse(session_token="session.t", tenant="default", epoch=1)
        ),
        pb.DescriptorSocketResponse(
            request_number=2, arena=pb.ArenaResponse(arena_id="a", size_bytes=1, writable=True)
        ),
    ]
    return [response.SerializeToString() for response in responses]


SOCKETS: dict[str, Target] = {
    "bulk_answer": Target(run=_run_bulk_answer, seeds=_bulk_answers),
    "bulk_request": Target(run=_run_bulk_request, seeds=_bulk_requests),
    "descriptor_requests": Target(run=_run_descriptor_requests, seeds=_descriptor_requests),
    "descriptor_response": Target(run=_run_descriptor_response, seeds=_descriptor_responses),
}
