"""Pulls between real nodes over a network that slows, stops, cuts and changes what it carries."""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvbridge.core.descriptor import FallbackText
from kvbridge.core.reasons import Reason
from kvbridge.v1 import catalog_service_pb2, inspect_service_pb2, types_pb2
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.wire import encode_tokens
from tests import builders
from tests.api import ApiClient, acquire_request, collect, field_of, random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.network.nodes import (
    PAYLOAD_BYTES,
    SETTINGS,
    SLOW_BYTES_PER_SECOND,
    TOKENS,
    Pair,
    foreign,
    large_spec,
    refusal,
)


def stub(client: ApiClient) -> Any:
    """Return the service's stub for calls that a test cancels or counts itself."""
    return HandoffServiceStub(client.channel)


def test_bytes_arrive_exactly_as_they_were_written(pair: Pair) -> None:
    """The consumer maps its own node's memory and reads what the producer wrote on the other one."""
    spec = large_spec("exact")
    _, content = pair.producer.publish(spec)
    part = pair.acquire(spec)
    assert collect(pair.consumer.slot(part.kv.location, writable=False), spec, TOKENS) == content.tobytes()
    assert part.kv.descriptor.reference.key == "kvb://owner/exact@1"
    with ApiClient(pair.puller, attached=False) as remote:
        again = remote.acquire(spec, payloads=foreign("exact"))
        assert b"".join(remote.download(again.kv.lease_token)) == content.tobytes()
        remote.release(again.kv.lease_token)
    pair.consumer.release(part.kv.lease_token)


def test_a_node_asked_for_its_own_payload_by_its_name_everywhere_hands_it_over(pair: Pair) -> None:
    """The name holds on every node, so also on the owner."""
    spec = large_spec("own")
    pair.producer.publish(spec)
    part = pair.producer.acquire(spec, payloads=foreign("own"))
    assert part.kv.descriptor.reference.key == "own"
    pair.producer.release(part.kv.lease_token)


def test_fifty_consumers_cost_one_pull(pair: Pair) -> None:
    """However many wait, the owner has one lease and the bytes cross the network once."""
    spec = large_spec("fifty")
    pair.producer.publish(spec)
    pair.proxy.behave(bytes_per_second=4 * SLOW_BYTES_PER_SECOND)
    with ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(pair.acquire, spec) for _ in range(50)]
        wait_for(lambda: pair.producer.arena_usage().leases)
        assert pair.producer.arena_usage().leases == 1
        parts = [future.result() for future in waiting]
    assert len({part.kv.location.offset_bytes for part in parts}) == 1
    assert PAYLOAD_BYTES < pair.proxy.passed_bytes < 1.1 * PAYLOAD_BYTES
    pair.consumer.release(*(part.kv.lease_token for part in parts))


def test_the_record_and_the_metrics_say_what_was_pulled(pair: Pair) -> None:
    """How much came, from where, which way and how long it took; a replica that was here says nothing of that."""
    spec = large_spec("recorded")
    pair.producer.publish(spec)
    before = [scraped(node) for node in (pair.owner, pair.puller)]
    records = []
    for _ in range(2):
        pair.consumer.release(pair.acquire(spec).kv.lease_token)
        request = inspect_service_pb2.ExplainHandoffRequest(last=True)
        [part] = pair.consumer.call("ExplainHandoff", request).record.parts
        records.append(part)
    first, second = records
    assert (first.pull.node_id, first.pull.bytes) == ("owner", PAYLOAD_BYTES)
    assert first.pull.by == pair.transport
    assert first.pull.duration.ToNanoseconds() > 0
    assert not second.HasField("pull")
    sent, pulled = [moved(node, at) for node, at in zip((pair.owner, pair.puller), before, strict=True)]
    assert sent == {"sent": PAYLOAD_BYTES}
    assert pulled == {"pulled": PAYLOAD_BYTES, "published": PAYLOAD_BYTES, "leased": 2 * PAYLOAD_BYTES}


def scraped(node: BridgeProcess) -> dict[str, float]:
    """Return how many bytes a node has counted, by direction."""
    with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics", timeout=10) as answer:
        found = re.findall(
            r'^kvbridge_payload_bytes_total{direction="(\w+)"} (\S+)$', answer.read().decode(), re.MULTILINE
        )
    return {direction: float(count) for direction, count in found}


def moved(node: BridgeProcess, before: dict[str, float]) -> dict[str, float]:
    """Return which directions have counted more since then, and how much."""
    return {name: count - before[name] for name, count in scraped(node).items() if count != before[name]}


