"""`GET /metrics` and `GET /healthz` over HTTP, in the node's event loop.

The loop's thread is the only one that may look at the ledger, so scrapes are answered there; other work gets its turn
after every family that was encoded. A connection serves one request, has a deadline for all of it, and counts against
a limit: clients that are slow or never read hold a place for a few seconds and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, TypeAlias

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16
"""Most connections at once; more are refused."""
REQUEST_SECONDS_MAX = 5.0
"""How long one connection may take, from its first byte to its last."""
HEAD_BYTES_MAX = 8192
"""Longest request head."""
_OPENMETRICS_END = b"# EOF\n"
_PLAIN = "text/plain; charset=utf-8"

_Encoder: TypeAlias = Callable[[Collector], bytes]


class MetricsServer:
    """Serves what one collector collects."""

    def __init__(
        self,
        metrics: Collector,
        *,
        is_serving: Callable[[], bool],
        request_seconds_max: float = REQUEST_SECONDS_MAX,
    ) -> None:
        """Show `metrics`; `is_serving` decides what `/healthz` says."""
        self._shown = metrics
        self._is_serving = is_serving
        self._request_seconds_max = request_seconds_max
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[Any], StreamWriter] = {}

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
        listener = socket.create_server((host, int(port)), family=family)
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=HEAD_BYTES_MAX)
        bound: int = listener.getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, and break off what is under way."""
        if self._server is None:
            return
        self._server.close()
        tasks = list(self._connections)
        for writer in self._connections.values():
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, self
        if len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._connections[task] = writer
        try:
            async with asyncio.timeout(self._request_seconds_max):
                await self._answer(reader, writer)
        except (TimeoutError, OSError, EOFError):
            writer.transport.abort()
        finally:
            del self._connections[task]

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Read one request, answer it, and wait until the client has it all."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(await self._response(head.decode("latin-1")))
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too long\n"))
        writer.close()
        await writer.wait_closed()

    async def _response(self, head: str) -> bytes:
        request, *headers = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in {"GET", "HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n")
        response = await self._page(path, headers)
        return response if method == "GET" else response[: response.index(b"\r\n\r\n") + 4]

    async def _page(self, path: str, headers: list[str]) -> bytes:
        if path == "/metrics":
            return await self._metrics(_header(headers, "accept"))
        if path == "/healthz":
            serving = self._is_serving()
            status = HTTPStatus.OK if serving else HTTPStatus.SERVICE_UNAVAILABLE
            return _response(status, "serving\n" if serving else "draining\n")
        return _response(HTTPStatus.NOT_FOUND, "there are /metrics and /healthz\n")

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
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + content
