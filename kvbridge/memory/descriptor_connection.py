"""One client's connection to the descriptor socket, from its acceptance to its end."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from contextlib import ExitStack
from enum import Enum, auto, unique
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from kvbridge.memory.descriptor_wire import PROTOCOL_VERSION, close_all, hang_up, receive_request, send_packet
from kvbridge.memory.errors import ArenaClosedError, DescriptorRefusedError, RefusalCode
from kvbridge.v1 import descriptor_socket_pb2 as pb

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kvbridge.memory.descriptor_port import DescriptorPort, DescriptorSocketLimits, PeerCredentials, SessionInfo


@unique
class ConnectionState(Enum):
    """How far a connection has come."""

    CONNECTED = auto()
    """The client has not attached yet, and the handshake timer runs."""
    ATTACHED = auto()
    """The session is open."""
    ENDED = auto()
    """The socket is closed and the port has been told."""


_NEXT_STATE = {
    (ConnectionState.CONNECTED, "attach"): ConnectionState.ATTACHED,
    (ConnectionState.ATTACHED, "arena"): ConnectionState.ATTACHED,
}
"""Which request is allowed when; any other is out of order. Every state can pass to `ENDED`."""

_HARMLESS = frozenset({RefusalCode.ARENA_UNKNOWN, RefusalCode.NOT_PERMITTED, RefusalCode.DESCRIPTORS_EXHAUSTED})
"""Refusals of an arena that leave the session open; it may hold leases that the client still uses."""

_MESSAGE_CHARACTERS_MAX = 500
"""Longest explanation of a refusal; one that quotes the client's request must still fit the send buffer."""


