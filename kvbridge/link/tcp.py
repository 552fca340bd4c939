"""Bytes of payloads over plain TCP sockets: straight out of one arena, straight into the other.

1. A connection carries one payload. The node that pulls sends one request with the token of its lease, which nobody can
   guess; the owner answers with the length and then the canonical bytes, or closes the connection. A request of the
   second kind says in how few bits the values are wanted; it is only sent to owners that have said that they can.
2. Nothing waits for one side to keep something for the other: the kernel's socket buffers are the window, and whoever
   gives up closes its socket, which the other one notices.
3. Memory may change hands whenever the event loop turns. So bytes move in *turns* without an await: one look at who has
   the memory (`look`, `room`), and then the system calls that touch it; waiting is for the socket alone, never for
   memory.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from ipaddress import ip_address
from typing import Any, Protocol

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferEncoding, TransferForm, form_of
from kvbridge.link.pieces import split
from kvbridge.link.port import Capabilities, Pace, Sink, TransferFailedError, pace_of
from kvbridge.link.waiting import HasDescriptor, readable, writable

CAPABILITIES = Capabilities(name="tcp", one_sided=False, abortable=True, device_memory=False, zero_copy=True)
"""Plain sockets: the kernel copies straight out of one arena and straight into the other."""

MAGIC = b"KVBRIDGE-BULK/2\n"
"""How a request for the exact bytes starts."""
MAGIC_ENCODED = b"KVBRIDGE-BULK/3\n"
"""How a request for values in fewer bits starts."""
REQUEST_PART_BYTES_MAX = 4096
"""Longest of the texts in a request."""
VIEWS_MAX = 512
"""Most pieces of memory in one system call; the kernel takes 1024."""
_HEAD = struct.Struct("<16sHHHH")
_FORM = struct.Struct("<8sI")
"""The encoding's name and the layers that keep all bits; it follows the texts of a request that asks for fewer."""
_LENGTH = struct.Struct("<Q")
_TURN_BYTES = 4 << 20
_TURN_CALLS = 256
"""After so many bytes or system calls a turn ends, and other work gets its own."""
_AT_ONCE_BYTES = 512 << 10
"""Fewer bytes than these are not worth waking up for, but are taken all the same after a while."""
_AT_ONCE_SECONDS = 0.05
_IPV6 = 6
_PARTS_REQUIRED = 2
"""How many of the texts of a request may not be empty."""


class Connection(HasDescriptor, Protocol):
    """A socket that never waits, or what is as good as one."""

    def recv(self, nbytes: int, /) -> bytes:
        """Return what has come, at most so much; raises BlockingIOError if nothing has."""

    def recvmsg_into(self, views: Sequence[memoryview], /) -> tuple[int, object, object, object]:
        """Put what has come into these places, and return first how much that was."""

    def send(self, content: bytes, /) -> int:
        """Send the beginning of it, and return how much that was; raises BlockingIOError if there is no room."""

    def sendmsg(self, views: Sequence[memoryview], /) -> int:
        """Send the beginning of these pieces of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRequest:
    """What a node asks for."""

    client_name: str
    """As whom it holds the lease."""
    lease_token: str = field(repr=False)
    """The lease."""
    tenant: str = ""
    """The tenant that the lease is of; empty for the node's own."""
    bearer: str = field(default="", repr=False)
    """A token that proves who it is; empty if its certificate does, or nothing need."""
    form: TransferForm = EXACT_FORM
    """How the values are to be written."""

    @property
    def parts(self) -> tuple[str, str, str, str]:
        """Return the texts in the order in which they are sent."""
        return self.client_name, self.lease_token, self.tenant, self.bearer


class Source(Protocol):
    """What is sent, piece by piece."""

    def look(self) -> None:
        """Look whether the bytes may still be sent; raises if the lease is gone. Holds until the next await."""

    def views(self) -> Sequence[memoryview]:
        """Return the next bytes, good until the next await; none at the end."""

    def advance(self, nbytes: int) -> None:
        """Go on behind so many of them."""


async def connect(host: str, port: int, *, seconds_max: float) -> socket.socket | None:
    """Return a connection to another node's port for bytes, or None if there is none to be had."""
    try:
        async with asyncio.timeout(seconds_max):
            for family, kind, protocol, _, address in await _addresses(host, port):
                with suppress(OSError):  # Such as a host without this family; there may be another address.
                    return await _connected(socket.socket(family, kind, protocol), address)
    except (OSError, TimeoutError, UnicodeError, OverflowError):  # The last two: it is no name, or no port.
        pass
    return None


async def _connected(connection: socket.socket, address: Any) -> socket.socket:
    connection.setblocking(False)  # noqa: FBT003 - it takes no name
    try:
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def _addresses(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    """Return what `getaddrinfo` says, without asking it, and its thread, for what is an address already."""
    try:
        family = socket.AF_INET6 if ip_address(host).version == _IPV6 else socket.AF_INET
    except ValueError:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, socket.SOCK_STREAM, 0, "", (host, port))]


async def receive(connection: Connection, request: BulkRequest, sink: Sink) -> None:
    """Bring a leased payload over into `sink`.

    Raises:
        TransferFailedError: the owner refused, or the stream broke off or is of another length than the sink.
        BridgeError: the sink takes no more.
    """
    try:
        await _write(connection, _packed(request))
        [length] = _LENGTH.unpack(await _read(connection, _LENGTH.size))
        if length != sink.remaining_bytes:
            raise TransferFailedError(f"the owner sends {length} bytes where {sink.remaining_bytes} are missing")
        pace = pace_of(sink)
        await _move(lambda: _receive_a_turn(connection, sink, pace), lambda: _receivable(connection, sink, pace))
    except OSError as error:
        raise TransferFailedError(f"the stream of bytes broke off: {error.strerror or error}") from error


