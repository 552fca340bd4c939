"""Every call of every service, by principals of every role and by nobody: let in, or refused with nothing changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from kvbridge.core.access import Role
from kvbridge.server.permissions import PERMISSIONS
from kvbridge.v1 import catalog_service_pb2 as catalog
from kvbridge.v1 import handoff_service_pb2 as handoff
from kvbridge.v1 import inspect_service_pb2 as inspect
from kvbridge.v1 import peer_service_pb2 as peer
from kvbridge.wire import encode_model_tag, encode_spec
from tests import builders
from tests.access import NOT_PERMITTED, PLAIN, UNAUTHENTICATED, AccessFolder, reason_of
from tests.api import ApiClient, acquire_request, request_id
from tests.harness import BridgeProcess, running_bridge

CALL_SECONDS = 10.0
SERVICES = {
    service.full_name: [method.name for method in service.methods]
    for module in (catalog, handoff, inspect, peer, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
}
METHODS = [f"/{service}/{method}" for service, methods in SERVICES.items() for method in methods]
COMMON = {"Renew", "Release", "Watch", "GetNode", "GetPayload", "ListPayloads", "ExplainHandoff"}
READ_CATALOG = {"GetCatalog", "ListModels", "ListAligners", "ListRoutes", "ListQuarantines"}
CHANGE_CATALOG = {name for name in SERVICES["kvbridge.v1.CatalogService"] if name not in READ_CATALOG}
ALLOWED: dict[Role, set[str]] = {
    Role.PRODUCER: {"Reserve", "Commit", "Abort", "Upload"} | COMMON | READ_CATALOG,
    Role.CONSUMER: {"Acquire", "Download", "Report", "Prefetch"} | COMMON | READ_CATALOG,
    Role.ADMIN: (COMMON - {"Renew", "Release"}) | READ_CATALOG | CHANGE_CATALOG | {"ServerReflectionInfo"},
    Role.PEER: set(SERVICES["kvbridge.v1.PeerService"]) | {"Download", "Renew", "Release", "GetNode"},
    Role.METRICS: {"GetNode"},
}
"""What `docs/security.md` says, written down again."""


def requests() -> dict[str, Message]:
    """Return requests that would change something."""
    spec = encode_spec(builders.spec())
    tag = encode_model_tag(builders.model_tag())
    why = "nobody may"
    return {
        "Reserve": handoff.ReserveRequest(request_id=request_id(), spec=spec),
        "Acquire": acquire_request(builders.spec()),
        "SetKillSwitch": catalog.SetKillSwitchRequest(request_id=request_id(), engaged=True, why=why),
        "PutModel": catalog.PutModelRequest(request_id=request_id(), model=catalog.CatalogModel(tag=tag)),
        "RemoveModel": catalog.RemoveModelRequest(request_id=request_id(), tag=tag),
        "Quarantine": catalog.QuarantineRequest(
            request_id=request_id(),
            target=catalog.QuarantineTarget(model=catalog.ModelPattern(name="tiny")),
            why=why,
        ),
    }


def attempt(client: ApiClient, method: str) -> tuple[grpc.StatusCode, str]:
    """Call a method of whatever kind, and return code and reason of what is answered first."""
    request = requests().get(method.rpartition("/")[2])
    content = b"" if request is None else request.SerializeToString()
    channel: Any = client.channel
    call = channel.stream_stream(method)(iter([content]), metadata=client.metadata, timeout=CALL_SECONDS)
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code(), reason_of(error)
    finally:
        call.cancel()
    return grpc.StatusCode.OK, ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name one principal of each role."""
    return AccessFolder(tmp_path_factory.mktemp("access"), **PLAIN)


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge whose catalog is changed by calls."""
    with running_bridge(*folder.flags, "--unmeasured-tokens-min", "1") as process:
        yield process


def state(folder: AccessFolder, bridge: BridgeProcess) -> tuple[object, ...]:
    """Return everything that a refused call must not change."""
    with folder.client(bridge, Role.ADMIN.value) as admin:
        stub = admin.channel.unary_unary(
            "/kvbridge.v1.CatalogService/GetCatalog",
            request_serializer=catalog.GetCatalogRequest.SerializeToString,
            response_deserializer=catalog.GetCatalogResponse.FromString,
        )
        running = stub(catalog.GetCatalogRequest(), metadata=admin.metadata, timeout=CALL_SECONDS)
        channel: Any = admin.channel
        listing = channel.unary_unary("/kvbridge.v1.CatalogService/ListQuarantines")
        quarantines = listing(b"", metadata=admin.metadata, timeout=CALL_SECONDS)
        return admin.state(), running.version, running.catalog.kill_switch, quarantines


def test_every_method_stands_in_the_table() -> None:
    """What is served and not in it could be called by nobody; what is in it and not served is a mistake."""
    assert set(METHODS) <= set(PERMISSIONS)
    assert {method for method in PERMISSIONS if "kvbridge" in method} <= set(METHODS)


@pytest.mark.parametrize("role", list(Role))
def test_a_role_makes_its_calls_and_no_other(folder: AccessFolder, bridge: BridgeProcess, role: Role) -> None:
    """A call that no role allows is refused before it is looked at, and changes nothing."""
    before = state(folder, bridge)
    open_to_all = {method for method in METHODS if "Health" in method}
    expected = {method for method in METHODS if method.rpartition("/")[2] in ALLOWED[role]} - open_to_all
    with folder.client(bridge, role.value) as client:
        refused = [method for method in METHODS if method not in expected | open_to_all]
        assert {method: attempt(client, method) for method in refused} == dict.fromkeys(refused, NOT_PERMITTED)
        assert state(folder, bridge) == before
        let_in = {method: attempt(client, method) for method in sorted(expected | open_to_all)}
    wrong = {NOT_PERMITTED, UNAUTHENTICATED, (grpc.StatusCode.UNKNOWN, "")}
    assert {method: answer for method, answer in let_in.items() if answer in wrong} == {}


@pytest.mark.parametrize("proof", [(), (("authorization", "Bearer " + "x" * 43),), (("authorization", "Basic eA=="),)])
def test_nobody_makes_no_call(folder: AccessFolder, bridge: BridgeProcess, proof: tuple[tuple[str, str], ...]) -> None:
    """Without a proof, with a wrong token, or with something else in its place, only the health may be asked for."""
    before = state(folder, bridge)
    with ApiClient(bridge, attached=False, target=bridge.tcp_target, metadata=proof) as stranger:
        answers = {method: attempt(stranger, method) for method in METHODS if "Health" not in method}
        assert answers == dict.fromkeys(answers, UNAUTHENTICATED)
        for method in ("Check", "Watch"):
            assert attempt(stranger, f"/grpc.health.v1.Health/{method}") == (grpc.StatusCode.OK, "")
    assert state(folder, bridge) == before


def test_an_unknown_method_is_unknown(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """There is nothing to be let in to."""
    with folder.client(bridge, Role.ADMIN.value) as admin:
        assert attempt(admin, "/kvbridge.v1.HandoffService/Steal")[0] is grpc.StatusCode.UNIMPLEMENTED