class DescriptorConnection:
    """Reads requests, asks the port, and writes responses, all in callbacks of the event loop."""

    def __init__(
        self,
        sock: socket.socket,
        peer: PeerCredentials,
        port: DescriptorPort,
        limits: DescriptorSocketLimits,
        forget: Callable[[DescriptorConnection], None],
        *,
        refused: Callable[[RefusalCode], None] = lambda _: None,
    ) -> None:
        """Start to serve a non-blocking `sock`.

        `forget` is called when the connection has ended, and `refused` when a request is.
        """
        self.peer = peer
        self.state = ConnectionState.CONNECTED
        self._socket = sock
        self._port = port
        self._limits = limits
        self._forget = forget
        self._refused = refused
        self._session: SessionInfo | None = None
        self._outbox: deque[tuple[pb.DescriptorSocketResponse, list[int]]] = deque()
        self._reading = self._writing = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limits.handshake_timeout_seconds, self._handshake_expired)
        self._watch()

    def __repr__(self) -> str:
        """Show whose connection it is, without the token, which is a secret."""
        return f"<DescriptorConnection {self.state.name} of process {self.peer.pid}, user {self.peer.uid}>"

    def end(self) -> None:
        """Close the socket and tell the port that the session is over; more than once does nothing."""
        if self.state is ConnectionState.ENDED:
            return
        self.state = ConnectionState.ENDED
        self._timer.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        hang_up(self._socket)
        while self._outbox:
            close_all(self._outbox.popleft()[1])
        self._forget(self)
        if self._session:
            self._port.ended(self._session.session_token)

    def _readable(self) -> None:
        """Take one packet; one for each wake-up, so that no client holds up the others."""
        with ExitStack() as guard:
            # Should the port fail in a way it must not, the client gets an end rather than no answer for ever.
            guard.callback(self.end)
            self._take_packet()
            guard.pop_all()

    def _take_packet(self) -> None:
        try:
            packet, problem = receive_request(self._socket, self._limits.message_bytes_max)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            packet, problem = b"", None
        if not packet:
            self.end()
            return
        request = pb.DescriptorSocketRequest()
        try:
            _parse(packet, problem, request)
            self._answer(request)
        except DescriptorRefusedError as refusal:
            self._refuse(request.request_number, refusal)

    def _answer(self, request: pb.DescriptorSocketRequest) -> None:
        kind = request.WhichOneof("request")
        if kind is None:
            raise DescriptorRefusedError(RefusalCode.UNKNOWN_REQUEST, "the request asks for nothing that is known here")
        if (self.state, kind) not in _NEXT_STATE:
            raise DescriptorRefusedError(RefusalCode.OUT_OF_ORDER, f"{kind} is not allowed now")
        response, descriptors = self._attach(request.attach) if kind == "attach" else self._arena(request.arena)
        self.state = _NEXT_STATE[self.state, kind]
        response.request_number = request.request_number
        self._send(response, descriptors)

    def _attach(self, request: pb.AttachRequest) -> tuple[pb.DescriptorSocketResponse, list[int]]:
        if request.protocol_version != PROTOCOL_VERSION:
            message = f"this node speaks version {PROTOCOL_VERSION}, not {request.protocol_version}"
            raise DescriptorRefusedError(RefusalCode.VERSION_UNSUPPORTED, message)
        session = self._session = self._port.attach(self.peer)
        self._timer.cancel()
        response = pb.AttachResponse(session_token=session.session_token, tenant=session.tenant, epoch=session.epoch)
        return pb.DescriptorSocketResponse(attach=response), []

    def _arena(self, request: pb.ArenaRequest) -> tuple[pb.DescriptorSocketResponse, list[int]]:
        assert self._session is not None
        arena = self._port.arena(self._session.session_token, request.arena_id)
        try:
            descriptor = arena.writable_descriptor() if request.writable else arena.readonly_descriptor()
        except ArenaClosedError as error:
            raise DescriptorRefusedError(RefusalCode.ARENA_UNKNOWN, str(error)) from error
        except OSError as error:
            raise DescriptorRefusedError(RefusalCode.DESCRIPTORS_EXHAUSTED, str(error)) from error
        response = pb.ArenaResponse(arena_id=request.arena_id, size_bytes=arena.size_bytes, writable=request.writable)
        return pb.DescriptorSocketResponse(arena=response), [descriptor]

    def _refuse(self, request_number: int, refusal: DescriptorRefusedError) -> None:
        self._refused(refusal.code)
        self._send(refusal_response(refusal, request_number), [])
        if self.state is not ConnectionState.ATTACHED or refusal.code not in _HARMLESS:
            self.end()

    def _handshake_expired(self) -> None:
        timeout_seconds = self._limits.handshake_timeout_seconds
        message = f"the client did not attach within {timeout_seconds} seconds"
        self._refuse(0, DescriptorRefusedError(RefusalCode.HANDSHAKE_TIMEOUT, message))

    def _send(self, response: pb.DescriptorSocketResponse, descriptors: list[int]) -> None:
        self._outbox.append((response, descriptors))
        self._flush()

    def _flush(self) -> None:
        """Write what the client has room for."""
        while self._outbox:
            try:
                send_packet(self._socket, *self._outbox[0])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    self.end()
                    return
                self._withhold()
                continue
            close_all(self._outbox.popleft()[1])
        self._watch()

    def _withhold(self) -> None:
        """Refuse instead of answering: clients have yet to read as many descriptors as the node may have open."""
        response, descriptors = self._outbox.popleft()
        close_all(descriptors)
        refusal = DescriptorRefusedError(RefusalCode.DESCRIPTORS_EXHAUSTED, "too many descriptors are on their way")
        self._refused(refusal.code)
        self._outbox.appendleft((refusal_response(refusal, response.request_number), []))

    def _watch(self) -> None:
        """Listen for what can be dealt with: room to write, and requests as long as few responses wait."""
        writing = bool(self._outbox)
        reading = len(self._outbox) < self._limits.requests_in_flight_max
        if reading is not self._reading:
            self._reading = reading
            self._loop.add_reader(self._socket, self._readable) if reading else self._loop.remove_reader(self._socket)
        if writing is not self._writing:
            self._writing = writing
            self._loop.add_writer(self._socket, self._flush) if writing else self._loop.remove_writer(self._socket)


def refusal_response(refusal: DescriptorRefusedError, request_number: int = 0) -> pb.DescriptorSocketResponse:
    """Put a refusal into a response."""
    code = pb.DescriptorSocketErrorCode.ValueType(refusal.code)
    error = pb.DescriptorSocketError(code=code, message=refusal.message[:_MESSAGE_CHARACTERS_MAX])
    return pb.DescriptorSocketResponse(request_number=request_number, error=error)


def _parse(packet: bytes, problem: RefusalCode | None, request: pb.DescriptorSocketRequest) -> None:
    """Read a packet into `request`, which keeps the request's number for the refusal as far as it could be read."""
    if problem is not None:
        raise DescriptorRefusedError(problem, "the packet is too long or carries descriptors")
    try:
        request.MergeFromString(packet)
    except DecodeError as error:
        raise DescriptorRefusedError(RefusalCode.MALFORMED, "the packet is no DescriptorSocketRequest") from error
