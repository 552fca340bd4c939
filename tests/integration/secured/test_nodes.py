"""Two nodes that prove to each other who they are, and pull for the tenants of both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

import kvbridge
from kvbridge import Reason
from tests.certificates import LOCAL, Secret
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import ENGINE_A, ENGINE_B, NODE, Kit, tls_of

SETTINGS = ("--peer-check-seconds", "0.1", "--peer-open-seconds", "5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """An owner and a puller, and how to reach them."""

    owner: BridgeProcess
    puller: BridgeProcess
    kit: Kit

    @contextmanager
    def clients(self, subject: str) -> Iterator[tuple[kvbridge.Bridge, kvbridge.Bridge]]:
        """Connect to both as one principal."""
        tls = tls_of(self.kit.secret(subject))
        with (
            kvbridge.connect(f"localhost:{self.owner.tcp_port}", tls=tls) as here,
            kvbridge.connect(f"localhost:{self.puller.tcp_port}", tls=tls) as there,
        ):
            yield here, there


@contextmanager
def running_nodes(
    kit: Kit, *peer_flags: str, by_tcp: bool = False, client_ca: bool = True, owner_secret: Secret | None = None
) -> Iterator[Nodes]:
    """Run both; `peer_flags` are what the puller shows to the owner."""
    bulk = ("--bulk-listen", "127.0.0.1:0") if by_tcp else ()
    own = (*(owner_secret or kit.server).server_flags(client_ca=client_ca), "--access", str(kit.access))
    with (
        running_bridge("--node-id", "owner", *own, *bulk, *SETTINGS) as owner,
        running_bridge(
            *("--node-id", "puller", "--peers", f"owner=127.0.0.1:{owner.tcp_port}", *kit.flags(), *SETTINGS),
            *("--peer-tls-ca", kit.server.ca, *peer_flags),
        ) as puller,
    ):
        yield Nodes(owner=owner, puller=puller, kit=kit)


def shown(secret: Secret) -> tuple[str, ...]:
    """Return the flags by which a node shows a certificate to others."""
    return ("--peer-tls-certificate", secret.certificate, "--peer-tls-key", secret.key)


def pulled_by(bridge: kvbridge.Bridge, contents: Contents, reference: str) -> str:
    """Acquire at the puller what the owner has, and return the way that the bytes took."""
    with contents.acquire(bridge, reference) as handoff:
        contents.assert_in(handoff)
    record = bridge.explain(handoff.handoff_id)
    assert record is not None
    return record.parts[0].pull.by


@pytest.mark.parametrize("proof", ["certificate", "token"])
@pytest.mark.parametrize("by_tcp", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_tenant_gets_what_is_its_own(kit: Kit, by_tcp: bool, proof: str) -> None:
    """By gRPC and by sockets, all of it secured; to the other tenant the payload is an unknown one."""
    if proof == "certificate":
        flags, client_ca = shown(kit.secret(NODE)), True
    else:
        flags, client_ca = ("--peer-token-file", kit.token_file("peering")), False
        # Without a certificate of another principal beside the token.
        flags = (*flags, *shown(kit.secret("unknown.example")))
    with (
        running_nodes(kit, *flags, by_tcp=by_tcp, client_ca=client_ca) as nodes,
        nodes.clients(ENGINE_A) if client_ca else nodes_by_token(nodes) as (here_a, there_a),
        ExitStack() as others,
    ):
        contents = Contents(1)
        reference = contents.publish(here_a, "a").handoff_reference
        assert reference is not None
        assert pulled_by(there_a, contents, reference) == ("tcp" if by_tcp else "grpc")
        if client_ca:
            here_b, there_b = others.enter_context(nodes.clients(ENGINE_B))
            denied = contents.acquire(there_b, reference, text="the text")
            assert (denied.reason, denied.text) == (Reason.PAYLOAD_UNKNOWN, "the text")
            of_b = Contents(2)
            other = of_b.publish(here_b, "b").handoff_reference
            assert other is not None
            assert pulled_by(there_b, of_b, other) == ("tcp" if by_tcp else "grpc")
            wait_for(lambda: not here_b.node().arena.leases)
        wait_for(lambda: not here_a.node().arena.leases)


@contextmanager
def nodes_by_token(nodes: Nodes) -> Iterator[tuple[kvbridge.Bridge, kvbridge.Bridge]]:
    """Connect to an owner that takes tokens alone, and to the puller."""
    trusted = kvbridge.Tls(ca=nodes.kit.server.ca)
    with (
        kvbridge.connect(
            f"localhost:{nodes.owner.tcp_port}", tls=trusted, token_file=nodes.kit.token_file("engine")
        ) as here,
        kvbridge.connect(f"localhost:{nodes.puller.tcp_port}", tls=tls_of(nodes.kit.secret(ENGINE_A))) as there,
    ):
        yield here, there


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("no peer", "takes the role peer"),
        pytest.param("nobody", "nothing proves who makes this call", marks=pytest.mark.slow),
        pytest.param("a stranger", "closed", marks=pytest.mark.slow),
        ("another node's name", "Hostname Verification"),
    ],
)
def test_a_node_that_proves_nothing_gets_nothing(kit: Kit, problem: str, says: str) -> None:
    """A principal without the role, an unknown or a stranger's certificate, and an owner that is somebody else."""
    flags = {
        "no peer": shown(kit.secret(ENGINE_A)),
        "nobody": shown(kit.secret("nobody.example")),
        "a stranger": shown(kit.secret(NODE, issuer=kit.stranger)),
        "another node's name": (*shown(kit.secret(NODE)), "--peer-tls-name", "node"),
    }
    with running_nodes(kit, *flags[problem], by_tcp=True) as nodes, nodes.clients(ENGINE_A) as (here, there):
        contents = Contents(3)
        reference = contents.publish(here, "denied").handoff_reference
        assert reference is not None
        denied = contents.acquire(there, reference, text="the text")
        assert (denied.reason, denied.text) == (Reason.OWNER_UNREACHABLE, "the text")
        assert says in str(denied.detail)


