"""Tenants beside each other on one node: nobody gets more than its quota, and nobody suffers from another's flood."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import kvbridge
from kvbridge.core.reasons import Reason
from kvbridge.memory.attachment import Attachment
from kvbridge.memory.errors import DescriptorRefusedError
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from tests import builders
from tests.api import CALL_SECONDS, acquire_request, random_content, request_id, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for

TENANTS = 16
ARENA_BYTES = 1 << 20
PAYLOADS_MAX = 4
BURST = 5
SPEC = builders.spec()
CONTENT = random_content(SPEC)


def access_file(directory: Path, *, rate: float = 0.001) -> Path:
    """Write an access file with tenants that have one principal each, who proves itself by a token."""
    lines = ["tenants:", "  - {name: default}"]
    lines += [f"  - {{name: slow, requests_per_second: {rate}, requests_burst: {BURST}}}"]
    lines += ["  - {name: narrow, calls_max: 1}", "  - {name: roomy}"]
    small = f"arena_bytes: {ARENA_BYTES}, payloads_max: {PAYLOADS_MAX}, references_max: {PAYLOADS_MAX}"
    lines += [f"  - {{name: t{number}, {small}}}" for number in range(TENANTS)]
    lines += ["principals:", f"  - {{name: me, tenant: t0, roles: [producer, consumer], uids: [{os.getuid()}]}}"]
    for tenant in ("slow", "narrow", "roomy", *(f"t{number}" for number in range(1, TENANTS))):
        token = directory / f"{tenant}.token"
        token.write_text(token_of(tenant), encoding="utf-8")
        token.chmod(0o600)
        lines.append(
            f"  - {{name: p-{tenant}, tenant: {tenant}, roles: [producer, consumer], token_files: [{token.name}]}}"
        )
    path = directory / "access.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def token_of(tenant: str) -> str:
    """Return the token of a tenant's principal."""
    return f"{tenant}-".ljust(40, "x")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the access file of the module's bridge lies."""
    return tmp_path_factory.mktemp("access")


@pytest.fixture(scope="module")
def bridge(directory: Path) -> Iterator[BridgeProcess]:
    """Run a bridge with 18 tenants."""
    flags = ["--access", str(access_file(directory)), "--metrics-listen", "127.0.0.1:0", "--arena-bytes", str(8 << 20)]
    flags += ["--access-poll-seconds", "0.05"]
    with running_bridge(*flags, "--memory-soft-watermark", "1") as process:
        yield process


class ByToken:
    """A client by value of one tenant."""

    def __init__(self, bridge: BridgeProcess, tenant: str) -> None:
        """Connect over TCP."""
        self.channel = grpc.insecure_channel(bridge.tcp_target, [("grpc.use_local_subchannel_pool", 1)])
        self.handoff = HandoffServiceStub(self.channel)
        self.metadata = (
            ("kvbridge-client", f"by-value-client-of-{tenant}"),
            ("authorization", f"Bearer {token_of(tenant)}"),
        )

    def call(self, method: str, request: Any) -> Any:
        """Make one call."""
        return getattr(self.handoff, method)(request, metadata=self.metadata, timeout=CALL_SECONDS)

    def upload(self, key: str, *, hold: bool = True) -> Any:
        """Publish a payload by value."""
        messages = upload_messages(builders.spec(key=key), CONTENT, hold=hold)
        return self.handoff.Upload(iter(messages), metadata=self.metadata, timeout=CALL_SECONDS)

    def acquire(self, key: str) -> pb.Part:
        """Acquire what was uploaded under a key."""
        response: pb.AcquireResponse = self.call("Acquire", acquire_request(builders.spec(key=key)))
        [part] = response.parts
        return part

    def refusal(self, method: str, request: Any) -> tuple[str, float]:
        """Make a call that is refused, and return the limit and when to come again."""
        with pytest.raises(grpc.RpcError) as error:
            self.call(method, request)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return limit_of(error.value)


def limit_of(error: Any) -> tuple[str, float]:
    """Return the limit that a status names, and the seconds until another call makes sense."""
    status = rpc_status.from_call(error)
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Is(quota.DESCRIPTOR):
            detail.Unpack(quota)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
    [violation] = quota.violations
    return violation.subject, retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9


def metrics(bridge: BridgeProcess) -> str:
    """Scrape the bridge."""
    with urllib.request.urlopen(f"http://127.0.0.1:{bridge.metrics_port}/metrics", timeout=CALL_SECONDS) as answer:
        return str(answer.read().decode())


def fill(client: ByToken) -> tuple[list[Any], grpc.RpcError]:
    """Publish until it is refused."""
    published = []
    for number in range(PAYLOADS_MAX + 1):
        try:
            published.append(client.upload(f"key-{number}"))
        except grpc.RpcError as error:
            return published, error
    raise AssertionError("nothing was refused")


def test_sixteen_tenants_fill_their_quotas_at_once(bridge: BridgeProcess) -> None:
    """Each gets all of its own and no more, and each still has its payloads when all are full."""
    clients = [ByToken(bridge, f"t{number}") for number in range(1, TENANTS)]
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(fill, clients))
    for published, refusal in outcomes:
        assert len(published) == PAYLOADS_MAX
        assert limit_of(refusal)[0] in {"payloads_max", "references_max"}
    found = metrics(bridge)
    for number, client in enumerate(clients, 1):
        assert f'kvbridge_limit_used{{setting="payloads_max",tenant="t{number}"}} {PAYLOADS_MAX}.0' in found
        hold = outcomes[number - 1][0][0].commit.committed.hold_token
        client.call("Release", pb.ReleaseRequest(request_id=request_id(), tokens=[hold]))
        assert client.acquire("key-1").WhichOneof("directive") == "kv"
    assert 'kvbridge_limit_used{setting="payloads_max",tenant="default"} 0.0' in found


