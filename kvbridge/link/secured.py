"""A TCP connection for bytes that is secured by TLS; what `kvbridge.link.tcp` does with plain ones, it does with it.

A record of TLS holds at most 16 KiB and is decrypted as a whole. Pieces of memory that are smaller are therefore
gathered before they are encrypted, and scattered after they were decrypted; larger ones are not copied once more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvbridge.link import tcp
from kvbridge.link.waiting import readable, writable

_log = logging.getLogger(__name__)

RECORD_BYTES = 16_384
"""What one record holds at most."""
_GATHERED_BYTES_MAX = 4 * RECORD_BYTES
_AT_ONCE_BYTES_MAX = 16 * RECORD_BYTES
"""What is encrypted before other work gets its turn; a call says that it has sent all of it, or has to be repeated."""


class SecuredConnection:
    """Reads and writes as a socket that never waits does."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        """Take over a connection whose handshake is still to be made."""
        self._connection = connection

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
        with _as_of_sockets():
            return self._connection.recv(nbytes)

    def recvmsg_into(self, views: Sequence[memoryview], /) -> tuple[int, object, object, object]:
        """Put what has come into pieces of memory, in order; as a socket does."""
        if len(views) == 1 or views[0].nbytes >= RECORD_BYTES:
            with _as_of_sockets():
                return self._connection.recv_into(views[0]), None, None, None
        content = memoryview(self.recv(min(_GATHERED_BYTES_MAX, sum(view.nbytes for view in views))))
        nbytes = content.nbytes
        for view in views:
            taken = min(view.nbytes, content.nbytes)
            view[:taken] = content[:taken]
            content = content[taken:]
            if not content.nbytes:
                break
        return nbytes, None, None, None

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
            gathered.append(view[: _GATHERED_BYTES_MAX - nbytes])
            nbytes += gathered[-1].nbytes
            if nbytes >= _GATHERED_BYTES_MAX:
                break
        return self.send(b"".join(gathered))


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
