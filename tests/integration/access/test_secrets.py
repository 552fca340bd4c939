"""Tokens, names of clients and tokens of leases stand in no log, no error, no record and no metric."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import grpc

from kvbridge.core.access import Role
from kvbridge.v1 import handoff_service_pb2 as handoff
from kvbridge.v1 import inspect_service_pb2 as inspect
from tests import builders
from tests.access import AccessFolder, bearer
from tests.api import ApiClient, random_content, upload_messages
from tests.harness import running_bridge

WRONG = "a-wrong-token-that-must-not-be-repeated-anywhere"


def test_no_secret_is_written_anywhere(tmp_path: Path) -> None:
    """Whatever is asked, rightly and wrongly, at the most talkative level of the log."""
    folder = AccessFolder(tmp_path, engine=(Role.PRODUCER, Role.CONSUMER, Role.ADMIN), rival=(Role.CONSUMER,))
    journal = tmp_path / "journal.jsonl"
    flags = ("--journal-file", str(journal), "--log-level", "debug", "--metrics-listen", "127.0.0.1:0")
    told: list[str] = []
    spec = builders.spec()
    with running_bridge(*folder.flags, *flags) as bridge:
        with folder.client(bridge, "engine") as engine, folder.client(bridge, "rival") as rival:
            engine.upload(upload_messages(spec, random_content(spec)))
            lease = engine.acquire(spec).kv.lease_token
            told += [_refusal(rival, "Reserve"), _refusal(rival, "Renew", lease)]
            told += [str(engine.call("GetNode", inspect.GetNodeRequest()))]
            told += [str(engine.call("ExplainHandoff", inspect.ExplainHandoffRequest(last=True)))]
            secrets = {*folder.tokens.values(), WRONG, engine.name, rival.name, lease}
        with ApiClient(bridge, attached=False, target=bridge.tcp_target, metadata=bearer(WRONG)) as stranger:
            told.append(_refusal(stranger, "GetNode"))
            secrets.add(stranger.name)
        with ApiClient(bridge) as attached, ApiClient(bridge, attached=False, name=attached.name) as other:
            other.extra_metadata = bearer(WRONG)
            told.append(_refusal(other, "GetNode"))
            secrets.add(attached.name)
        (tmp_path / "engine.token").write_text(f"{WRONG} {WRONG}\n", encoding="utf-8")
        folder.write("principals: [" + WRONG)
        told.append(_metrics(bridge.metrics_port))
        assert bridge.stop() == 0
        told.append(bridge.log)
    told.append(journal.read_text(encoding="utf-8"))
    assert len(told[-2]) > 1000
    assert '"principal"' in told[-1]
    assert [secret for secret in secrets if any(secret in text for text in told)] == []


def _refusal(client: ApiClient, method: str, *tokens: str) -> str:
    fields = {"tokens": tokens} if tokens else {}
    call = client.channel.unary_unary(  # type: ignore[call-arg] # without serializers it takes bytes
        f"/kvbridge.v1.{'InspectService' if method == 'GetNode' else 'HandoffService'}/{method}"
    )
    content = handoff.RenewRequest(**fields).SerializeToString() if fields else b""
    try:
        call(content, metadata=client.metadata, timeout=10.0)
    except grpc.RpcError as error:
        return f"{error.details()} {error.trailing_metadata()} {error!r}"
    raise AssertionError(f"{method} was answered")


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        return str(answer.read().decode())