@pytest.mark.parametrize("behaviour", ["cut_after_bytes", "flip_at_byte", "stop_after_bytes"])
def test_transfer_failed(pair: Pair, behaviour: str) -> None:
    """A stream that breaks off, arrives changed or stops is answered with the owner's text, and may be tried again."""
    spec = large_spec(behaviour)
    pair.producer.publish(spec)
    changes: dict[str, Any] = {behaviour: PAYLOAD_BYTES // 2}
    pair.proxy.behave(**changes)
    assert refusal(pair.acquire(spec), spec) is Reason.TRANSFER_FAILED
    pair.proxy.behave()
    pair.proxy.cut()
    part = wait_for(lambda: (part := pair.acquire(spec)).WhichOneof("directive") == "kv" and part)
    pair.consumer.release(part.kv.lease_token)


def test_transfer_timeout(pair: Pair) -> None:
    """Bytes that come too slowly for the caller's deadline are not waited for, and the owner's text is in time."""
    spec = large_spec("slow")
    pair.producer.publish(spec)
    pair.proxy.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)
    request = acquire_request(spec, payloads=foreign("slow"))
    [part] = pair.consumer.call("Acquire", request, timeout_seconds=2.0).parts
    assert refusal(part, spec) is Reason.TRANSFER_TIMEOUT


def test_two_hundred_callers_are_answered_before_their_deadline(pair: Pair) -> None:
    """Each has an answer rather than an expired call, although all wait for the same slow transfer."""
    spec = large_spec("crowd")
    pair.producer.publish(spec)
    pair.proxy.behave(bytes_per_second=SLOW_BYTES_PER_SECOND / 2)
    acquire = stub(pair.consumer).Acquire
    calls = [
        acquire.future(acquire_request(spec, payloads=foreign("crowd")), timeout=4.0, metadata=pair.consumer.metadata)
        for _ in range(200)
    ]
    reasons = [refusal(call.result().parts[0], spec) for call in calls]
    assert set(reasons) == {Reason.TRANSFER_TIMEOUT}, {call.result().parts[0].text.detail for call in calls}


def test_owner_unreachable(pair: Pair) -> None:
    """Nobody listens where the owner should be; nobody knows where another one is."""
    spec = large_spec("unreachable")
    pair.producer.publish(spec)
    pair.proxy.target_port = 1
    pair.proxy.cut()
    assert refusal(wait_for(lambda: pair.acquire(spec))) is Reason.OWNER_UNREACHABLE
    pair.proxy.target_port = pair.owner.tcp_port
    nobody = pair.acquire(spec, payloads=foreign("unreachable", owner="nobody"))
    assert refusal(nobody) is Reason.OWNER_UNREACHABLE
    part = wait_for(lambda: (part := pair.acquire(spec)).WhichOneof("directive") == "kv" and part)
    pair.consumer.release(part.kv.lease_token)


@pytest.mark.parametrize("leaves", ["cancel", "disconnect"])
def test_a_consumer_that_leaves_frees_both_sides(pair: Pair, leaves: str) -> None:
    """Nobody is left to wait, so the transfer breaks off long before its end, and nothing is kept for it."""
    spec = large_spec(f"left by {leaves}")
    pair.producer.publish(spec)
    pair.proxy.behave(bytes_per_second=SLOW_BYTES_PER_SECOND / 10)
    with ApiClient(pair.puller) as consumer:
        request = acquire_request(spec, payloads=foreign(spec.key))
        call = stub(consumer).Acquire.future(request, timeout=60.0, metadata=consumer.metadata)
        wait_for(lambda: pair.consumer.arena_usage().reservations)
        if leaves == "cancel":
            call.cancel()
        else:
            consumer.close()
        pair.require_base()
    assert pair.proxy.passed_bytes < PAYLOAD_BYTES // 2


def test_what_the_owner_quarantines_meanwhile_does_not_arrive(pair: Pair) -> None:
    """Its lease there is still live, but the stream breaks off, unless the puller has heard why by then."""
    spec = large_spec("quarantined meanwhile", model=builders.model_tag(name="poisoned"))
    pair.producer.publish(spec)
    pair.proxy.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)
    target = catalog_service_pb2.QuarantineTarget(model=catalog_service_pb2.ModelPattern(name="poisoned"))
    order = catalog_service_pb2.QuarantineRequest(request_id="poison", target=target, why="it is a test")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(pair.acquire, spec)
        wait_for(lambda: pair.consumer.arena_usage().reservations)
        catalog = CatalogServiceStub(pair.producer.channel)
        catalog.Quarantine(order, metadata=pair.producer.metadata, timeout=10.0)
        assert refusal(asking.result(), spec) in {Reason.TRANSFER_FAILED, Reason.QUARANTINED}
    assert refusal(pair.acquire(spec), spec) is Reason.QUARANTINED


