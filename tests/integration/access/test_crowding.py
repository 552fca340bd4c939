"""Clients of one tenant, or of nobody, that take every place they can get: the others, and an admin, are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvbridge.core.access import Role
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2 as inspect
from tests import builders
from tests.access import AccessFolder
from tests.api import ApiClient, random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

SERVICE = "/kvbridge.v1.HandoffService/"
HEALTH = "/grpc.health.v1.Health/"
CALLS_MAX, STREAMS_MAX = 64, 8
ENGINE = (Role.PRODUCER, Role.CONSUMER)
SECONDS = 30.0
SPEC = builders.spec(key="mine")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name an engine in each of two tenants, and an administrator in the first."""
    everybody = {"greedy": ENGINE, "neighbour_elsewhere": ENGINE, "admin": (Role.ADMIN,)}
    return AccessFolder(tmp_path_factory.mktemp("access"), **everybody)


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge that takes few calls at once."""
    flags = ("--concurrent-calls-max", str(CALLS_MAX), "--streams-max", str(STREAMS_MAX))
    with running_bridge(*folder.flags, *flags) as process:
        yield process


@contextmanager
def crowd(bridge: BridgeProcess, method: str, proof: tuple[tuple[str, str], ...], first: bytes | None) -> Iterator[Any]:
    """Make more calls than there are places, each by a client of another name, and send no more than `first`."""
    over = threading.Event()

    def sent() -> Iterator[bytes]:
        if first is not None:
            yield first
        over.wait(SECONDS)

    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(bridge.tcp_target, [("grpc.use_local_subchannel_pool", 1)]))
        stack.callback(over.set)
        names = (f"crowding-client-{number}" for number in count())
        begin = channel.stream_stream(method, None, None)
        calls = [begin(sent(), metadata=(("kvbridge-client", next(names)), *proof)) for _ in range(2 * CALLS_MAX)]
        yield calls
        for call in calls:
            call.cancel()  # type: ignore[no-untyped-call] # the stubs lack it


def assert_others_served(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Check that the other tenant publishes and reads back by streams, and that an administrator is answered."""
    content = random_content(SPEC)
    with folder.client(bridge, "neighbour_elsewhere") as neighbour, folder.client(bridge, "admin") as admin:
        neighbour.upload(upload_messages(SPEC, content))
        token = neighbour.acquire(SPEC).kv.lease_token
        assert b"".join(neighbour.download(token))
        neighbour.release(token)
        assert admin.call("GetNode", inspect.GetNodeRequest()).caller.principal == "admin"


UPLOAD = pb.UploadRequest(header=upload_messages(builders.spec(key="greedy"), random_content(SPEC))[0].header)
CROWDS = {
    "calls that never begin": (f"{SERVICE}Acquire", "greedy", None),
    "calls that keep a grant and never begin": (f"{SERVICE}Renew", "greedy", None),
    "uploads that never end": (f"{SERVICE}Upload", "greedy", UPLOAD.SerializeToString()),
    "streams of events": (f"{SERVICE}Watch", "greedy", pb.WatchRequest().SerializeToString()),
    "calls of nobody": (f"{HEALTH}Check", "", None),
    "streams of nobody": (f"{HEALTH}Watch", "", health_pb2.HealthCheckRequest().SerializeToString()),
}


@pytest.mark.parametrize("kind", CROWDS)
def test_a_crowd_keeps_nobody_else_out(folder: AccessFolder, bridge: BridgeProcess, kind: str) -> None:
    """Whatever kind of calls it holds, and whatever its clients call themselves."""
    method, principal, first = CROWDS[kind]
    proof = folder.proof(principal) if principal else ()
    with crowd(bridge, method, proof, first) as calls:
        if not principal and first is not None:  # They were answered before others took their places.
            for call in calls:
                with suppress(grpc.RpcError):
                    next(call)
        wait_for(lambda: any(call.done() for call in calls))  # Those that are too many are refused at once.
        assert_others_served(folder, bridge)
        refused = [call.code() for call in calls if call.done()]
        assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(refused) < len(calls)
    wait_for(lambda: is_let_in(folder, bridge))


def is_let_in(folder: AccessFolder, bridge: BridgeProcess) -> bool:
    """Tell whether there is room again for the tenant whose clients made the crowd."""
    with folder.client(bridge, "greedy") as client:
        return not isinstance(attempt(client), grpc.RpcError)


def attempt(client: ApiClient) -> Any:
    """Publish and return the answer, or the refusal."""
    spec = builders.spec(key="again")
    try:
        return client.upload(upload_messages(spec, random_content(spec)))
    except grpc.RpcError as error:
        return error
