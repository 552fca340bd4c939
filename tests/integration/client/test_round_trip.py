"""From a producer through a real bridge to a consumer."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from kvbridge import (
    ANY_TOKENS,
    Bridge,
    DimensionOrder,
    Dtype,
    LayerKind,
    PayloadReference,
    Reason,
    TokenSequence,
    Verification,
)
from tests.builders import model_tag
from tests.harness import wait_for
from tests.integration.client.kv import DIM, HEADS, LAYERS, MODEL, SHAPE, Contents, shape


@pytest.mark.parametrize("order", DimensionOrder)
@pytest.mark.parametrize("dtype", Dtype)
def test_every_bit_arrives(either: Bridge, order: DimensionOrder, dtype: Dtype) -> None:
    """Both ways to share memory or not hand over the same values for every dtype and order."""
    contents = Contents(of=shape(order=order, dtype=dtype))
    slot = contents.publish(either, f"bits/{order}/{dtype}")
    assert slot.published, slot.detail
    with contents.acquire(either, slot.key) as handoff:
        contents.assert_in(handoff)
        assert handoff.valid_length == len(contents.ids)
        assert handoff.handoff_id


def test_one_side_by_value_and_the_other_in_place(bridge: Bridge, remote: Bridge) -> None:
    """How a payload came in does not matter to how it goes out."""
    assert remote.by_value
    assert not bridge.by_value
    for producer, consumer in ((bridge, remote), (remote, bridge)):
        contents = Contents(seed=int(producer.by_value))
        slot = contents.publish(producer, "mixed")
        with contents.acquire(consumer, "mixed", generation=slot.reference.generation) as handoff:  # type: ignore[union-attr]  # published
            contents.assert_in(handoff)


def test_a_large_payload_by_value_takes_many_chunks(remote: Bridge) -> None:
    """Strips longer and shorter than a chunk are put back together."""
    contents = Contents(tokens=3000, of=shape(layers=(0, 7), kv_heads=4, head_dim_k=64, head_dim_v=32))
    assert contents.publish(remote, "large").published
    with contents.acquire(remote, "large") as handoff:
        contents.assert_in(handoff)


def test_room_for_more_tokens_does_not_show(either: Bridge) -> None:
    """Capacity beyond the valid length is padding that no consumer sees."""
    contents = Contents(tokens=5)
    contents.publish(either, "room", capacity_tokens=1000)
    with contents.acquire(either, "room") as handoff:
        contents.assert_in(handoff)
        assert handoff.descriptor is not None
        assert handoff.descriptor.capacity_tokens == 1000


def test_a_window_layer_arrives(either: Bridge) -> None:
    """A layer that stores only its newest tokens is handed over as such."""
    contents = Contents(tokens=20, of=shape(kind=LayerKind.SLIDING, window_tokens=8, stored_tokens_max=7))
    contents.publish(either, "window")
    with contents.acquire(either, "window") as handoff:
        contents.assert_in(handoff)
        assert handoff.layer(0)[0].shape == (HEADS, 7, DIM)


def test_a_prefix_of_the_consumers_tokens_is_taken(either: Bridge) -> None:
    """The consumer's context may be longer than the cache, and knows which tokens it covers."""
    contents = Contents(tokens=10)
    contents.publish(either, "prefix")
    with either.acquire("prefix", model=MODEL, tokens=[*contents.ids, 77, 78], timeout=10) as handoff:
        contents.assert_in(handoff)
        assert handoff.tokens == contents.ids
    with either.acquire("prefix", model=MODEL, tokens=torch.tensor(contents.ids[:9]), timeout=10) as handoff:
        assert handoff.kv is None


def test_a_digest_of_the_tokens_is_enough(either: Bridge) -> None:
    """Who has only a digest gets the cache of exactly those tokens."""
    contents = Contents()
    contents.publish(either, "digest")
    whole = TokenSequence.from_packed(struct.pack(f"<{len(contents.ids)}I", *contents.ids))
    with contents.acquire(either, "digest", tokens=TokenSequence(count=whole.count, digest=whole.digest)) as handoff:
        contents.assert_in(handoff)
    other = TokenSequence(count=whole.count, digest=bytes(32))
    assert contents.acquire(either, "digest", tokens=other).reason is Reason.TOKENS_MISMATCH


