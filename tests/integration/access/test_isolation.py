"""Who may touch what: clients of other principals with a stolen name, other tenants, and sessions of other users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvbridge.core.access import Role
from kvbridge.core.descriptor import PayloadReference
from kvbridge.v1 import handoff_service_pb2 as handoff
from kvbridge.v1 import inspect_service_pb2 as inspect
from kvbridge.wire import encode_reference
from tests import builders
from tests.access import NOT_PERMITTED, OTHER_TENANT, TENANT, UNAUTHENTICATED, AccessFolder, refusal
from tests.api import ApiClient, acquire_request, random_content, request_id, upload_messages
from tests.harness import BridgeProcess, running_bridge

ENGINE = (Role.PRODUCER, Role.CONSUMER)
NAME = "a-name-that-somebody-overheard"
NOT_YOURS = (grpc.StatusCode.PERMISSION_DENIED, "NOT_YOURS")
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REFERENCE")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name two engines of one tenant, one of another, an admin there, and a node."""
    directory = tmp_path_factory.mktemp("access")
    everybody = {"engine": ENGINE, "rival": ENGINE, "engine_elsewhere": ENGINE, "admin_elsewhere": (Role.ADMIN,)}
    return AccessFolder(directory, **everybody, node_elsewhere=(Role.PEER,))


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge of two tenants."""
    journal = folder.directory / "journal.jsonl"
    with running_bridge(*folder.flags, "--journal-file", str(journal)) as process:
        yield process


@pytest.fixture
def engine(folder: AccessFolder, bridge: BridgeProcess) -> Iterator[ApiClient]:
    """Be an engine whose client's name is known to others."""
    with folder.client(bridge, "engine", name=NAME) as client:
        yield client


def publish(client: ApiClient, key: str) -> None:
    """Publish random values by value."""
    spec = builders.spec(key=key)
    assert client.upload(upload_messages(spec, random_content(spec))).commit.HasField("committed")


def leased(client: ApiClient, key: str) -> str:
    """Publish and lease, and return the lease's token."""
    publish(client, key)
    part = client.acquire(builders.spec(key=key))
    assert part.HasField("kv"), part
    return part.kv.lease_token


def touches(client: ApiClient, token: str) -> list[Any]:
    """Return calls that touch a lease."""
    release = handoff.ReleaseRequest(request_id=request_id(), tokens=[token])
    return [
        lambda: client.call("Renew", handoff.RenewRequest(tokens=[token])),
        lambda: list(client.download(token)),
        lambda: client.call("Release", release),
    ]


def test_a_stolen_name_and_token_are_of_no_use_to_another_principal(
    folder: AccessFolder, bridge: BridgeProcess, engine: ApiClient
) -> None:
    """The same name given by another principal is another client, in its own tenant and in any other."""
    token = leased(engine, "stolen/1")
    with folder.client(bridge, "rival", name=NAME) as rival:
        assert [refusal(touch) for touch in touches(rival, token)] == [NOT_YOURS] * 3
    with folder.client(bridge, "engine_elsewhere", name=NAME) as stranger:
        [renewed] = stranger.call("Renew", handoff.RenewRequest(tokens=[token])).references
        assert not renewed.HasField("time_to_live")
        assert [refusal(touch) for touch in touches(stranger, token)[1:]] == [UNKNOWN] * 2
    assert not engine.release(token).expired_tokens


def test_what_a_client_did_answers_nobody_else(folder: AccessFolder, bridge: BridgeProcess, engine: ApiClient) -> None:
    """The remembered answer to a request is for the principal that made it."""
    publish(engine, "answers/1")
    request = acquire_request(builders.spec(key="answers/1"))
    first = engine.call("Acquire", request)
    assert engine.call("Acquire", request).handoff_id == first.handoff_id
    with folder.client(bridge, "rival", name=NAME) as rival:
        answer = rival.call("Acquire", request)
        assert answer.handoff_id != first.handoff_id
        assert answer.parts[0].kv.lease_token != first.parts[0].kv.lease_token
        report = handoff.ReportRequest(
            request_id=request_id(), handoff_id=first.handoff_id, use=handoff.HANDOFF_USE_USED
        )
        assert refusal(lambda: rival.call("Report", report)) == UNKNOWN


def alike(answer: Any, *ids: str) -> str:
    """Return a whole answer but for ids and for what was asked after."""
    text = str(answer)
    for name in ids:
        text = text.replace(name, "(id)")
    return text


def test_another_tenants_payload_is_an_unknown_one(
    folder: AccessFolder, bridge: BridgeProcess, engine: ApiClient
) -> None:
    """Acquire, GetPayload, ListPayloads and ExplainHandoff answer as if it did not exist."""
    publish(engine, "private/1")
    handoff_id = engine.call("Acquire", acquire_request(builders.spec(key="private/1"))).handoff_id
    with folder.client(bridge, "engine_elsewhere") as stranger:
        answers = []
        for key in ("private/1", "nothing/1"):
            answer = stranger.call("Acquire", acquire_request(builders.spec(key=key)))
            answers.append(alike(answer, answer.handoff_id, key))
        assert answers[0] == answers[1]
        asked = [
            inspect.GetPayloadRequest(reference=encode_reference(PayloadReference(key=key, generation=0)))
            for key in ("private/1", "nothing/1")
        ]
        assert told(stranger, "GetPayload", asked[0]) == told(stranger, "GetPayload", asked[1])
        explained = [inspect.ExplainHandoffRequest(handoff_id=name) for name in (handoff_id, "never-given")]
        assert told(stranger, "ExplainHandoff", explained[0]) == told(stranger, "ExplainHandoff", explained[1])
        assert not stranger.call("ListPayloads", inspect.ListPayloadsRequest(key_prefix="private")).payloads
        last = stranger.call("ExplainHandoff", inspect.ExplainHandoffRequest(last=True)).record
        assert (last.tenant, last.principal) == (OTHER_TENANT, "engine_elsewhere")


