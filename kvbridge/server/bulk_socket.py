"""The port for bytes of payloads that other nodes pull over plain TCP; `kvbridge.link.tcp` says how."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from typing import Any, TypeAlias

from kvbridge.core.access import Proofs
from kvbridge.core.errors import BridgeError
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Payload
from kvbridge.link import tcp
from kvbridge.link.pieces import split
from kvbridge.link.port import TransferFailedError
from kvbridge.link.secured import SecuredConnection, secured
from kvbridge.node.bridge import Bridge
from kvbridge.node.encoding import EncodedStream, Look
from kvbridge.node.identity import Client
from kvbridge.node.streams import canonical_chunks
from kvbridge.node.traffic import Traffic
from kvbridge.observe.refusals import Refusals
from kvbridge.server.access import AccessControl, Caller, transport_of_host
from kvbridge.server.call_quotas import counted
from kvbridge.server.doors import BULK, NO_REQUEST, NOT_SECURED, TOO_LATE, TOO_MANY_CONNECTIONS
from kvbridge.server.doorstep import Doorstep
from kvbridge.server.errors import reason_of
from kvbridge.server.streams import Streams
from kvbridge.tls import subjects_of

CONNECTIONS_MAX = 256
"""Most connections at once, few of which have proved nothing; more are closed, and their nodes come by gRPC."""
WINDOW_BYTES = 1 << 20
"""Bytes that may have left the arena and not the host; what was found bad meanwhile stops behind so many."""
_REQUEST_SECONDS_MAX = 5.0
_LOOK_SECONDS = 1.0
_METHOD = "/kvbridge.v1.HandoffService/Download"
"""The method that gives the same bytes."""

_log = logging.getLogger(__name__)

_LetIn: TypeAlias = tuple[socket.socket | SecuredConnection, tcp.BulkRequest, Callable[[], Caller]]


class BulkSocketServer:
    """Sends leased payloads."""

    def __init__(
        self,
        bridge: Bridge,
        control: AccessControl,
        streams: Streams,
        refusals: Refusals,
        *,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """Send from the memory of `bridge` to whom `control` lets in; `context` secures the next connection.

        What is sent is counted in `streams`, as if it went by gRPC, and what is not in `refusals`.
        """
        self.port = 0
        self._bridge = bridge
        self._control = control
        self._streams = streams
        self._refusals = refusals
        self._context = context
        self._doorstep = Doorstep()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        """Show how many are sent."""
        return f"<BulkSocketServer at port {self.port}: {len(self._tasks)} tasks>"

    def start(self, address: str) -> None:
        """Listen on HOST:PORT.

        Raises:
            OSError: the address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._listener = socket.create_server(
            (host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
        self._listener.setblocking(False)  # noqa: FBT003 - it takes no name
        self.port = self._listener.getsockname()[1]
        self._begin(self._accept(self._listener))

    async def close(self) -> None:
        """Close every connection."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:  # Such as no descriptor left: whoever asked comes by gRPC.
                _log.warning("a connection for bytes could not be accepted", extra={"problem": str(error)})
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            if len(self._tasks) > CONNECTIONS_MAX or not self._doorstep.is_open_to(host):
                self._refusals.note(BULK, TOO_MANY_CONNECTIONS, host=host)
                connection.close()
                continue
            self._begin(self._serve(connection, host))

    async def _serve(self, connection: socket.socket, host: str) -> None:
        asker = _Asker()
        with ExitStack() as opened:
            opened.callback(connection.close)
            try:
                taken, request, admit = await self._let_in(connection, host, opened, asker)
            except (BridgeError, OSError, TimeoutError) as error:
                self._doorstep.note_failure(host)
                told = {"principal": asker.principal_of(error), "problem": getattr(error, "reason", None) or ""}
                self._refusals.note(BULK, _reason_of(error), host=host, **told)
                return
            try:
                with counted(self._bridge.quotas, _METHOD, admit()), self._streams.entered(admit()):
                    await self._send(taken, lambda: self._control.client_of(admit()), request)
            except BridgeError as error:
                # The other node finds its connection closed, and the lease answers everything else.
                told = {"principal": asker.principal_of(error), "limit": getattr(error, "limit", "")}
                self._refusals.note(BULK, reason_of(error), host=host, **told)
            except (OSError, TimeoutError) as error:
                _log.info("a stream of bytes ended early", extra={"problem": str(error)})

    async def _let_in(self, connection: socket.socket, host: str, opened: ExitStack, asker: _Asker) -> _LetIn:
        """Return a connection that is secured, what is asked for, and what tells each time by whom, `asker` with it.

        Raises:
            BridgeError: it asks for nothing that makes sense, nothing proves who asks, or others took its place.
            TimeoutError: it did not say so in time.
            OSError: it could not be secured, or went away.
        """
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW_BYTES)
        # Otherwise the end of what is sent waits for word of what went before, and the other side for that end.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._doorstep.waiting(host):
            async with asyncio.timeout(_REQUEST_SECONDS_MAX):
                taken = await self._secured(connection)
                opened.callback(taken.close)
                request = await tcp.read_request(taken)
            admit = partial(self._admit, _proofs(taken, request, host), request, asker)
            self._bridge.payload_of_lease(self._control.client_of(admit()), request.lease_token)
        return taken, request, admit

    async def _send(
        self, taken: socket.socket | SecuredConnection, admit: Callable[[], Client], request: tcp.BulkRequest
    ) -> None:
        if request.form.is_exact:
            source = LeasedSource(self._bridge, admit, request.lease_token)
            await tcp.send(taken, source.remaining_bytes, source, look_seconds=_LOOK_SECONDS)
            return

        def look() -> tuple[Payload, memoryview]:
            return self._bridge.payload_of_lease(admit(), request.lease_token)

        stream = self._bridge.encoded(look, request.form)
        async with aclosing(self._sources(stream, look)) as sources:
            await tcp.send_in_turn(taken, stream.nbytes, sources, look_seconds=_LOOK_SECONDS)

    async def _sources(self, stream: EncodedStream, look: Look) -> AsyncGenerator[FrameSource, None]:
        async with aclosing(stream.frames()) as frames:
            async for frame in frames:
                yield FrameSource(frame, look, self._bridge.traffic)

    async def _secured(self, connection: socket.socket) -> socket.socket | SecuredConnection:
        context = self._context()
        return connection if context is None else await secured(connection, context)

    def _admit(self, proofs: Proofs, request: tcp.BulkRequest, asker: _Asker) -> Caller:
        """Return who asks; errors as for `AccessControl.admit`."""
        caller = self._control.admit_proved(_METHOD, proofs, tenant=request.tenant, name=request.client_name)
        asker.principal = caller.principal.name
        return caller


class _Asker:
    """Who asks over one connection, for the log, which is told even if what is asked for is refused."""

    def __init__(self) -> None:
        self.principal = ""

    def principal_of(self, error: Exception) -> str:
        """Return who was refused; of one that may not ask at all the error knows, and of a stranger nobody."""
        return self.principal or getattr(error, "principal", "")


def _reason_of(error: BridgeError | OSError) -> str:
    """Return why a connection was not let in."""
    if isinstance(error, TimeoutError):
        return TOO_LATE
    if isinstance(error, ssl.SSLError):
        return NOT_SECURED
    return NO_REQUEST if isinstance(error, OSError | TransferFailedError) else reason_of(error)


def _proofs(taken: socket.socket | SecuredConnection, request: tcp.BulkRequest, host: str) -> Proofs:
    tls = taken.tls if isinstance(taken, SecuredConnection) else None
    return Proofs(
        transport=transport_of_host(host),
        encrypted=tls is not None,
        token=request.bearer or None,
        subjects=() if tls is None else tuple(sorted(subjects_of(tls))),
    )


class FrameSource:
    """One frame of a leased payload; a `tcp.Source`."""

    def __init__(self, frame: bytes, look: Look, traffic: Traffic) -> None:
        """Begin at the first byte, with a `look` at the lease each time."""
        self._rest = memoryview(frame)
        self._look = look
        self._traffic = traffic

    def look(self) -> None:
        """Look at the lease; errors as for `LeasedSource.look`."""
        self._look()

    def views(self) -> Sequence[memoryview]:
        """Return the rest."""
        return [self._rest] if self._rest.nbytes else []

    def advance(self, nbytes: int) -> None:
        """Go on behind so many bytes."""
        self._traffic.note_departure(nbytes, to_a_node=True)
        self._rest = self._rest[nbytes:]


class LeasedSource:
    """The canonical bytes of a leased payload; a `tcp.Source`."""

    def __init__(self, bridge: Bridge, admit: Callable[[], Client], token: str) -> None:
        """Begin at the first byte; `admit` tells at every look who asks, or raises why it may not.

        Raises:
            UnknownReferenceError: the lease is not live.
            NotYoursError: it belongs to another client.
        """
        self._bridge = bridge
        self._admit = admit
        self._token = token
        self._client = admit()
        payload, slot = bridge.payload_of_lease(self._client, token)
        descriptor = payload.descriptor
        assert descriptor is not None, payload
        layout = slot_layout(descriptor.geometry, descriptor.capacity_tokens)
        self.remaining_bytes = layout.canonical_bytes(descriptor.valid_length)
        self._chunks = canonical_chunks(slot, layout, descriptor.valid_length, chunk_bytes=bridge.config.chunk_bytes)
        self._pieces: list[memoryview] = []

    def look(self) -> None:
        """Look at the lease.

        Raises:
            UnknownReferenceError: it is not live any more.
            UnauthenticatedError: what proved who asks does not any more.
        """
        self._bridge.payload_of_lease(self._admit(), self._token)

    def views(self) -> Sequence[memoryview]:
        """Return the next bytes; none at the end."""
        if not self._pieces:
            with suppress(StopIteration):
                self._pieces = next(self._chunks)
        return self._pieces

    def advance(self, nbytes: int) -> None:
        """Go on behind so many bytes."""
        self.remaining_bytes -= nbytes
        self._bridge.traffic.note_departure(nbytes, to_a_node=self._client.is_node)
        _, self._pieces = split(self._pieces, nbytes)