def test_a_consumer_can_take_the_producers_tokens(either: Bridge) -> None:
    """Who does not know the tokens gets them with the cache."""
    contents = Contents(seed=5)
    contents.publish(either, "any")
    with either.acquire("any", model=MODEL, tokens=ANY_TOKENS, geometry=SHAPE, timeout=10) as handoff:
        contents.assert_in(handoff)
        assert handoff.tokens == contents.ids


def test_a_refusal_comes_with_the_text(either: Bridge) -> None:
    """Another model version gets the bridge's text, the tokens and the reason; not its own text."""
    contents = Contents()
    contents.publish(either, "refused")
    handoff = contents.acquire(either, "refused", model=model_tag(revision="other"), text="own text")
    assert handoff.kv is None
    assert handoff.reason is Reason.MODEL_VERSION_MISMATCH
    assert "revision" in handoff.detail
    assert handoff.text == "text of refused"
    assert handoff.tokens == contents.ids


def test_an_unknown_key_comes_with_the_callers_own_text(either: Bridge) -> None:
    """When the bridge knows nothing, what the caller brought is used."""
    handoff = either.acquire("never", model=MODEL, tokens=[4, 5], text="own text", timeout=10)
    assert (handoff.reason, handoff.text, handoff.tokens) == (Reason.PAYLOAD_UNKNOWN, "own text", [4, 5])


def test_a_text_uri_is_passed_on(bridge: Bridge) -> None:
    """A text that is too long to carry can stay where it is."""
    contents = Contents()
    contents.publish(bridge, "uri", text=None, text_uri="s3://texts/1")
    handoff = contents.acquire(bridge, "uri", model=model_tag(adapter="x"), text="own text")
    assert handoff.text_uri == "s3://texts/1"
    assert handoff.text == "own text"


def test_values_that_are_not_finite_are_rejected(either: Bridge) -> None:
    """The producer is told, and so is every consumer, who takes the text."""
    contents = Contents()
    contents.layers[1][1][0, 0, 0] = float("nan")
    slot = contents.publish(either, "nan")
    assert (slot.published, slot.reason) == (False, Reason.VALUES_NOT_FINITE)
    handoff = contents.acquire(either, "nan")
    assert (handoff.reason, handoff.text) == (Reason.VALUES_NOT_FINITE, "text of nan")


def test_a_payload_without_verification_is_handed_over(either: Bridge) -> None:
    """A producer that trusts its bytes may skip the check, and the descriptor says so."""
    contents = Contents()
    assert contents.publish(either, "unverified", verification=Verification.NONE).published
    with contents.acquire(either, "unverified") as handoff:
        contents.assert_in(handoff)
        assert handoff.descriptor is not None
        assert handoff.descriptor.verified is Verification.NONE
        assert handoff.descriptor.layer_digests == ()


def test_a_consumer_can_have_the_bytes_checked_again(either: Bridge) -> None:
    """Verification on acquire finds what changed after the commit: nothing."""
    contents = Contents()
    contents.publish(either, "again")
    with contents.acquire(either, "again", verification=Verification.FULL) as handoff:
        contents.assert_in(handoff)


def test_the_payload_says_where_it_came_from(bridge: Bridge) -> None:
    """Provenance, position and tokens are in the descriptor."""
    contents = Contents()
    source = PayloadReference(key="elsewhere", generation=2)
    contents.publish(bridge, "derived", derived_from=[source], first_position=100)
    with contents.acquire(bridge, "derived", first_position=100) as handoff:
        assert handoff.descriptor is not None
        assert handoff.descriptor.derived_from == (source,)
        assert handoff.first_position == handoff.descriptor.first_position == 100
    assert contents.acquire(bridge, "derived").reason is Reason.POSITION_ENCODING_MISMATCH


def test_generations_can_be_told_apart(bridge: Bridge) -> None:
    """The newest payload is the default, an older one can be named."""
    old, new = Contents(seed=1), Contents(seed=2)
    first, second = old.publish(bridge, "generations"), new.publish(bridge, "generations")
    assert first.reference is not None
    assert second.reference is not None
    assert first.reference.generation < second.reference.generation
    new.assert_in(new.acquire(bridge, "generations"))
    old.assert_in(old.acquire(bridge, "generations", generation=first.reference.generation))


