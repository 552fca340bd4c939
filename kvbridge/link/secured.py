"""A TCP connection for bytes that is secured by TLS; what `kvbridge.link.tcp` does with plain ones, it does with it.

A record of TLS holds at most 16 KiB and is decrypted as a whole. Pieces of memory that are smaller are therefore
gathered before they are encrypted, and scattered after they were decrypted; larger ones are not copied once more. The
library reads and writes memory, and the socket is read and written for many records at once: on its own it would
ask the kernel twice for each.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from kvbridge.link import tcp
from kvbridge.link.waiting import readable, writable

_log = logging.getLogger(__name__)

RECORD_BYTES = 16_384
"""What one record holds at most."""
_AT_ONCE_BYTES_MAX = 16 * RECORD_BYTES
"""What is encrypted or decrypted in one call."""
_WORTH_WAKING_BYTES = 256 << 10
"""Fewer bytes than these are not worth waking up for, if more have to come."""
_TAKEN_IN_A_ROW_MAX = 2
"""As often the socket is asked with no content to show for it: whoever sends records that hold none keeps nobody."""
_OF_TCP = (socket.AF_INET, socket.AF_INET6)
_ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


class SecuredConnection:
    """Reads and writes as a socket that never waits does."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, server_name: str | None) -> None:
        """Take over a connection whose handshake is still to be made, with the server of this name or a client."""
        self._connection = connection
        if connection.family in _OF_TCP:
            # Otherwise the end of what is sent waits for word of what went before, and the other side for that end.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._came, self._goes, server_side=server_name is None, server_hostname=server_name
        )
        """What knows the other side's certificate."""
        self._encrypted = memoryview(b"")
        self._encrypted_of_bytes = 0
        self._arrived = memoryview(bytearray(2 * RECORD_BYTES))
        self._record = memoryview(b"")
        self._worth_waking_bytes = 1

    def __repr__(self) -> str:
        """Show how it is secured."""
        return f"<SecuredConnection {self.tls.version()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; whoever is owed more knows by the length that was announced."""
        self._connection.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    async def shake_hands(self) -> None:
        """Make the handshake.

        Raises:
            OSError: the other side went away, or its certificate is not good.
        """
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except ssl.SSLError:
                with suppress(OSError):  # Whoever has gone already does not hear it, and was refused all the same.
                    self._push()  # It says what is wrong to the other side.
                raise
            else:
                await self._flush()
                return

    # What has come

    def recv(self, nbytes: int, /) -> bytes:
        """Return what has come; as a socket does."""
        content = memoryview(bytearray(nbytes))
        return bytes(content[: self.recvmsg_into([content])[0]])

    def recvmsg_into(self, views: Sequence[memoryview], /) -> tuple[int, object, object, object]:
        """Put what has come into pieces of memory, in order; as a socket does."""
        room = sum(view.nbytes for view in views)
        if room > RECORD_BYTES and self._arrived.nbytes < _AT_ONCE_BYTES_MAX:
            self._make_room()
        nbytes, takes, left = 0, 0, deque(view for view in views if view.nbytes)
        while left and nbytes < _AT_ONCE_BYTES_MAX:
            try:
                read = self._next_into(left, room - nbytes)
            except ssl.SSLWantReadError:
                takes += 1
                if takes > _TAKEN_IN_A_ROW_MAX and not nbytes:
                    raise BlockingIOError from None
                if takes > _TAKEN_IN_A_ROW_MAX or not self._has_taken(missing_bytes=0 if nbytes else room):
                    break
                continue
            except _ENDS:
                break
            if not read:
                break  # The other side has said that this is the end.
            nbytes, takes = nbytes + read, 0
        return nbytes, None, None, None

    def _make_room(self) -> None:
        self._arrived = memoryview(bytearray(_AT_ONCE_BYTES_MAX))
        self._record = memoryview(bytearray(RECORD_BYTES))

    def _next_into(self, left: deque[memoryview], room: int) -> int:
        """Put one record, or its rest, into the next of these pieces, and take off what is full."""
        if left[0].nbytes >= RECORD_BYTES or not self._record.nbytes or len(left) == 1:
            read = _number(self.tls.read(left[0].nbytes, left[0]))
            _fill(left, read)
            return read
        read = _number(self.tls.read(min(room, RECORD_BYTES), self._record))
        content = self._record[:read]
        while content.nbytes:
            taken = min(left[0].nbytes, content.nbytes)
            left[0][:taken] = content[:taken]
            content = content[taken:]
            _fill(left, taken)
        return read

    def _has_taken(self, *, missing_bytes: int) -> bool:
        """Give the library what the socket has; False if it has nothing and `missing_bytes` are not worth waiting for.

        Raises:
            BlockingIOError: it has nothing, and they are.
        """
        try:
            nbytes = self._connection.recv_into(self._arrived)
        except BlockingIOError:
            if not missing_bytes:
                return False
            self._wake_for(min(missing_bytes, _WORTH_WAKING_BYTES) - RECORD_BYTES)
            raise
        if nbytes:
            self._came.write(self._arrived[:nbytes])
        else:
            self._came.write_eof()
        return True

    def _wake_for(self, nbytes: int) -> None:
        """Have the kernel say that something has come once it is so much; a part of a record may be here already."""
        nbytes = max(nbytes, 1)
        if nbytes != self._worth_waking_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._worth_waking_bytes = nbytes

    async def _more(self) -> None:
        while True:
            try:
                self._has_taken(missing_bytes=1)
            except BlockingIOError:
                await readable(self)
            else:
                return

    # What goes

    def send(self, content: bytes | memoryview, /) -> int:
        """Send some of it; as `sendmsg`."""
        return self.sendmsg([memoryview(content)])

    def sendmsg(self, views: Sequence[memoryview], /) -> int:
        """Send some of these pieces of memory, in order; as a socket does.

        If it raises it has to be called with the same again: that it has sent something it says when all has gone.
        """
        if not self._encrypted_of_bytes:
            self._encrypted_of_bytes = self._encrypt(views)
        self._push()
        sent, self._encrypted_of_bytes = self._encrypted_of_bytes, 0
        return sent

    def _encrypt(self, views: Sequence[memoryview]) -> int:
        """Encrypt as much as goes in one call, and return how much that was."""
        nbytes, small = 0, list[memoryview]()
        for view in views:
            piece = view[: _AT_ONCE_BYTES_MAX - nbytes]
            nbytes += piece.nbytes
            if piece.nbytes < RECORD_BYTES:
                small.append(piece)
            else:
                self._encrypt_gathered(small)
                self.tls.write(piece)
            if nbytes >= _AT_ONCE_BYTES_MAX:
                break
        self._encrypt_gathered(small)
        return nbytes

    def _encrypt_gathered(self, small: list[memoryview]) -> None:
        if small:
            self.tls.write(b"".join(small))
            small.clear()

    def _push(self) -> None:
        """Send everything that is encrypted.

        Raises:
            BlockingIOError: the socket takes no more.
        """
        while self._encrypted or self._goes.pending:
            if not self._encrypted:
                self._encrypted = memoryview(self._goes.read())
            self._encrypted = self._encrypted[self._connection.send(self._encrypted) :]

    async def _flush(self) -> None:
        while True:
            try:
                self._push()
            except BlockingIOError:
                await writable(self)
            else:
                return


