"""Bytes that a tenant fetches by TCP count as its calls do."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from kvbridge.core.access import Role
from kvbridge.link import tcp
from kvbridge.link.port import TransferFailedError
from tests import builders
from tests.access import AccessFolder
from tests.api import random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

SECONDS = 30.0
BURST = 6
LONG = 32_768
"""Tokens of a payload that does not fit into the buffers of two sockets."""


class Into:
    """Memory for a payload; a `Sink`."""

    def __init__(self, nbytes: int) -> None:
        self.content = bytearray(nbytes)
        self._at = 0

    @property
    def remaining_bytes(self) -> int:
        return len(self.content) - self._at

    def room(self) -> list[memoryview]:
        return [memoryview(self.content)[self._at :]] if self.remaining_bytes else []

    def write(self, chunk: memoryview) -> None:
        raise NotImplementedError(chunk)

    def advance(self, nbytes: int) -> None:
        self._at += nbytes


async def fetch(port: int, request: tcp.BulkRequest, nbytes: int) -> bytes:
    """Fetch a leased payload over a connection of its own."""
    connection = await tcp.connect("127.0.0.1", port, seconds_max=SECONDS)
    assert connection is not None
    with connection:
        into = Into(nbytes)
        await tcp.receive(connection, request, into)
    return bytes(into.content)


def bulk_port(bridge: BridgeProcess) -> int:
    """Return the port for bytes."""
    port: int = json.loads(next(line for line in bridge.log.splitlines() if '"serving"' in line))["bulk_port"]
    return port


def refused(bridge: BridgeProcess) -> list[tuple[str, str, str | None]]:
    """Return what the log tells of refusals at the port for bytes: why, whom, and the limit if it was one."""
    lines = map(json.loads, filter(lambda line: line.startswith("{"), bridge.log.splitlines()))
    told = [line for line in lines if line["event"] == "refused" and line["door"] == "bulk"]
    return [(line["reason"], line["principal"], line.get("limit")) for line in told]


async def test_a_tenant_above_its_rate_gets_no_bytes_by_tcp(tmp_path: Path) -> None:
    """Others do; nodes are never refused."""
    both = (Role.PRODUCER, Role.CONSUMER)
    folder = AccessFolder(tmp_path, limited_elsewhere=both, free=both)
    folder.tenants[1] |= {"requests_per_second": 0.001, "requests_burst": BURST}
    folder.write()
    spec, content = builders.spec(key="mine"), random_content(builders.spec(key="mine"))
    fetched: dict[str, int] = {}
    with running_bridge(*folder.flags, "--bulk-listen", "127.0.0.1:0") as bridge:
        for principal in ("limited_elsewhere", "free"):
            with folder.client(bridge, principal) as client:
                client.upload(upload_messages(spec, content))
                request = tcp.BulkRequest(
                    client_name=client.name,
                    lease_token=client.acquire(spec).kv.lease_token,
                    bearer=folder.tokens[principal],
                )
                fetched[principal] = 0
                for _ in range(2 * BURST):
                    try:
                        assert await fetch(bulk_port(bridge), request, len(content)) == content.tobytes()
                    except TransferFailedError:
                        break
                    fetched[principal] += 1
    # Two of its calls went by gRPC.
    assert fetched == {"limited_elsewhere": BURST - 2, "free": 2 * BURST}


async def test_a_tenants_streams_by_tcp_are_streams(tmp_path: Path) -> None:
    """Whoever has as many as one client may have gets no more, whichever way they go."""
    folder = AccessFolder(tmp_path, engine=(Role.PRODUCER, Role.CONSUMER))
    spec = builders.spec(key="long", capacity_tokens=LONG, tokens=builders.tokens(LONG))
    content = random_content(spec)
    flags = ("--streams-per-client-max", "1", "--bulk-listen", "127.0.0.1:0")
    with running_bridge(*folder.flags, *flags) as bridge, folder.client(bridge, "engine") as client:
        client.upload(upload_messages(spec, content))
        token = client.acquire(spec).kv.lease_token
        request = tcp.BulkRequest(client_name=client.name, lease_token=token, bearer=folder.tokens["engine"])
        slow = await tcp.connect("127.0.0.1", bulk_port(bridge), seconds_max=SECONDS)
        assert slow is not None
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with slow:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(slow, tcp._packed(request))
            assert await loop.sock_recv(slow, 8)
            with pytest.raises(TransferFailedError):
                await fetch(bulk_port(bridge), request, len(content))
        assert wait_for(lambda: refused(bridge)) == [("LIMIT_EXCEEDED", "engine", "streams_per_client_max")]


@pytest.mark.parametrize(("asker", "reason"), [("writer", "NOT_PERMITTED"), ("other", "NOT_YOURS")])
async def test_the_log_says_whom_the_port_for_bytes_refuses(asker: str, reason: str, tmp_path: Path) -> None:
    """Who may not read at all is known as well as who may, and asks for another client's lease."""
    folder = AccessFolder(tmp_path, writer=(Role.PRODUCER,), reader=(Role.CONSUMER,), other=(Role.CONSUMER,))
    spec = builders.spec(key="mine")
    with running_bridge(*folder.flags, "--bulk-listen", "127.0.0.1:0") as bridge:
        with folder.client(bridge, "writer") as writer, folder.client(bridge, "reader") as reader:
            writer.upload(upload_messages(spec, random_content(spec)))
            token = reader.acquire(spec).kv.lease_token
            request = tcp.BulkRequest(client_name="x" * 32, lease_token=token, bearer=folder.tokens[asker])
            with pytest.raises(TransferFailedError):
                await fetch(bulk_port(bridge), request, 1)
        assert wait_for(lambda: refused(bridge)) == [(reason, asker, None)]
