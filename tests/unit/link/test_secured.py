"""Bytes over connections that TLS secures: every piece in its place, whatever their sizes and however full the wire."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbridge.link import tcp
from kvbridge.link.port import TransferFailedError
from kvbridge.link.secured import SecuredConnection, connect, secured
from kvbridge.tls import TlsFiles, client_context, read_material, server_context, subjects_of
from tests.certificates import LOCAL, Authority, Secret

AUTHORITY = Authority()
REQUEST = tcp.BulkRequest(client_name="node.test.0123456789", lease_token="lease", tenant="team-a", bearer="b" * 40)
SECONDS = 30.0


@pytest.fixture(name="contexts")
def made_contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a server and a client use."""
    server = Secret(tmp_path / "server", AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
    client = Secret(tmp_path / "client", AUTHORITY.issue("node-b", "spiffe://cluster/b"), AUTHORITY.certificate)
    used = [TlsFiles(certificate=secret.certificate, key=secret.key, ca=secret.ca) for secret in (server, client)]
    return (
        server_context(read_material(used[0]), used[0], require_client=True),
        client_context(read_material(used[1]), used[1]),
    )


async def secured_pair(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], server_name: str = "localhost"
) -> tuple[SecuredConnection, SecuredConnection]:
    """Return both ends of a connection with little room on the wire."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    served, called = await asyncio.gather(
        secured(ends[0], contexts[0]), secured(ends[1], contexts[1], server_name=server_name), return_exceptions=True
    )
    if isinstance(served, SecuredConnection) and isinstance(called, SecuredConnection):
        return served, called
    for made in (served, called):
        if isinstance(made, SecuredConnection):
            made.close()
    raise called if isinstance(called, BaseException) else AssertionError(served)


class Pieces:
    """Memory in pieces; a `Source`, or what a `Sink` has room in."""

    def __init__(self, content: bytearray, sizes: Sequence[int]) -> None:
        self._content, self._sizes = content, list(sizes)
        self._at = 0

    @property
    def remaining_bytes(self) -> int:
        return len(self._content) - self._at

    def views(self) -> list[memoryview]:
        found, start, bound = [], 0, 0
        for size in self._sizes:
            start, bound = bound, bound + size
            if bound > self._at:
                found.append(memoryview(self._content)[max(start, self._at) : bound])
        return found[:40]

    room = views

    def look(self) -> None:
        pass

    def write(self, chunk: memoryview) -> None:
        raise NotImplementedError(chunk)

    def advance(self, nbytes: int) -> None:
        self._at += nbytes


def sizes(chance: random.Random, total: int) -> list[int]:
    """Return sizes of pieces, from one byte to several records."""
    found: list[int] = []
    while total:
        found.append(min(total, chance.choice((1, 64, 500, 4096, 16_383, 16_384, 16_385, 70_000))))
        total -= found[-1]
    return found


@pytest.mark.parametrize("seed", range(5))
async def test_bytes_arrive_as_they_were(contexts: tuple[ssl.SSLContext, ssl.SSLContext], seed: int) -> None:
    """Pieces are cut otherwise on either side, and the wire is full most of the time."""
    chance = random.Random(seed)
    content, arrived = bytearray(chance.randbytes(1 << 20)), bytearray(1 << 20)
    served, called = await secured_pair(contexts)

    async def serve() -> tcp.BulkRequest:
        request = await tcp.read_request(served)
        await tcp.send(served, len(content), Pieces(content, sizes(chance, len(content))), look_seconds=0.01)
        return request

    with served, called:
        assert subjects_of(served.tls) == {"node-b", "spiffe://cluster/b"}
        async with asyncio.timeout(SECONDS):
            sink = Pieces(arrived, sizes(chance, len(arrived)))
            request, _ = await asyncio.gather(serve(), tcp.receive(called, REQUEST, sink))
    assert request == REQUEST
    assert arrived == content
    assert "BulkRequest" in repr(request)
    assert "bbbb" not in repr(request)


async def test_a_stream_that_breaks_off_is_noticed(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Without a word of farewell, which a network does not give either."""
    content = bytearray(6 << 20)  # More than one turn.
    served, called = await secured_pair(contexts)

    async def serve() -> None:
        await tcp.read_request(served)
        with pytest.raises(RuntimeError):
            await tcp.send(served, len(content), Breaking(content, [1 << 20] * 6), look_seconds=1.0)
        served.close()

    class Breaking(Pieces):
        def look(self) -> None:
            if self.remaining_bytes < len(content):
                raise RuntimeError

    with called:
        async with asyncio.timeout(SECONDS):
            sink = Pieces(bytearray(len(content)), [len(content)])
            with pytest.raises(TransferFailedError, match="before the end"):
                await asyncio.gather(serve(), tcp.receive(called, REQUEST, sink))


async def test_another_name_is_not_believed(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Nor is anything sent to who shows it."""
    with pytest.raises(ssl.SSLCertVerificationError):
        await secured_pair(contexts, server_name="other.example")


async def test_a_port_that_speaks_no_tls_is_none(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Bytes come by gRPC then, which says what is wrong if it is the same there."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for context in (contexts[1], None):
            found = await connect("127.0.0.1", port, context=context, server_name="localhost", seconds_max=SECONDS)
            assert (found is None) is (context is not None)
            if found is not None:
                found.close()


async def test_rubbish_from_whoever_has_gone_is_still_rubbish(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """That nobody is left to be told of it is not what was wrong."""
    served, called = socket.socketpair()
    served.setblocking(False)
    with called:
        called.sendall(b"\x16\x03\x01\x00\x04\x01\x00\x00\x00")  # a greeting that says nothing
    with pytest.raises(ssl.SSLError):
        await secured(served, contexts[0])
