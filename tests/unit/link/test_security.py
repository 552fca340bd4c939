"""What a node shows to other nodes, and when it makes its connections anew."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from kvbridge.link.grpc_peer import GrpcPeer, KnownPeers
from kvbridge.link.port import OwnerUnreachableError, TransferFailedError
from kvbridge.link.security import UNSECURED, FromFiles
from kvbridge.tls import TlsFiles, TlsKeeper, TokenFile
from kvbridge.v1 import peer_service_pb2 as pb
from tests.certificates import LOCAL, Authority, Secret
from tests.unit.link.test_secured import Pieces

AUTHORITY = Authority()
NAME = "node.test.0123456789"
SECONDS = 10.0
TOKEN = "a-token-that-nobody-guesses-0123456789"


class Owner:
    """Answers pings and takes leases back, and remembers with what metadata they came."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str | bytes]] = []
        self.port = 0
        self._server = aio.server()

    async def start(self) -> None:
        """Listen."""
        for service, method in (("PeerService", "Ping"), ("HandoffService", "Release"), ("HandoffService", "Renew")):
            handler = grpc.unary_unary_rpc_method_handler(self._answer)
            name = f"kvbridge.v1.{service}"
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {method: handler}),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def stop(self) -> None:
        """Stop."""
        await self._server.stop(None)

    async def _answer(self, _: bytes, context: aio.ServicerContext[Any, Any]) -> bytes:
        self.seen.append(dict(context.invocation_metadata() or ()))
        return pb.PingResponse(node_id="owner", epoch=7).SerializeToString()


@pytest.fixture(name="owner")
async def running_owner() -> AsyncIterator[Owner]:
    """Run an owner."""
    owner = Owner()
    await owner.start()
    yield owner
    await owner.stop()


async def test_a_token_goes_with_every_call_as_its_file_has_it(owner: Owner, tmp_path: Path) -> None:
    """Without one nothing is asked, and the tenant goes with what is about a lease alone."""
    path = tmp_path / "token"
    security = FromFiles(None, TokenFile(str(path)))
    peer = GrpcPeer("owner", f"127.0.0.1:{owner.port}", client_name=NAME, security=security)
    with pytest.raises(OwnerUnreachableError, match="token file"):
        await peer.ping(seconds_max=SECONDS)
    with pytest.raises(TransferFailedError, match="token file"):
        await peer.pull("lease", Pieces(bytearray(8), [8]), seconds_max=SECONDS, tenant="team-a")
    await peer.release("lease", seconds_max=SECONDS, tenant="team-a")
    assert owner.seen == []
    for token in (TOKEN, TOKEN.upper()):
        path.write_text(token)
        await peer.ping(seconds_max=SECONDS)
        await peer.renew("lease", seconds_max=SECONDS, tenant="team-a")
    assert [seen["authorization"] for seen in owner.seen] == [
        f"Bearer {token}" for token in (TOKEN, TOKEN.upper()) for _ in "12"
    ]
    assert [seen.get("kvbridge-tenant") for seen in owner.seen] == [None, "team-a"] * 2
    assert TOKEN not in repr(security) + repr(peer)
    await peer.close()


async def test_connections_are_made_anew_when_certificates_change(tmp_path: Path) -> None:
    """Whoever is looked up then is another object; the old one goes on with what it began."""
    secret = Secret(tmp_path / "secret", AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
    files = TlsFiles(certificate=secret.certificate, key=secret.key, ca=secret.ca)
    keeper = TlsKeeper("peer", files, poll_seconds=1, warning_seconds=0)
    security = FromFiles(keeper, None)
    peers = KnownPeers({"owner": "127.0.0.1:1"}, client_name=NAME, security=security)
    first, context = peers.find("owner"), security.context()
    assert peers.find("owner") is first
    assert security.context() is context
    secret.put(AUTHORITY.issue(*LOCAL), AUTHORITY.certificate)
    keeper.take(keeper.look())
    assert peers.find("owner") is not first
    assert security.context() is not context
    await peers.close()


def test_what_a_certificate_has_to_name() -> None:
    """The node where that is asked for and known, and the host everywhere else."""
    by_host, by_node = FromFiles(None, None), FromFiles(None, None, named="node")
    assert by_host.server_name("[::1]:7411", "owner") == "::1"
    assert by_node.server_name("host.example:7411", "owner") == "owner"
    assert by_node.server_name("host.example:7411", "") == "host.example"
    assert (UNSECURED.server_name("host.example:7411", "owner"), UNSECURED.bearer()) == ("host.example", "")
