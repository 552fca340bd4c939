"""`GET /metrics` and `GET /healthz` over HTTP, in the node's event loop.

The loop's thread is the only one that may look at the ledger, so scrapes are answered there; other work gets its turn
after every family that was encoded. A connection serves one request, has a deadline for all of it, and counts against
a limit: clients that are slow or never read hold a place for a few seconds and nothing else. If no place is free, who
has had one longest loses it, so that nobody can keep a probe of `/healthz` out and have the node restarted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from functools import partial
from http import HTTPStatus
from typing import TypeAlias

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvbridge.tls import subjects_of

_log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
"""Most connections at once; the oldest makes room for one more."""
REQUEST_SECONDS_MAX = 5.0
"""How long one connection may take, from its first byte to its last."""
HEAD_BYTES_MAX = 8192
"""Longest request head."""
_OPENMETRICS_END = b"# EOF\n"
_PLAIN = "text/plain; charset=utf-8"
_CHALLENGE = "WWW-Authenticate: Bearer\r\n"
_ACCEPT_AGAIN_SECONDS = 1.0

_Encoder: TypeAlias = Callable[[Collector], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Requester:
    """What a request brings along to prove who makes it."""

    authorization: str = field(default="", repr=False)
    """Its `Authorization` header; empty without one."""
    encrypted: bool = False
    """Whether it came by TLS."""
    subjects: frozenset[str] = frozenset()
    """The names in its certificate, which has been verified."""


@unique
class Refusal(Enum):
    """Why a request is not answered, or not as it was meant."""

    UNAUTHENTICATED = auto()
    """Nothing proves who makes it."""
    NOT_PERMITTED = auto()
    """Whoever makes it may not read the metrics."""
    TOO_LATE = auto()
    """It did not end in time."""
    NOT_SECURED = auto()
    """It does not come by TLS, or with a certificate that is not good."""
    NO_REQUEST = auto()
    """It is none, or too long, or its client went away."""
    TOO_MANY_CONNECTIONS = auto()
    """Others came later, and it was the oldest."""


_OF_STATUS = {
    HTTPStatus.UNAUTHORIZED: Refusal.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: Refusal.NOT_PERMITTED,
}


class MetricsServer:
    """Serves what one collector collects."""

    def __init__(
        self,
        metrics: Collector,
        *,
        is_serving: Callable[[], bool],
        request_seconds_max: float = REQUEST_SECONDS_MAX,
        guard: Callable[[Requester], HTTPStatus] | None = None,
        context: Callable[[], ssl.SSLContext | None] = lambda: None,
        refused: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        """Show `metrics`; `is_serving` decides what `/healthz` says.

        `guard` says whether a scrape is answered, and `context` what secures the next connection; `refused` is told
        what is refused.
        """
        self._shown = metrics
        self._is_serving = is_serving
        self._request_seconds_max = request_seconds_max
        self._guard = guard
        self._context = context
        self._refused = refused
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first

    def __repr__(self) -> str:
        """Show how many connections there are."""
        return f"<MetricsServer with {len(self._connections)} connections>"

    async def start(self, address: str) -> int:
        """Listen on `HOST:PORT` and return the port.

        Raises:
            OSError: the address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, int(port)), family=family)
        self._listener.setblocking(False)  # noqa: FBT003 - it takes no name
        self._accepting = asyncio.get_running_loop().create_task(self._accept(self._listener))
        bound: int = self._listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, and break off what is under way."""
        if self._listener is None or self._accepting is None:
            return
        for task in (self._accepting, *self._connections):
            task.cancel()
        await asyncio.gather(self._accepting, *self._connections, return_exceptions=True)
        self._listener.close()
        self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # Such as no descriptor left.
                _log.warning("a scrape could not be accepted", extra={"problem": str(error)})
                await asyncio.sleep(_ACCEPT_AGAIN_SECONDS)
                continue
            if not self._make_room():
                connection.close()
                continue
            task = loop.create_task(self._serve(connection))
            self._connections[task] = None
            task.add_done_callback(partial(self._forget, connection))

    def _make_room(self) -> bool:
        """End the oldest connection if there are as many as there may be; False if all of them are ending already."""
        if len(self._connections) < CONNECTIONS_MAX:
            return True
        self._refused(Refusal.TOO_MANY_CONNECTIONS)
        oldest = next((task for task in self._connections if not task.cancelling()), None)
        return oldest is not None and oldest.cancel()

    def _forget(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        del self._connections[task]
        connection.close()  # Its transport has let go of it by now, if it ever had one.

    async def _serve(self, connection: socket.socket) -> None:
        writer: StreamWriter | None = None
        try:
            async with asyncio.timeout(self._request_seconds_max):
                reader, writer = await self._opened(connection)
                await self._answer(reader, writer)
        except TimeoutError:
            self._refused(Refusal.TOO_LATE)
        except (OSError, EOFError) as error:
            self._refused(Refusal.NOT_SECURED if isinstance(error, ssl.SSLError) else Refusal.NO_REQUEST)
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _opened(self, connection: socket.socket) -> tuple[StreamReader, StreamWriter]:
        """Return the streams of a connection, which is secured by what secures connections now."""
        loop = asyncio.get_running_loop()
        reader = StreamReader(limit=HEAD_BYTES_MAX, loop=loop)
        protocol = StreamReaderProtocol(reader, loop=loop)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._context())
        return reader, StreamWriter(transport, protocol, reader, loop)

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Read one request, answer it, and wait until the client has it all."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._response(head.decode("latin-1"), writer.get_extra_info("ssl_object")))
        except asyncio.LimitOverrunError:
            self._refused(Refusal.NO_REQUEST)
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long\n"))
        writer.close()
        await writer.wait_closed()

    async def _response(self, head: str, tls: ssl.SSLObject | None) -> bytes:
        request, *headers = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in {"GET", "HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n")
        response = await self._page(path, headers, tls)
        return response if method == "GET" else response[: response.index(b"\r\n\r\n") + 4]

    async def _page(self, path: str, headers: list[str], tls: ssl.SSLObject | None) -> bytes:
        if path == "/metrics":
            return self._refusal(headers, tls) or await self._metrics(_header(headers, "accept"))
        if path == "/healthz":
            serving = self._is_serving()
            status = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
            return _response(status, "serving\n" if serving else "draining\n")
        return _response(HTTPStatus.NOT_FOUND, "there are /metrics and /healthz\n")

    def _refusal(self, headers: list[str], tls: ssl.SSLObject | None) -> bytes | None:
        """Return what whoever may not read the metrics gets."""
        if self._guard is None:
            return None
        requester = Requester(
            authorization=_header(headers, "authorization"),
            encrypted=tls is not None,
            subjects=frozenset() if tls is None else subjects_of(tls),
        )
        status = self._guard(requester)
        if status in _OF_STATUS:
            self._refused(_OF_STATUS[status])
        return None if status is HTTPStatus.OK else _response(status, "the metrics are not for everybody\n")

    async def _metrics(self, accept: str) -> bytes:
        encoder, content_type = _encoder(accept)
        try:
            return _response(HTTPStatus.OK, await _encoded(self._shown, encoder), content_type)
        except Exception:  # noqa: BLE001 - an outermost boundary: a scrape that fails must not go unanswered
            _log.warning("metrics cannot be shown", exc_info=True)
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "the metrics cannot be shown\n")


class _OneFamily(Collector):
    """A family that was collected already."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


async def _encoded(shown: Collector, encoder: _Encoder) -> bytes:
    """Encode what is collected now, family by family, with turns for others in between."""
    encoded, ending = [], b""
    for family in list(shown.collect()):
        lines = encoder(_OneFamily(family))
        ending = _OPENMETRICS_END if lines.endswith(_OPENMETRICS_END) else b""
        encoded.append(lines.removesuffix(_OPENMETRICS_END))
        await asyncio.sleep(0)
    return b"".join(encoded) + ending


def _encoder(accept: str) -> tuple[_Encoder, str]:
    try:
        return choose_encoder(accept)
    except (TypeError, ValueError, LookupError):  # What it raises for versions that are no numbers.
        return choose_encoder("")


def _header(headers: list[str], wanted: str) -> str:
    pairs = (header.partition(":") for header in headers)
    values = (value.strip() for name, _, value in pairs if name.strip().lower() == wanted)
    return ",".join(values)


def _response(status: HTTPStatus, body: str | bytes, content_type: str = _PLAIN) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"{_CHALLENGE if status is HTTPStatus.UNAUTHORIZED else ''}"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + content