def test_producers_can_compute_in_place(either: Bridge) -> None:
    """Views of the slot are written, by torch or numpy, and no value is copied twice."""
    contents = Contents()
    with either.publish("in place", model=MODEL, geometry=SHAPE, tokens=contents.ids) as slot:
        for layer, (k, v) in contents.layers.items():
            torch.add(k, 0, out=slot.key_view(layer))
            np.copyto(slot.value_view(layer).numpy(), v.numpy())
    assert slot.published, slot.detail
    contents.assert_in(contents.acquire(either, "in place"))


def test_arrays_need_no_torch_on_either_side(either: Bridge) -> None:
    """Arrays go in and come out."""
    contents = Contents()
    with either.publish("arrays", model=MODEL, geometry=SHAPE, tokens=contents.ids) as slot:
        for layer, (k, v) in contents.layers.items():
            slot.write(layer, k.numpy(), v.numpy())
    with contents.acquire(either, "arrays") as handoff:
        for layer, (k, v) in contents.layers.items():
            key, value = handoff.numpy_layer(layer)
            assert np.array_equal(key, k.numpy())
            assert np.array_equal(value, v.numpy())
        del key, value


@pytest.mark.parametrize("order", DimensionOrder)
def test_a_private_window_does_not_change_the_payload(either: Bridge, order: DimensionOrder) -> None:
    """A consumer appends and overwrites in its own copy of the pages, and others see the original."""
    contents = Contents(tokens=70, of=shape(order=order, kv_heads=5, head_dim_k=24, head_dim_v=40))
    contents.publish(either, "window/private")
    with contents.acquire(either, "window/private") as handoff:
        window = handoff.private_window(33)
        for layer, (k, v) in contents.layers.items():
            for tensor, wanted in ((window[layer].key, k), (window[layer].value, v)):
                assert tensor.shape[1] == window[layer].stored_tokens + 33
                assert torch.equal(tensor[:, :70], wanted)
                assert not tensor[:, 70:].any()
                tensor.fill_(3)
        contents.assert_in(handoff)
    contents.assert_in(contents.acquire(either, "window/private"))


def test_a_hold_outlasts_the_linger(either: Bridge) -> None:
    """A producer that holds keeps its payload; when it lets go, the linger begins."""
    contents = Contents()
    slot = contents.publish(either, "held", hold=True, linger_seconds=0)
    assert slot.held
    payload = either.payload("held")
    assert payload is not None
    assert payload.holds == 1
    slot.release()
    assert not slot.held
    wait_for(lambda: contents.acquire(either, "held").reason is Reason.PAYLOAD_EXPIRED)
    assert contents.acquire(either, "held").text == "text of held"


def test_the_bridge_can_be_looked_into(either: Bridge) -> None:
    """Node and payloads are shown with the same figures in both ways."""
    contents = Contents()
    for index in range(3):
        contents.publish(either, f"look/{either.by_value}/{index}")
    node = either.node()
    assert node.version
    assert node.arena.payloads >= 3
    assert node.limits["arena_bytes"] == node.arena.size_bytes
    payloads = either.payloads(f"look/{either.by_value}/")
    assert [payload.reference.key[-1] for payload in payloads] == ["2", "1", "0"]
    assert {payload.state for payload in payloads} == {"COMMITTED"}
    payload = either.payload(payloads[0].reference.key)
    assert payload is not None
    assert payload.descriptor is not None
    assert payload.descriptor.geometry == SHAPE
    assert len(payload.descriptor.layer_digests) == LAYERS
    assert either.payload("look/nothing") is None


def test_reprs_and_snapshots_tell_the_state(either: Bridge) -> None:
    """What is printed while debugging says what the object is and whether it lives."""
    assert either.snapshot().session is None
    contents = Contents()
    slot = contents.publish(either, "repr")
    assert "published" in repr(slot)
    with contents.acquire(either, "repr") as handoff:
        assert "valid" in repr(handoff)
        snapshot = either.snapshot()
        assert snapshot.session is not None
        assert snapshot.session.alive
        assert snapshot.session.attached is not either.by_value
    assert "released" in repr(handoff)
    assert "by value" in repr(either) or "shared memory" in repr(either)
