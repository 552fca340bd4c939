"""Which way bytes take, and who can ask for them at the port that is for bytes alone."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from kvbridge.link.tcp import MAGIC
from tests.harness import wait_for
from tests.network.nodes import PAYLOAD_BYTES, Pair, large_spec, running_pair


@pytest.fixture(name="by_tcp", scope="module")
def running_by_tcp() -> Iterator[Pair]:
    """Run one pair whose owner has a port for bytes."""
    with running_pair(transport="tcp") as pair:
        yield pair


def ask(pair: Pair, request: bytes) -> bytes:
    """Send something to the port for bytes and return all that comes back until it is closed."""
    with socket.create_connection(("127.0.0.1", pair.proxy.bulk.target_port), timeout=10) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while piece := connection.recv(65_536):
                answer += piece
        except ConnectionError:
            pass
        return answer


def request(name: str, token: str) -> bytes:
    """Return a request for the bytes of a lease."""
    return MAGIC + struct.pack("<HHHH", len(name), len(token), 0, 0) + name.encode() + token.encode()


def test_bytes_take_the_way_that_the_owner_tells_of(by_tcp: Pair) -> None:
    """All of them come from the port for bytes, and calls alone from the other."""
    spec = large_spec("ways")
    by_tcp.producer.publish(spec)
    by_tcp.proxy.behave()
    part = by_tcp.acquire(spec)
    assert part.WhichOneof("directive") == "kv"
    assert by_tcp.proxy.bulk.passed_bytes == PAYLOAD_BYTES + 8
    assert by_tcp.proxy.passed_bytes - by_tcp.proxy.bulk.passed_bytes < PAYLOAD_BYTES / 10
    by_tcp.consumer.release(part.kv.lease_token)


def test_bytes_come_with_the_calls_where_the_other_way_is_barred() -> None:
    """A port that cannot be connected to costs nobody the cache."""
    with running_pair(transport="tcp") as pair:
        spec = large_spec("barred")
        pair.producer.publish(spec)
        pair.proxy.bulk.bar()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", pair.proxy.bulk.port))
        part = pair.acquire(spec)
        assert part.WhichOneof("directive") == "kv"
        pair.consumer.release(part.kv.lease_token)


def test_only_who_holds_the_lease_gets_bytes(by_tcp: Pair) -> None:
    """Garbage, half a request, another client's name and a token that is not live get nothing, and the node goes on."""
    spec = large_spec("private")
    _, content = by_tcp.producer.publish(spec)
    lease = by_tcp.producer.acquire(spec).kv.lease_token
    mine = request(by_tcp.producer.name, lease)
    for wrong in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        mine[:20],
        mine[:-1],
        request("somebody-else-entirely", lease),
        request(by_tcp.producer.name, "x" * 32),
        request("", lease),
        MAGIC + struct.pack("<HHHH", 9999, 9999, 0, 0),
        MAGIC + struct.pack("<HHHH", 32, 32, 0, 9999),
        request(by_tcp.producer.name, "é"),
    ):
        assert ask(by_tcp, wrong) == b""
    assert ask(by_tcp, mine) == struct.pack("<Q", PAYLOAD_BYTES) + content.tobytes()
    by_tcp.producer.release(lease)
    assert ask(by_tcp, mine) == b""
    wait_for(lambda: not by_tcp.producer.arena_usage().leases)
    assert "Traceback" not in by_tcp.owner.log
