"""A directory behind TLS: the server that is at hand speaks none, so something terminates TLS before it, as is done."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from kvbridge.directory import DirectoryUnavailableError
from kvbridge.directory.redis import RedisDirectory
from tests.certificates import LOCAL, Authority, Issued
from tests.directory.servers import DirectoryServer, running_server
from tests.directory.test_contract import ENTRY
from tests.directory.worlds import A, B

_PIECE_BYTES = 1 << 16


@pytest.fixture(name="server", scope="module")
def plain_server() -> Iterator[DirectoryServer]:
    """Run a server."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Return who issues the server's certificate."""
    return Authority()


@asynccontextmanager
async def terminator(server: DirectoryServer, authority: Authority, folder: Path, *names: str) -> AsyncIterator[int]:
    """Take TLS connections for `server` with a certificate for `names`, and yield the port."""
    context = _context(authority.issue(*names), folder)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(_pump(reader, behind[1]), _pump(behind[0], writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as listening:
        yield listening.sockets[0].getsockname()[1]


def _context(issued: Issued, folder: Path) -> ssl.SSLContext:
    certificate, key = Path(folder, "server.pem"), Path(folder, "server.key")
    certificate.write_bytes(issued.certificate)
    key.write_bytes(issued.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    writer.close()


def opened(port: int, trusted: Authority, folder: Path) -> RedisDirectory:
    """Return a directory that trusts what `trusted` issues."""
    bundle = Path(folder, "ca.pem")
    bundle.write_bytes(trusted.certificate)
    return RedisDirectory(
        f"rediss://localhost:{port}/0?ssl_ca_certs={bundle}",
        prefix=f"test-{port}",
        ttl_seconds=10.0,
        key_ttl_seconds=60.0,
        timeout_seconds=5.0,
    )


async def test_nodes_find_keys_over_tls(server: DirectoryServer, authority: Authority, tmp_path: Path) -> None:
    """Beats, keys and look-ups are as without."""
    async with terminator(server, authority, tmp_path, *LOCAL) as port:
        first, second = (opened(port, authority, tmp_path) for _ in range(2))
        for directory in (first, second):
            await directory.start(lambda _: None)
        await first.beat(A)
        assert set((await second.beat(B)).members) >= {A.node_id, B.node_id}
        await first.announce(A, [ENTRY])
        found = await second.locate(ENTRY.tenant, [ENTRY.key])
        assert [location.node_id for location in found[ENTRY.key]] == [A.node_id]
        for directory in (first, second):
            await directory.close()


@pytest.mark.parametrize("fault", ["of another authority", "for another name"])
async def test_a_server_that_proves_nothing_is_not_asked(
    server: DirectoryServer, authority: Authority, tmp_path: Path, fault: str
) -> None:
    """Its certificate is checked like any other, and what follows is a directory that cannot be had."""
    names = ("elsewhere.example",) if fault == "for another name" else LOCAL
    trusted = Authority("another") if fault == "of another authority" else authority
    async with terminator(server, authority, tmp_path, *names) as port:
        directory = opened(port, trusted, tmp_path)
        await directory.start(lambda _: None)
        with pytest.raises(DirectoryUnavailableError, match="certificate"):
            await directory.beat(A)
        await directory.close()
