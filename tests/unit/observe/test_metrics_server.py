"""Scrapes over HTTP: what is answered, and what clients of every kind cannot do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from prometheus_client.registry import Collector

from kvbridge.observe.metrics_server import CONNECTIONS_MAX, MetricsServer


@dataclass
class Served:
    """A server and what it shows."""

    server: MetricsServer
    port: int
    serving: bool = True


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """Serve one counter on a port of the system's choice."""
    registry = CollectorRegistry()
    Counter("kvbridge_things", "Things.", registry=registry).inc(3)
    Gauge("kvbridge_others", "Others.", ["kind"], registry=registry).labels("one").set(1)
    server = MetricsServer(registry, is_serving=lambda: state.serving, request_seconds_max=1.0)
    state = Served(server, await server.start("127.0.0.1:0"))
    yield state
    await server.close()


async def ask(port: int, request: str) -> tuple[str, str]:
    """Send a request and return head and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head, body


def get(path: str, *headers: str, method: str = "GET") -> str:
    """Return a request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""])


async def test_a_scrape_gets_every_sample(served: Served) -> None:
    """A client that names no format gets the plain one."""
    head, body = await ask(served.port, get("/metrics"))
    assert head.startswith("HTTP/1.1 200 OK")
    assert "text/plain; version=0.0.4" in head
    samples = {sample.name: sample.value for family in parse_plain(body) for sample in family.samples}
    assert samples["kvbridge_things_total"] == 3


async def test_openmetrics_is_given_to_who_asks_for_it(served: Served) -> None:
    """The format is negotiated as Prometheus does it."""
    head, body = await ask(
        served.port, get("/metrics?x=1", "Accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1")
    )
    assert "application/openmetrics-text; version=1.0.0" in head
    assert body.count("# EOF") == 1
    assert {"kvbridge_things", "kvbridge_others"} <= {family.name for family in parse_openmetrics(body)}  # type: ignore[no-untyped-call] # the library's own reader


async def test_health_tells_whether_the_node_serves(served: Served) -> None:
    """A load balancer sees a draining node as unhealthy."""
    assert (await ask(served.port, get("/healthz")))[0].startswith("HTTP/1.1 200 ")
    served.serving = False
    assert (await ask(served.port, get("/healthz")))[0].startswith("HTTP/1.1 503 ")


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (get("/"), 404),
        (get("/metrics/../etc"), 404),
        (get("/metrics", method="POST"), 405),
        ("\r\n\r\n", 405),
        ("nonsense\r\n\r\n", 405),
        (get("/metrics", "X: " + "x" * 20_000), 431),
    ],
)
async def test_other_requests_are_refused(served: Served, request_text: str, status: int) -> None:
    """Whatever comes, there is an answer and the server goes on."""
    head, _ = await ask(served.port, request_text)
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert (await ask(served.port, get("/metrics")))[0].startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "accept", ["", ";;;", "text/plain;version=x.y;escaping=\x01", "application/openmetrics-text;version=9"]
)
async def test_a_strange_accept_header_is_answered(served: Served, accept: str) -> None:
    """Negotiation never leaves a scrape without metrics."""
    head, body = await ask(served.port, get("/metrics", f"Accept: {accept}"))
    assert head.startswith("HTTP/1.1 200 ")
    assert "kvbridge_things_total 3.0" in body


async def test_head_has_no_body(served: Served) -> None:
    """HEAD tells the length alone."""
    head, body = await ask(served.port, get("/metrics", method="HEAD"))
    assert "Content-Length: " in head
    assert body == ""


async def test_slow_clients_lose_their_place(served: Served) -> None:
    """Clients that send nothing are cut off, and meanwhile cannot be more than a few."""
    silent = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(CONNECTIONS_MAX + 4)]
    for reader, _ in silent:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), timeout=10)
    for _, writer in silent:
        writer.close()
    assert (await ask(served.port, get("/metrics")))[0].startswith("HTTP/1.1 200 ")


async def test_clients_that_say_nothing_keep_no_probe_out(served: Served) -> None:
    """However many hold a connection, and come back when they lose it; who asks is answered."""
    silent = []
    for _ in range(3):
        silent += [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(CONNECTIONS_MAX)]
        assert (await ask(served.port, get("/healthz")))[0].startswith("HTTP/1.1 200 ")
    for _, writer in silent:
        writer.close()


class Broken(Collector):
    """A collector with a fault."""

    def collect(self) -> list[object]:  # type: ignore[override] # it never returns
        raise ValueError("broken")


async def test_a_fault_in_collecting_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """A scrape that cannot be answered fails visibly, and its fault is in the log, not in the answer."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Broken())
    server = MetricsServer(registry, is_serving=lambda: True)
    head, body = await ask(await server.start("127.0.0.1:0"), get("/metrics"))
    await server.close()
    assert head.startswith("HTTP/1.1 500 ")
    assert "broken" not in body
    assert "broken" in caplog.text


async def test_a_taken_port_is_an_error(served: Served) -> None:
    """Two servers never share an address."""
    other = MetricsServer(CollectorRegistry(), is_serving=lambda: True)
    with pytest.raises(OSError, match="in use"):
        await other.start(f"127.0.0.1:{served.port}")
    await other.close()


async def test_closing_breaks_off_what_is_under_way(served: Served) -> None:
    """A client that is connected does not hold up the end, and the port is free afterwards."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"GET /metrics HTTP/1.1\r\n")
    await writer.drain()
    await served.server.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
    await served.server.close()
    again = MetricsServer(CollectorRegistry(), is_serving=lambda: True)
    assert await again.start(f"127.0.0.1:{served.port}") == served.port
    await again.close()
