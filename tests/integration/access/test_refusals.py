"""Whatever is refused at any door is counted, and told without a word of whoever was refused."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from kvbridge.core.access import Role
from kvbridge.server.doors import UNTOLD
from kvbridge.v1 import inspect_service_pb2 as inspect
from tests import builders
from tests.access import AccessFolder, bearer, refusal
from tests.api import ApiClient, acquire_request
from tests.harness import BridgeProcess, running_bridge, wait_for

SECRET = "a-name-that-a-stranger-chose"
SECONDS = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name a consumer whose tenant may make few calls a second."""
    folder = AccessFolder(
        tmp_path_factory.mktemp("access"), engine=(Role.CONSUMER,), limited_elsewhere=(Role.CONSUMER,)
    )
    folder.tenants[1] |= {"requests_per_second": 0.001, "requests_burst": 1}
    folder.write()
    return folder


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge with every door that there is."""
    flags = ("--metrics-listen", "127.0.0.1:0", "--request-seconds-max", "2", "--sessions-per-uid-max", "1")
    with running_bridge(*folder.flags, *flags, "--bulk-listen", "127.0.0.1:0") as process:
        yield process


def counted(bridge: BridgeProcess) -> Counter[tuple[str, str]]:
    """Return what was refused until now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bridge.metrics_port}/metrics", timeout=SECONDS) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    samples = families["kvbridge_refusals"].samples
    return Counter({(s.labels["door"], s.labels["reason"]): int(s.value) for s in samples if s.name.endswith("_total")})


def refused_lines(bridge: BridgeProcess) -> list[dict[str, Any]]:
    """Return what the log tells of refusals."""
    lines = map(json.loads, filter(lambda line: line.startswith("{"), bridge.log.splitlines()))
    return [line for line in lines if "refused" in line["event"]]


def test_calls_are_counted_by_service_and_reason(folder: AccessFolder, bridge: BridgeProcess) -> None:
    """Those that nothing proves, that no role allows, that are too many, and that never begin."""
    before = counted(bridge)
    with ExitStack() as stack:
        stranger = stack.enter_context(
            ApiClient(bridge, attached=False, target=bridge.tcp_target, name=SECRET, metadata=bearer("x" * 40))
        )
        engine, limited = (stack.enter_context(folder.client(bridge, name)) for name in ("engine", "limited_elsewhere"))
        for _ in range(3):
            assert refusal(lambda: stranger.call("Acquire", acquire_request(builders.spec())))[1] == "UNAUTHENTICATED"
        assert refusal(lambda: engine.call("Reserve", acquire_request(builders.spec())))[1] == "NOT_PERMITTED"
        limited.call("GetNode", inspect.GetNodeRequest())
        assert refusal(lambda: limited.call("GetNode", inspect.GetNodeRequest()))[1] == "TOO_MANY_REQUESTS"
        never = engine.channel.stream_unary("/kvbridge.v1.HandoffService/Acquire", None, None)
        silent = never.future(iter_never(stack), metadata=engine.metadata, timeout=SECONDS)
        assert silent.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        for method in (SECRET, "/kvbridge.v1.HandoffService/Steal"):
            with pytest.raises(grpc.RpcError) as caught:
                engine.channel.unary_unary(method, None, None)(b"", metadata=engine.metadata, timeout=SECONDS)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert counted(bridge) - before == {
        ("handoff", "UNAUTHENTICATED"): 3,
        ("handoff", "NOT_PERMITTED"): 1,
        ("inspect", "TOO_MANY_REQUESTS"): 1,
        ("handoff", "TOO_LATE"): 1,
        ("unknown", "UNKNOWN_METHOD"): 2,
    }
    told = {(line.get("door"), line.get("reason")): line for line in refused_lines(bridge)}
    assert told["inspect", "TOO_MANY_REQUESTS"]["limit"] == "requests_per_second"
    assert told["handoff", "NOT_PERMITTED"]["principal"] == "engine"
    assert told["handoff", "UNAUTHENTICATED"]["principal"] == ""
    assert told["inspect", "TOO_MANY_REQUESTS"]["principal"] == "limited_elsewhere"
    assert told["handoff", "UNAUTHENTICATED"]["host"] == "127.0.0.1"
    assert SECRET not in bridge.log
    assert "Steal" not in bridge.log


def iter_never(stack: ExitStack) -> Iterator[bytes]:
    """Return a stream of messages that neither brings one nor ends before the stack does."""
    ours, theirs = socket.socketpair()
    stack.callback(theirs.close)

    def wait() -> Iterator[bytes]:
        with ours:
            ours.recv(1)
        yield from ()

    return wait()


def test_the_other_doors_are_counted(bridge: BridgeProcess) -> None:
    """The port for bytes, the descriptor socket, and that of the metrics."""
    before = counted(bridge)
    port = json.loads(next(line for line in bridge.log.splitlines() if '"serving"' in line))["bulk_port"]
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as rubbish:
        rubbish.sendall(b"GET / HTTP/1.1\r\n\r\n123456")
        assert not rubbish.recv(1)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as hasty:
        hasty.shutdown(socket.SHUT_WR)
        assert not hasty.recv(1)
    with ApiClient(bridge), pytest.raises(Exception, match="TOO_MANY_SESSIONS"):
        ApiClient(bridge)
    with socket.create_connection(("127.0.0.1", bridge.metrics_port), timeout=SECONDS) as long:
        long.sendall(b"GET /metrics HTTP/1.1\r\nx: " + b"y" * 20_000)
        with suppress(ConnectionError):
            assert b" 431 " in long.recv(100)
    wait_for(
        lambda: (
            counted(bridge) - before
            == {
                ("bulk", "INVALID_FIELD"): 1,
                ("bulk", "NO_REQUEST"): 1,
                ("descriptors", "TOO_MANY_SESSIONS"): 1,
                ("metrics", "NO_REQUEST"): 1,
            }
        )
    )


def test_a_flood_leaves_a_few_lines(bridge: BridgeProcess) -> None:
    """And says how many it left out; nothing of it is lost to the counter."""
    calls, before, lines = 500, counted(bridge), len(refused_lines(bridge))
    with grpc.insecure_channel(bridge.tcp_target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.unary_unary("/kvbridge.v1.HandoffService/Renew", None, None)
        futures = [call.future(b"", timeout=SECONDS) for _ in range(calls)]
        assert {future.code() for future in futures} == {grpc.StatusCode.UNAUTHENTICATED}
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=SECONDS).status
    assert counted(bridge) - before == {("handoff", "UNAUTHENTICATED"): calls}

    def is_all_told() -> bool:
        told = refused_lines(bridge)
        number: int = sum(line.get("left_out", 0) for line in told) + sum("door" in line for line in told)
        return number == sum(count for (_, reason), count in counted(bridge).items() if reason not in UNTOLD)

    wait_for(is_all_told)
    assert len(refused_lines(bridge)) - lines < calls / 4