def told(client: ApiClient, method: str, request: Any) -> tuple[object, ...]:
    """Return all that a refusal says."""
    with pytest.raises(grpc.RpcError) as caught:
        client.call(method, request)
    error: Any = caught.value
    return error.code(), error.details(), error.trailing_metadata()


def test_only_an_admin_looks_at_another_tenant(folder: AccessFolder, bridge: BridgeProcess, engine: ApiClient) -> None:
    """Others are refused alike whether the tenant that they name exists or not."""
    publish(engine, "seen/1")
    listing = inspect.ListPayloadsRequest(key_prefix="seen")
    for tenant in (TENANT, "no-such-tenant"):
        with folder.client(bridge, "engine_elsewhere", tenant=tenant) as stranger:
            assert refusal(lambda: stranger.call("ListPayloads", listing)) == NOT_PERMITTED
    with folder.client(bridge, "admin_elsewhere", tenant=TENANT) as admin:
        assert [payload.reference.key for payload in admin.call("ListPayloads", listing).payloads] == ["seen/1"]
        node = admin.call("GetNode", inspect.GetNodeRequest())
        assert (node.arena.arena_id, node.caller.tenant, node.caller.principal) == (
            f"host-{TENANT}",
            TENANT,
            "admin_elsewhere",
        )
        assert sorted(node.access.tenants) == [TENANT, OTHER_TENANT]
    with folder.client(bridge, "admin_elsewhere") as admin:
        assert not admin.call("ListPayloads", listing).payloads
    with folder.client(bridge, "admin_elsewhere", tenant="no-such-tenant") as admin:
        assert refusal(lambda: admin.call("ListPayloads", listing))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_node_touches_what_it_leased_for_any_tenant(
    folder: AccessFolder, bridge: BridgeProcess, engine: ApiClient
) -> None:
    """It names the tenant, and may call nothing else for it."""
    token = leased(engine, "peers/1")
    with folder.client(bridge, "node_elsewhere", tenant=TENANT, name=NAME) as node:
        assert [refusal(touch) for touch in touches(node, token)] == [NOT_YOURS] * 3
        assert refusal(lambda: node.call("GetNode", inspect.GetNodeRequest())) == NOT_PERMITTED
    engine.release(token)


def test_a_session_is_good_on_its_own_socket_alone(bridge: BridgeProcess) -> None:
    """Over TCP a live session's token is refused in the same words as an invented one."""
    with ApiClient(bridge) as owner:
        assert owner.call("GetNode", inspect.GetNodeRequest()).caller.principal == "owner"
        refusals = []
        for name in (owner.name, "session.invented-by-somebody"):
            with ApiClient(bridge, attached=False, target=bridge.tcp_target, name=name) as forger:
                refusals.append(told(forger, "GetNode", inspect.GetNodeRequest()))
        assert refusals[0] == refusals[1]
        assert refusals[0][0] is grpc.StatusCode.UNAUTHENTICATED


def test_two_proofs_of_two_principals_are_none(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """The session of one and the token of another do not add up; a proof given twice is none, either."""
    with ApiClient(bridge) as owner, ApiClient(bridge, attached=False) as other:
        owner.extra_metadata = folder.proof("engine")
        assert refusal(lambda: owner.call("GetNode", inspect.GetNodeRequest())) == UNAUTHENTICATED
        other.extra_metadata = (*folder.proof("engine"), *folder.proof("rival"))
        code, _ = refusal(lambda: other.call("GetNode", inspect.GetNodeRequest()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_token_counts_on_the_unix_socket(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Whoever may open the socket without a token is the owner; with one, whose it is."""
    with ApiClient(bridge, attached=False) as client:
        assert client.call("GetNode", inspect.GetNodeRequest()).caller.principal == "owner"
        client.extra_metadata = folder.proof("engine")
        caller = client.call("GetNode", inspect.GetNodeRequest()).caller
        assert (caller.principal, caller.tenant, list(caller.roles)) == ("engine", TENANT, [1, 2])


def test_a_record_tells_tenant_and_principal_and_no_secret(folder: AccessFolder, engine: ApiClient) -> None:
    """Neither the client's name nor a token stands in it."""
    leased(engine, "journal/1")
    record = engine.call("ExplainHandoff", inspect.ExplainHandoffRequest(last=True)).record
    assert (record.tenant, record.principal) == (TENANT, "engine")
    assert NAME not in str(record)
    assert folder.tokens["engine"] not in str(record)
