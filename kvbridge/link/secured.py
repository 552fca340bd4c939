"""A TCP connection for bytes that is secured by TLS; what `kvbridge.link.tcp` does with plain ones, it does with it.

A record of TLS holds at most 16 KiB and is decrypted as a whole. Pieces of memory that are smaller are therefore
gathered before they are encrypted, and scattered after they were decrypted; larger ones are not copied once more. As
many records as have come are taken at once: what is done between two of them takes longer than to decrypt one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvbridge.link import tcp
from kvbridge.link.waiting import readable, writable

_log = logging.getLogger(__name__)

RECORD_BYTES = 16_384
"""What one record holds at most."""
_AT_ONCE_BYTES_MAX = 16 * RECORD_BYTES
"""What is encrypted or decrypted in one call; one that sends has sent all of it, or has to be repeated."""
_WORTH_WAKING_BYTES = 512 << 10
"""Fewer bytes than these are not worth waking up for, if more have to come."""


class SecuredConnection:
    """Reads and writes as a socket that never waits does."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Take over a connection whose handshake is still to be made."""
        self._connection = connection
        self._record = memoryview(bytearray(RECORD_BYTES))
        self._worth_waking_bytes = 1

    def __repr__(self) -> str:
        """Show how it is secured."""
        return f"<SecuredConnection {self._connection.version()}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tls(self) -> ssl.SSLSocket:
        """Return what knows the other side's certificate."""
        return self._connection

    def close(self) -> None:
        """Hang up; whoever is owed more knows by the length that was announced."""
        self._connection.close()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    def recv(self, nbytes: int, /) -> bytes:
        """Return what has come; as a socket does."""
        self._wake_for(1)
        with _as_of_sockets():
            return self._connection.recv(nbytes)

    def recvmsg_into(self, views: Sequence[memoryview], /) -> tuple[int, object, object, object]:
        """Put what has come into pieces of memory, in order; as a socket does."""
        room = sum(view.nbytes for view in views)
        nbytes, left = 0, deque(views)
        while left and nbytes < _AT_ONCE_BYTES_MAX:
            try:
                read = self._next_into(left, room - nbytes)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                if not nbytes:
                    self._wake_for(min(room, _WORTH_WAKING_BYTES) - RECORD_BYTES)
                    raise BlockingIOError from error
                break
            if not read:
                break
            nbytes += read
        return nbytes, None, None, None

    def _next_into(self, left: deque[memoryview], room: int) -> int:
        """Put one record, or its rest, into the next of these pieces, and take off what is full."""
        if left[0].nbytes >= RECORD_BYTES or len(left) == 1:
            read = self._connection.recv_into(left[0])
            _fill(left, read)
            return read
        read = self._connection.recv_into(self._record, min(room, RECORD_BYTES))
        content = self._record[:read]
        while content.nbytes:
            taken = min(left[0].nbytes, content.nbytes)
            left[0][:taken] = content[:taken]
            content = content[taken:]
            _fill(left, taken)
        return read

    def _wake_for(self, nbytes: int) -> None:
        """Have the kernel say that something has come once it is so much; a part of a record may be here already."""
        nbytes = max(nbytes, 1)
        if nbytes != self._worth_waking_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._worth_waking_bytes = nbytes

    def send(self, content: bytes | memoryview, /) -> int:
        """Send some of it; as a socket does."""
        with _as_of_sockets():
            return self._connection.send(content)

    def sendmsg(self, views: Sequence[memoryview], /) -> int:
        """Send some of these pieces of memory, in order; as a socket does."""
        if len(views) == 1 or views[0].nbytes >= RECORD_BYTES:
            return self.send(views[0][:_AT_ONCE_BYTES_MAX])
        gathered, nbytes = [], 0
        for view in views:
            gathered.append(view[: _AT_ONCE_BYTES_MAX - nbytes])
            nbytes += gathered[-1].nbytes
            if nbytes >= _AT_ONCE_BYTES_MAX:
                break
        return self.send(b"".join(gathered))


def _fill(left: deque[memoryview], nbytes: int) -> None:
    """Go on behind so many bytes of the first of these pieces."""
    if nbytes == left[0].nbytes:
        left.popleft()
    else:
        left[0] = left[0][nbytes:]


class _as_of_sockets:  # noqa: N801 - it reads as a function, and one made by a generator would cost more than the call
    """Raises what a socket raises that would have to wait."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
            raise BlockingIOError from error


async def secured(
    connection: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None
) -> SecuredConnection:
    """Secure a connection, to the server that must be called `server_name`, or, without one, from a client.

    The connection is taken over, and closed if that fails.

    Raises:
        OSError: the other side went away, or its certificate is not good.
    """
    try:
        wrapped = SecuredConnection(
            context.wrap_socket(
                connection, server_side=server_name is None, server_hostname=server_name, do_handshake_on_connect=False
            )
        )
    except BaseException:
        connection.close()
        raise
    try:
        await _shake_hands(wrapped)
    except BaseException:
        wrapped.close()
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


async def _shake_hands(wrapped: SecuredConnection) -> None:
    while True:
        try:
            wrapped.tls.do_handshake()
        except ssl.SSLWantReadError:
            await readable(wrapped)
        except ssl.SSLWantWriteError:
            await writable(wrapped)
        else:
            return
