"""Streams of events from a running bridge."""

from __future__ import annotations

import signal

import grpc
import pytest

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.events import LeaseExpiring, NodeDraining, PayloadQuarantined, PayloadRevoked
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.reasons import Reason
from kvbridge.v1 import types_pb2
from tests import builders
from tests.api import ApiClient
from tests.events import Stream, on_payload, quarantine, watching
from tests.harness import BridgeProcess, running_bridge

WATCHES_PER_CLIENT_MAX = 4


def hold(client: ApiClient, consumer: ApiClient, key: str) -> None:
    """Publish something and lease it to the consumer."""
    client.publish(builders.spec(key=key))
    part = consumer.acquire(builders.spec(key=key))
    assert part.WhichOneof("directive") == "kv", part


def key_of(event: object) -> str:
    """Return which payload was quarantined."""
    assert isinstance(event, PayloadQuarantined)
    return event.reference.key


def test_every_stream_of_a_client_hears_of_what_concerns_it(client: ApiClient, other: ApiClient) -> None:
    """And of nothing else; a client that has never watched costs nothing."""
    hold(client, other, "both")
    hold(client, client, "own")
    with watching(other) as first, watching(other) as second:
        quarantine(client, on_payload("own"))
        quarantine(client, on_payload("both"))
        assert first.next() == second.next()
        assert first.sequence == second.sequence


def test_a_client_that_comes_back_hears_what_it_missed(client: ApiClient, remote: ApiClient) -> None:
    """After the last event that it has seen, in order."""
    for key in ("one", "two", "three"):
        hold(client, remote, key)
    with watching(remote) as stream:
        assert not stream.events_lost
        quarantine(client, on_payload("one"))
        assert key_of(stream.next()) == "one"
    quarantine(client, on_payload("two"))
    quarantine(client, on_payload("three"))
    with watching(remote, after_sequence=stream.sequence) as again:
        assert not again.events_lost
        assert [key_of(again.next()), key_of(again.next())] == ["two", "three"]
    with watching(remote) as fresh:
        assert not fresh.events_lost
        assert fresh.sequence >= again.sequence


def test_a_client_whose_place_is_forgotten_is_told(client: ApiClient, remote: ApiClient) -> None:
    """Be it from before this node's start, or from after it has forgotten the client."""
    with watching(remote, after_sequence=17) as stream:
        assert stream.events_lost
    with watching(remote, after_sequence=stream.sequence + 1_000_000_000) as ahead:
        assert ahead.events_lost
    with watching(client, after_sequence=ahead.sequence) as stream:
        assert not stream.events_lost


def test_a_client_has_so_many_streams_at_most(client: ApiClient) -> None:
    """One more is refused; when one ends there is room again."""
    streams = [Stream(client) for _ in range(WATCHES_PER_CLIENT_MAX)]
    with pytest.raises(grpc.RpcError) as caught:
        Stream(client)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "watches_per_client_max" in (caught.value.details() or "")
    for stream in streams:
        stream.close()


def test_the_streams_of_a_client_end_with_it(bridge_process: BridgeProcess) -> None:
    """When its process is gone; the stream itself comes over another connection here."""
    leaving = ApiClient(bridge_process)
    stream = Stream(leaving)
    assert leaving.attachment is not None
    leaving.attachment.close()
    assert stream.rest() == []
    leaving.close()


def test_a_call_without_a_name_is_refused(client: ApiClient) -> None:
    """As any other call is."""
    client.name = "short"
    with pytest.raises(grpc.RpcError) as caught:
        Stream(client)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_tensors_that_turn_out_bad_are_revoked_from_those_who_hold_them(client: ApiClient, other: ApiClient) -> None:
    """Whoever gave them back in time is not told."""
    spec = builders.spec(key="flipped")
    client.publish(spec, verification=types_pb2.VERIFICATION_DIGEST)
    held = client.acquire(spec)
    returned = other.acquire(spec)
    other.release(returned.kv.lease_token)
    with watching(client) as told, watching(other) as untold:
        slot = client.slot(held.kv.location)
        slot[PAGE_BYTES] ^= 1
        refused = other.acquire(spec, verification=types_pb2.VERIFICATION_DIGEST)
        assert refused.text.reason == types_pb2.REASON_PAYLOAD_CORRUPT
        event = told.next()
        assert isinstance(event, PayloadRevoked)
        assert event.reference == PayloadReference(key="flipped", generation=1)
        assert (event.reason, event.detail) == (Reason.PAYLOAD_CORRUPT, refused.text.detail)
        hold(client, other, "after")
        quarantine(client, on_payload("after"))
        assert key_of(untold.next()) == "after"


def test_a_lease_that_is_not_renewed_is_announced_before_it_ends() -> None:
    """One that was returned is not."""
    with (
        running_bridge("--lease-ttl-seconds", "4.5") as process,
        ApiClient(process) as client,
        watching(client) as told,
    ):
        hold(client, client, "returned")
        client.publish(builders.spec(key="kept"))
        returned = client.acquire(builders.spec(key="returned"))
        kept = client.acquire(builders.spec(key="kept"))
        client.release(returned.kv.lease_token)
        events = [told.next(), told.next()]
        assert all(isinstance(event, LeaseExpiring) and 0 < event.seconds_left <= 1.5 for event in events)
        assert isinstance(events[1], LeaseExpiring)
        assert events[1].lease_token == kept.kv.lease_token


def test_a_node_that_shuts_down_says_so_and_ends_its_streams() -> None:
    """Without waiting for their deadlines."""
    with running_bridge() as process, ApiClient(process) as client:
        stream = Stream(client)
        process.signal(signal.SIGTERM)
        assert stream.rest() == [NodeDraining(seconds_left=0.2)]
        assert process.process.wait(10) == 0