def _packed(request: BulkRequest) -> bytes:
    parts = [part.encode() for part in request.parts]
    form = request.form
    if form.is_exact:
        return _HEAD.pack(MAGIC, *map(len, parts)) + b"".join(parts)
    packed = _FORM.pack(form.encoding.value.encode(), form.exact_layers_first)
    return _HEAD.pack(MAGIC_ENCODED, *map(len, parts)) + b"".join(parts) + packed


async def _receivable(connection: Connection, sink: Sink, pace: Pace) -> None:
    if pace.is_ready:
        await _much_readable(connection, sink.remaining_bytes)
    else:
        await pace.ready()


async def read_request(connection: Connection) -> BulkRequest:
    """Return what a node that has just connected asks with.

    Raises:
        InvalidFieldError: it asks for nothing that makes sense.
        OSError: it went away.
        TransferFailedError: it said too little.
    """
    magic, *lengths = _HEAD.unpack(await _read(connection, _HEAD.size))
    if (
        magic not in {MAGIC, MAGIC_ENCODED}
        or max(lengths) > REQUEST_PART_BYTES_MAX
        or not all(lengths[:_PARTS_REQUIRED])
    ):
        raise InvalidFieldError("request", "is none for the bytes of a payload")
    parts = [await _read(connection, length) for length in lengths]
    form = _form(await _read(connection, _FORM.size)) if magic == MAGIC_ENCODED else EXACT_FORM
    try:
        name, token, tenant, bearer = (part.decode("ascii") for part in parts)
    except UnicodeDecodeError as error:
        raise InvalidFieldError("request", "holds what is not ASCII") from error
    return BulkRequest(client_name=name, lease_token=token, tenant=tenant, bearer=bearer, form=form)


def _form(packed: bytes) -> TransferForm:
    name, exact_layers_first = _FORM.unpack(packed)
    try:
        return form_of(TransferEncoding(name.rstrip(b"\0").decode("ascii")), exact_layers_first)
    except ValueError as error:  # That it is not ASCII is one, too.
        raise InvalidFieldError("request", "asks for an encoding that is not known") from error


async def send(connection: Connection, length: int, source: Source, *, look_seconds: float) -> None:
    """Send a payload of `length` bytes; while the other side takes nothing the lease is looked at regularly.

    Raises:
        OSError: the other side went away.
        BridgeError: the lease is gone.
    """
    await _write(connection, _LENGTH.pack(length))
    await _send_all(connection, source, look_seconds=look_seconds)


async def send_in_turn(
    connection: Connection, length: int, sources: AsyncIterator[Source], *, look_seconds: float
) -> None:
    """Send `length` bytes of several sources, one after the other; as `send` otherwise."""
    await _write(connection, _LENGTH.pack(length))
    async for source in sources:
        await _send_all(connection, source, look_seconds=look_seconds)


async def _send_all(connection: Connection, source: Source, *, look_seconds: float) -> None:
    await _move(lambda: _send_a_turn(connection, source), lambda: writable(connection, seconds_max=look_seconds))


class _Then(Enum):
    """What comes after a turn."""

    ANOTHER = auto()
    """Another one, once other work has had its own."""
    WAIT = auto()
    """Another one, once the socket or the sink is ready."""
    NOTHING = auto()
    """Nothing: all bytes have moved."""


async def _move(turn: Callable[[], _Then], wait: Callable[[], Awaitable[object]]) -> None:
    """Take turns until all bytes have moved."""
    while (then := turn()) is not _Then.NOTHING:
        await (wait() if then is _Then.WAIT else asyncio.sleep(0))


async def _much_readable(connection: Connection, missing_bytes: int) -> None:
    """Wait until a good deal has come or the end, but not for long.

    Whoever wakes up for each packet spends its time on waking up.
    """
    if isinstance(connection, socket.socket):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(missing_bytes, _AT_ONCE_BYTES))
    await readable(connection, seconds_max=_AT_ONCE_SECONDS)


def _receive_a_turn(connection: Connection, sink: Sink, pace: Pace) -> _Then:
    moved, room = 0, list[memoryview]()
    for _ in range(_TURN_CALLS):
        if not pace.is_ready:
            return _Then.WAIT
        room = room or list(sink.room())
        if not room:
            return _Then.NOTHING
        try:
            nbytes = connection.recvmsg_into(room[:VIEWS_MAX])[0]
        except BlockingIOError:
            return _Then.WAIT
        if not nbytes:
            raise TransferFailedError(f"the stream ended {sink.remaining_bytes} bytes before the end of the payload")
        sink.advance(nbytes)
        _, room = split(room, nbytes)
        moved += nbytes
        if moved >= _TURN_BYTES:
            break
    return _Then.ANOTHER


def _send_a_turn(connection: Connection, source: Source) -> _Then:
    source.look()
    moved = 0
    for _ in range(_TURN_CALLS):
        views = source.views()
        if not views:
            return _Then.NOTHING
        try:
            nbytes = connection.sendmsg(views[:VIEWS_MAX])
        except BlockingIOError:
            return _Then.WAIT
        source.advance(nbytes)
        moved += nbytes
        if moved >= _TURN_BYTES:
            break
    return _Then.ANOTHER


async def _read(connection: Connection, nbytes: int) -> bytes:
    read = b""
    while len(read) < nbytes:
        try:
            piece = connection.recv(nbytes - len(read))
        except BlockingIOError:
            await readable(connection)
            continue
        if not piece:
            raise TransferFailedError("the other side closed the connection")
        read += piece
    return read


async def _write(connection: Connection, content: bytes) -> None:
    while content:
        try:
            content = content[connection.send(content) :]
        except BlockingIOError:
            await writable(connection)
