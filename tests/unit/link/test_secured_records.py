"""How many records of TLS one call moves, and what a call is owed that has to be repeated."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvbridge.link.secured import RECORD_BYTES, SecuredConnection, secured
from kvbridge.tls import TlsFiles, client_context, read_material, server_context
from tests.certificates import LOCAL, Authority, Secret

CONTENT = bytes(range(256)) * 1024
"""As much as one call encrypts: sixteen records."""


@asynccontextmanager
async def pair(
    directory: Path, *, buffer_bytes: int, ends: tuple[socket.socket, socket.socket] | None = None
) -> AsyncIterator[tuple[SecuredConnection, SecuredConnection]]:
    """Yield both ends of a connection whose wire holds so much."""
    authority = Authority()
    secret = Secret(directory / "secret", authority.issue(*LOCAL), authority.certificate)
    files = TlsFiles(certificate=secret.certificate, key=secret.key, ca=secret.ca)
    material = read_material(files)
    ends = ends or socket.socketpair()
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    served, called = await asyncio.gather(
        secured(ends[0], server_context(material, files)),
        secured(ends[1], client_context(material, files), server_name="localhost"),
    )
    with served, called:
        yield served, called


def pieces(content: bytearray, size: int) -> list[memoryview]:
    """Return memory in pieces of one size."""
    return [memoryview(content)[at : at + size] for at in range(0, len(content), size)]


@pytest.mark.parametrize("size", [100, 4096, RECORD_BYTES, len(CONTENT)])
async def test_one_call_takes_every_record_that_has_come(tmp_path: Path, size: int) -> None:
    """Whatever pieces they are for."""
    arrived = bytearray(len(CONTENT))
    async with pair(tmp_path, buffer_bytes=4 << 20) as (served, called):
        assert served.sendmsg(pieces(bytearray(CONTENT), size)) == len(CONTENT)
        assert called.recvmsg_into(pieces(arrived, size))[0] == len(CONTENT)
        with pytest.raises(BlockingIOError):
            called.recvmsg_into([memoryview(arrived)])
    assert arrived == CONTENT


async def test_what_does_not_fit_the_wire_is_sent_once(tmp_path: Path) -> None:
    """A call that raises is repeated until it has sent all that it began with, and nothing is sent twice."""
    arrived = bytearray(2 * len(CONTENT))
    async with pair(tmp_path, buffer_bytes=8192) as (served, called):
        sent = received = repeated = 0
        while received < len(arrived):
            try:
                if sent < len(arrived):
                    sent += served.send(CONTENT)
            except BlockingIOError:
                repeated += 1
            try:
                received += called.recvmsg_into([memoryview(arrived)[received:]])[0]
            except BlockingIOError:
                continue
    assert sent == received == len(arrived)
    assert repeated > 5
    assert arrived == 2 * CONTENT


async def test_an_end_is_told_after_everything_that_came_before(tmp_path: Path) -> None:
    """As a socket tells it, by nothing."""
    arrived = bytearray(len(CONTENT))
    async with pair(tmp_path, buffer_bytes=4 << 20) as (served, called):
        served.send(CONTENT[:50_000])
        served.close()
        assert called.recvmsg_into([memoryview(arrived)])[0] == 50_000
        assert called.recvmsg_into([memoryview(arrived)])[0] == 0
        assert called.recv(10) == b""


@pytest.mark.parametrize("sent", [0, 50_000])
@pytest.mark.parametrize("size", [100, len(CONTENT)])
async def test_an_end_that_is_said_is_one(tmp_path: Path, size: int, sent: int) -> None:
    """Other libraries say it before they hang up, and whoever means harm says it and does not."""
    arrived = bytearray(len(CONTENT))
    async with pair(tmp_path, buffer_bytes=4 << 20) as (served, called):
        if sent:
            served.send(CONTENT[:sent])
        with pytest.raises(ssl.SSLWantReadError):
            served.tls.unwrap()
        await served._flush()
        if sent:
            assert called.recvmsg_into(pieces(arrived, size))[0] == sent
        assert called.recvmsg_into(pieces(arrived, size))[0] == 0
        assert called.recv(10) == b""


async def test_records_that_hold_nothing_keep_nobody(tmp_path: Path) -> None:
    """There are such, and whoever sends them without end would have all of the event loop."""
    async with pair(tmp_path, buffer_bytes=4 << 20) as (served, called):
        read = 0

        def nothing(*_: object) -> bytes:
            """Find a record with nothing in it; the next one is there already."""
            nonlocal read
            read += 1
            assert read < 1000
            called._came.read()
            served._connection.send(bytes(100))
            raise ssl.SSLWantReadError

        called.tls.read = nothing  # type: ignore[assignment, method-assign] # no library sends any
        with pytest.raises(BlockingIOError):
            called.recv(10)


async def test_no_end_waits_for_word_of_what_went_before(tmp_path: Path) -> None:
    """A wait of 40 ms for each payload, on both sides of TCP; other kinds of sockets have none of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        called = socket.create_connection(listener.getsockname())
        served, _ = listener.accept()
    for end in (called, served):
        end.setblocking(False)
    async with pair(tmp_path, buffer_bytes=1 << 20, ends=(served, called)):
        assert all(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in (called, served))