def test_what_the_owner_does_not_have_is_told_by_the_owner(pair: Pair) -> None:
    """The owner alone knows that there is nothing, or no longer, and it keeps the text."""
    gone = large_spec("gone", linger_seconds=0.0)
    pair.producer.publish(gone)
    assert refusal(pair.acquire(gone), gone) is Reason.PAYLOAD_EXPIRED
    assert refusal(pair.acquire(large_spec("never"))) is Reason.PAYLOAD_UNKNOWN
    pending = large_spec("pending")
    reserved = pair.producer.reserve(pending)
    part = pair.acquire(pending)
    assert refusal(part, pending) is Reason.PAYLOAD_NOT_READY
    assert part.text.HasField("retry_after")
    pair.producer.call(
        "Abort", pb.AbortRequest(request_id="abort pending", reservation_token=reserved.reservation_token)
    )


@pytest.mark.parametrize("key", ["k" * 512, "ключ/🔑 @7@8/x", "a@1", "/"])
def test_every_key_has_a_name_everywhere(pair: Pair, key: str) -> None:
    """The longest key, other scripts, and the characters that separate the parts of a reference."""
    spec = builders.spec(key=key)
    _, content = pair.producer.publish(spec)
    part = pair.acquire(spec)
    assert collect(pair.consumer.slot(part.kv.location, writable=False), spec, 10) == content.tobytes()
    reference = types_pb2.PayloadReference(key=f"kvb://owner/{key}@1")
    found = pair.consumer.call("GetPayload", inspect_service_pb2.GetPayloadRequest(reference=reference))
    assert found.summary.reference.key == reference.key
    listing = inspect_service_pb2.ListPayloadsRequest(key_prefix=reference.key)
    assert len(pair.consumer.call("ListPayloads", listing).payloads) == 1
    pair.consumer.release(part.kv.lease_token)


@pytest.mark.parametrize(
    "key",
    [
        "kvb://owner/k",
        "kvb://owner",
        "kvb:///k@1",
        "kvb://owner/@1",
        "kvb://owner/k@0",
        "kvb://owner/k@01",
        "kvb://owner/k@18446744073709551616",
        "kvb://owner/k@x",
        "kvb://own er/k@1",
        "kvb://owner/kvb://third/k@1@1",
        f"kvb://owner/{'k' * 513}@1",
    ],
)
def test_what_is_no_reference_is_refused_by_its_field(pair: Pair, key: str) -> None:
    """A name that no node can have given is an error of use."""
    with pytest.raises(grpc.RpcError) as refused:
        pair.consumer.acquire(payloads=[types_pb2.PayloadReference(key=key)])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(refused.value) == "key"


def test_nobody_publishes_under_another_nodes_name(pair: Pair) -> None:
    """Neither in place nor by value."""
    spec = builders.spec(key="kvb://owner/forged@1")
    before = pair.consumer.state()
    with pytest.raises(grpc.RpcError) as refused:
        pair.consumer.reserve(spec)
    assert field_of(refused.value) == "key"
    with pytest.raises(grpc.RpcError) as refused:
        pair.consumer.upload(upload_messages(spec, random_content(spec)))
    assert field_of(refused.value) == "key"
    assert pair.consumer.state() == before


def test_a_consumer_of_any_tokens_is_told_them(pair: Pair) -> None:
    """Who does not know the tokens gets them by id from its own node's replica."""
    spec = builders.spec(key="any tokens")
    pair.producer.publish(spec)
    part = pair.acquire(spec, tokens=pb.ExpectedTokens(any=True))
    assert spec.tokens is not None
    assert part.kv.descriptor.tokens == encode_tokens(spec.tokens)
    pair.consumer.release(part.kv.lease_token)


def test_one_plan_of_parts_from_three_nodes(pair: Pair) -> None:
    """Parts that are here and parts of two other nodes are answered together, each with its own bytes or reason."""
    here, there = builders.spec(key="plan/here"), builders.spec(key="plan/there", fallback=FallbackText(text="there"))
    pair.consumer.publish(here)
    with running_bridge("--node-id", "third", *SETTINGS) as third, ApiClient(third) as producer:
        peers = f"owner=127.0.0.1:{pair.proxy.port} third=127.0.0.1:{third.tcp_port} puller={pair.puller.tcp_target}"
        producer.publish(there)
        pair.producer.publish(builders.spec(key="plan/owner"))
        with running_bridge("--node-id", "fourth", "--peers", peers, *SETTINGS) as fourth, ApiClient(fourth) as last:
            plan = foreign("plan/here", owner="puller") + foreign("plan/owner") + foreign("plan/there", owner="third")
            request = acquire_request(here, payloads=plan, tokens=pb.ExpectedTokens(any=True))
            parts = last.call("Acquire", request).parts
            kinds = [part.WhichOneof("directive") for part in parts]
            # The second and third do not stand at position 0, where they were computed.
            assert kinds[0] == "kv"
            assert [part.text.fallback.text for part in parts[1:]] == ["the text", "there"]
            last.release(parts[0].kv.lease_token)
        wait_for(lambda: not producer.arena_usage().leases)
