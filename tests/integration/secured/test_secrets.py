"""What is secret stands nowhere but in its own file."""

from __future__ import annotations

import http.client
from pathlib import Path

import grpc
import pytest

import kvbridge
from kvbridge.v1 import inspect_service_pb2
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceStub
from tests.harness import BridgeProcess, running_bridge
from tests.integration.client.kv import Contents
from tests.integration.secured.kit import NODE, TOKEN_A, TOKEN_METRICS, TOKEN_PEER, Kit
from tests.integration.secured.test_nodes import nodes_by_token, running_nodes, shown

WRONG = "wrong-token-" * 4


def metrics(bridge: BridgeProcess) -> str:
    """Return everything that is measured."""
    connection = http.client.HTTPConnection("127.0.0.1", bridge.metrics_port, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def require_absent(texts: list[str], secrets: list[str]) -> None:
    """Fail if any of these stands anywhere."""
    for secret in secrets:
        assert not [text for text in texts if secret in text], secret


def key_lines(*paths: str) -> list[str]:
    """Return what would give keys away."""
    return [line for path in paths for line in Path(path).read_text().splitlines() if "-----" not in line]


def test_no_output_of_a_bridge_repeats_a_secret(own_kit: Kit, tmp_path: Path) -> None:
    """Good and bad proofs, with debug logs: not in logs, metrics, the journal, errors, or what objects show."""
    journal, seen = tmp_path / "journal.jsonl", []
    flags = (*own_kit.flags(client_ca=False), "--metrics-listen", "127.0.0.1:0", "--log-level", "debug")
    with running_bridge(*flags, "--journal-file", str(journal)) as bridge:
        tls, target = kvbridge.Tls(ca=own_kit.server.ca), f"localhost:{bridge.tcp_port}"
        wrong = tmp_path / "wrong"
        wrong.write_text(WRONG)
        with kvbridge.connect(target, tls=tls, token_file=own_kit.token_file("engine")) as client:
            contents = Contents(1)
            contents.publish(client, "secretive")
            with contents.acquire(client, "secretive") as handoff:
                contents.assert_in(handoff)
            seen += [repr(client), repr(client.snapshot()), repr(handoff), str(client.explain(handoff.handoff_id))]
        with kvbridge.connect(target, tls=tls, token_file=str(wrong)) as client:
            refused = Contents().acquire(client, "secretive", text="t")
            seen += [str(refused.detail), repr(refused), repr(client), repr(client.snapshot())]
        credentials = grpc.ssl_channel_credentials(Path(own_kit.server.ca).read_bytes())
        proofs = (("authorization", f"Bearer {WRONG}"), ("kvbridge-client", "x" * 20))
        with grpc.secure_channel(target, credentials) as channel, pytest.raises(grpc.RpcError) as failed:
            InspectServiceStub(channel).GetNode(inspect_service_pb2.GetNodeRequest(), metadata=proofs)
        seen += [str(failed.value), repr(failed.value), metrics(bridge)]
        Path(own_kit.server.key).resolve().write_text("-----BEGIN PRIVATE KEY-----\nnonsense\n")
        bridge.stop()
        seen += [bridge.log, journal.read_text()]
    assert "secretive" in seen[-1]
    require_absent(seen, [TOKEN_A, WRONG, TOKEN_METRICS, *key_lines(own_kit.secret(NODE).key, own_kit.server.key)])


@pytest.mark.parametrize("by_tcp", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nodes_keep_their_secrets_from_each_others_logs(kit: Kit, by_tcp: bool) -> None:
    """A token goes with every call and every request for bytes, and into no log on either side."""
    certificate = kit.secret("unknown.example")
    flags = ("--peer-token-file", kit.token_file("peering"), *shown(certificate), "--log-level", "debug")
    with running_nodes(kit, *flags, by_tcp=by_tcp, client_ca=False) as nodes, nodes_by_token(nodes) as (here, there):
        contents = Contents(5)
        reference = contents.publish(here, "told to nobody").handoff_reference or ""
        with contents.acquire(there, reference) as handoff:
            contents.assert_in(handoff)
        seen = [nodes.owner.log, nodes.puller.log, str(there.explain(handoff.handoff_id)), str(there.node())]
    require_absent(seen, [TOKEN_PEER, TOKEN_A, *key_lines(certificate.key, kit.server.key)])