@pytest.mark.parametrize("by_tcp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_certificate_may_name_the_node_instead_of_its_host(kit: Kit, by_tcp: bool) -> None:
    """Where addresses come and go and names stay."""
    named = kit.secret("owner", *LOCAL) if by_tcp else kit.secret("owner", "localhost")
    flags = (*shown(kit.secret(NODE)), "--peer-tls-name", "node")
    with (
        running_nodes(kit, *flags, by_tcp=by_tcp, owner_secret=named) as nodes,
        nodes.clients(ENGINE_A) as (here, there),
    ):
        contents = Contents(4)
        reference = contents.publish(here, "named").handoff_reference
        assert reference is not None
        assert pulled_by(there, contents, reference) == ("tcp" if by_tcp else "grpc")


@pytest.mark.parametrize("by_tcp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pulls_go_on_while_certificates_are_replaced(own_kit: Kit, by_tcp: bool) -> None:
    """Those of both nodes, again and again; every payload arrives."""
    mine = own_kit.secret(NODE)
    with (
        running_nodes(own_kit, *shown(mine), by_tcp=by_tcp) as nodes,
        nodes.clients(ENGINE_A) as (here, there),
    ):
        stop, failed = threading.Event(), []
        pulled: list[str] = []

        def pull_all() -> None:
            while not stop.is_set():
                contents = Contents(len(pulled))
                reference = contents.publish(here, f"rotated/{len(pulled)}").handoff_reference or ""
                with contents.acquire(there, reference) as handoff:
                    if handoff.kv is None:
                        failed.append(str(handoff.detail))
                pulled.append(reference)

        pulling = threading.Thread(target=pull_all)
        pulling.start()
        try:
            for number in range(1, 4):
                seen = len(pulled)
                mine.put(own_kit.authority.issue(NODE), own_kit.authority.certificate)
                own_kit.server.put(own_kit.authority.issue(*LOCAL), own_kit.authority.certificate)
                wait_for(lambda number=number: changes(nodes) >= 3 * number, 30)  # type: ignore[misc]
                wait_for(lambda seen=seen: len(pulled) > seen + 2, 60)  # type: ignore[misc]
        finally:
            stop.set()
            pulling.join()
        assert failed == []


def changes(nodes: Nodes) -> int:
    """Return how often the owner's certificate, the puller's own and the one it shows to others were replaced."""
    return sum(node.log.count("certificate files changed") for node in (nodes.owner, nodes.puller))