def test_a_flood_is_refused_and_a_neighbour_does_not_notice(bridge: BridgeProcess) -> None:
    """Who makes too many calls is told which limit it is and when to come again; everybody else is answered."""
    flood, neighbour = ByToken(bridge, "slow"), ByToken(bridge, "narrow")
    with ThreadPoolExecutor(2) as pool:
        answered = pool.submit(lambda: [neighbour.acquire("nothing").text.reason for _ in range(50)])
        asked = acquire_request(builders.spec(key="nothing"))
        for _ in range(BURST):
            flood.call("Acquire", asked)
        refusals = [flood.refusal("Acquire", asked) for _ in range(200)]
        assert len(answered.result()) == 50
    assert {limit for limit, _ in refusals} == {"requests_per_second"}
    assert all(900 < seconds <= 1000 for _, seconds in refusals)
    assert 'kvbridge_limit_refusals_total{setting="requests_per_second",tenant="slow"} 200.0' in metrics(bridge)


def test_what_returns_memory_is_never_refused(bridge: BridgeProcess) -> None:
    """Release, Renew, Abort and Commit are asked for by the quota's own user when it is used up."""
    client = ByToken(bridge, "slow")
    asked = acquire_request(builders.spec(key="nothing"))
    wait_for(lambda: is_refused(client, asked))
    assert not client.call("Renew", pb.RenewRequest(tokens=["unknown"])).references[0].HasField("time_to_live")
    for method, request in (
        ("Release", pb.ReleaseRequest(request_id=request_id(), tokens=["unknown"])),
        ("Abort", pb.AbortRequest(request_id=request_id(), reservation_token="unknown")),
        ("Commit", pb.CommitRequest(request_id=request_id(), reservation_token="unknown")),
    ):
        with pytest.raises(grpc.RpcError) as error:
            client.call(method, request)
        assert error.value.code() in {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}


def is_refused(client: ByToken, asked: Any) -> bool:
    """Tell whether a call is refused by now."""
    try:
        client.call("Acquire", asked)
    except grpc.RpcError as error:
        return bool(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    return False


def test_the_library_turns_a_refusal_into_the_text(bridge: BridgeProcess, directory: Path) -> None:
    """The caller has its own text, and is told which limit it was and when to ask again."""
    wait_for(lambda: is_refused(ByToken(bridge, "slow"), acquire_request(builders.spec(key="nothing"))))
    with kvbridge.connect(bridge.tcp_target, token_file=str(directory / "slow.token")) as client:
        handoff = client.acquire("k", model=SPEC.model, tokens=[1, 2], text="my own", timeout=CALL_SECONDS)
        assert (handoff.kv, handoff.text, handoff.reason) == (None, "my own", Reason.BRIDGE_UNREACHABLE)
        assert handoff.retry_after_seconds is not None
        assert handoff.retry_after_seconds > 900
        assert "requests_per_second" in handoff.detail


def test_calls_under_way_are_limited_for_each_tenant(bridge: BridgeProcess) -> None:
    """A stream that does not end takes one of the tenant's own calls and nobody else's."""
    client, neighbour = ByToken(bridge, "narrow"), ByToken(bridge, "t2")
    ended = threading.Event()
    upload = client.handoff.Upload.future(unfinished(ended), metadata=client.metadata, timeout=60)
    wait_for(lambda: 'kvbridge_limit_used{setting="calls_max",tenant="narrow"} 1.0' in metrics(bridge))
    assert client.refusal("Acquire", acquire_request(SPEC)) == ("calls_max", 1.0)
    assert neighbour.acquire("nothing").WhichOneof("directive") == "text"
    ended.set()
    upload.cancel()  # type: ignore[no-untyped-call] # the stubs lack it
    wait_for(lambda: not is_refused(client, acquire_request(SPEC)))


def unfinished(ended: threading.Event) -> Iterator[pb.UploadRequest]:
    """Yield the beginning of an upload, and nothing more until somebody says so."""
    yield upload_messages(SPEC, CONTENT)[0]
    ended.wait(60)


def test_another_tenants_arena_is_never_given(bridge: BridgeProcess) -> None:
    """The descriptor socket gives a client its own tenant's memory and knows no other."""
    attachment = Attachment.open(bridge.descriptor_socket, CALL_SECONDS)
    try:
        own = attachment.arena_descriptor("host-t0", False)
        assert os.fstat(own).st_size == ARENA_BYTES
        os.close(own)
        for other in ("host-default", "host-t1", "host-slow", "host-nobody"):
            with pytest.raises(DescriptorRefusedError) as refusal:
                attachment.arena_descriptor(other, False)
            assert str(refusal.value).replace(other, "X").endswith("'X'")
    finally:
        attachment.close()


def test_another_tenants_key_answers_as_an_unknown_one(bridge: BridgeProcess) -> None:
    """Byte for byte, but for the key that was asked for."""
    ByToken(bridge, "roomy").upload("key-of-another", hold=False)
    stranger = ByToken(bridge, "narrow")
    others, unknown = (stranger.acquire(key).SerializeToString() for key in ("key-of-another", "key-of-nobody0"))
    assert others.replace(b"key-of-another", b"") == unknown.replace(b"key-of-nobody0", b"")


def test_rates_are_changed_while_the_node_serves(bridge: BridgeProcess, directory: Path) -> None:
    """A higher rate is in force as soon as the file is read."""
    client, asked = ByToken(bridge, "slow"), acquire_request(builders.spec(key="nothing"))
    wait_for(lambda: is_refused(client, asked))
    access_file(directory, rate=100_000.0)
    wait_for(lambda: not is_refused(client, asked))