def _number(read: bytes | int) -> int:
    assert isinstance(read, int), "it reads into memory"
    return read


def _fill(left: deque[memoryview], nbytes: int) -> None:
    """Go on behind so many bytes of the first of these pieces."""
    if nbytes == left[0].nbytes:
        left.popleft()
    else:
        left[0] = left[0][nbytes:]


async def secured(
    connection: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None
) -> SecuredConnection:
    """Secure a connection, to the server that must be called `server_name`, or, without one, from a client.

    The connection is taken over, and closed if that fails.

    Raises:
        OSError: the other side went away, or its certificate is not good.
    """
    try:
        wrapped = SecuredConnection(connection, context, server_name=server_name)
        await wrapped.shake_hands()
    except BaseException:
        connection.close()
        raise
    return wrapped


async def connect(
    host: str, port: int, *, context: ssl.SSLContext | None, server_name: str, seconds_max: float
) -> socket.socket | SecuredConnection | None:
    """Return a connection to another node's port for bytes, or None if there is none to be had that is secured."""
    try:
        async with asyncio.timeout(seconds_max):
            connection = await tcp.connect(host, port, seconds_max=seconds_max)
            if connection is None or context is None:
                return connection
            return await secured(connection, context, server_name=server_name)
    except (OSError, TimeoutError) as error:
        _log.warning("the port for bytes cannot be used", extra={"host": host, "port": port, "problem": str(error)})
        return None
