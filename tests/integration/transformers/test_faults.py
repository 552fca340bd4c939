"""The faults that transformers accepts without a word, and what becomes of each of them here.

The first test shows the silence: it puts each fault into a cache of the library's own, which computes wrong logits and
raises nothing. Every other test shows that the same fault cannot happen on the way through a bridge, or is caught.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from transformers import DynamicCache

from kvbridge import (
    Bridge,
    DimensionOrder,
    LayersMissingError,
    Reason,
    ShapeMismatchError,
    UnknownLayerError,
    Verification,
)
from kvbridge.integrations.transformers import (
    CacheMismatchError,
    ModelPort,
    UnsupportedCacheError,
    build_cache,
    cache_geometry,
    extract,
)
from tests.integration.transformers.handover import IDS, PREFIX, Handover
from tests.integration.transformers.tiny import (
    continue_greedily,
    forward,
    generate,
    model,
    prefill,
    snapshot_of,
    tokenizer,
    windows,
)

Layers: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]


def layers_of(of: Any, ids: list[int]) -> Layers:
    """Return copies of K and V of all layers, `[1, heads, tokens, head dimension]`."""
    return [(layer.keys.clone(), layer.values.clone()) for layer in prefill(of, ids).layers]


def naive(layers: Layers) -> Any:
    """Build a cache as anyone would who trusts what arrived."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def padded_tail(tiny: Any) -> Layers:
    return [
        (torch.cat([keys, keys[:, :, :3]], 2), torch.cat([values, values[:, :, :3]], 2))
        for keys, values in layers_of(tiny, IDS[:PREFIX])
    ]


def without_scale(tiny: Any) -> Layers:
    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = tensor.abs().max() / 448
        return (tensor / scale).to(torch.float8_e4m3fn).float()

    return [(rounded(keys), rounded(values)) for keys, values in layers_of(tiny, IDS[:PREFIX])]


SILENT: dict[str, Callable[[Any], Layers]] = {
    "padded tail not trimmed": padded_tail,
    "tail tokens missing": lambda tiny: layers_of(tiny, IDS[: PREFIX - 2]),
    "K and V swapped": lambda tiny: [(values, keys) for keys, values in layers_of(tiny, IDS[:PREFIX])],
    "heads permuted": lambda tiny: [(k.flip(1), v.flip(1)) for k, v in layers_of(tiny, IDS[:PREFIX])],
    "NHD bytes read as HND": lambda tiny: [
        (k.transpose(1, 2).reshape(k.shape), v.transpose(1, 2).reshape(v.shape))
        for k, v in layers_of(tiny, IDS[:PREFIX])
    ],
    "layers rotated": lambda tiny: [*layers_of(tiny, IDS[:PREFIX])[1:], *layers_of(tiny, IDS[:PREFIX])[:1]],
    "other rope theta": lambda _: layers_of(model(rope_theta=500.0), IDS[:PREFIX]),
    "other weights": lambda _: layers_of(model(seed=1), IDS[:PREFIX]),
    "another first token": lambda tiny: layers_of(tiny, [IDS[0] + 1, *IDS[1:PREFIX]]),
    "fp8 without its scale": without_scale,
    "an extra layer": lambda tiny: [*layers_of(tiny, IDS[:PREFIX]), *layers_of(tiny, IDS[:PREFIX])[:1]],
}
HARMLESS = {"an extra layer"}


@pytest.mark.parametrize("fault", SILENT)
def test_the_library_itself_says_nothing(fault: str) -> None:
    """Each fault passes without an exception, and all but the extra layer change the logits."""
    tiny = model()
    right = forward(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))
    wrong = forward(tiny, IDS[PREFIX:], naive(SILENT[fault](tiny)))
    assert torch.isfinite(wrong).all()
    assert ((wrong - right).abs().max() > 1e-5) == (fault not in HARMLESS)


def test_the_library_itself_says_nothing_about_a_window_without_its_count() -> None:
    """A sliding layer that was filled with what a window keeps takes it for the whole sequence."""
    tiny = model("mistral")
    right = forward(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))
    cache = DynamicCache(config=tiny.config)
    for index, (keys, values) in enumerate(layers_of(tiny, IDS[:PREFIX])):
        cache.update(keys, values, index)
    wrong = forward(tiny, IDS[PREFIX:], cache)
    assert (wrong - right).abs().max() > 1e-5


def test_a_padded_tail_is_trimmed_or_refused(bridge: Bridge) -> None:
    """A row that is longer than its tokens is refused; with its valid length the padding is left behind."""
    tiny = model()
    handover = Handover(bridge, tiny)
    padded = naive(padded_tail(tiny))
    with pytest.raises(CacheMismatchError, match="expected 23, the length of the cache, found 20 tokens"):
        handover.publish(padded)
    with handover.acquire(handover.publish(padded, valid_length=PREFIX)) as handoff:
        cache = handoff.as_transformers_cache()
        expected = continue_greedily(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))
        tokens, logits = continue_greedily(tiny, IDS[PREFIX:], cache)
        assert tokens == expected[0]
        assert torch.equal(logits, expected[1])


def test_missing_tail_tokens_are_refused_or_computed(bridge: Bridge) -> None:
    """A cache shorter than its tokens is refused; published as what it is, the rest is computed by the consumer."""
    tiny = model()
    handover = Handover(bridge, tiny)
    shorter = prefill(tiny, IDS[: PREFIX - 2])
    with pytest.raises(CacheMismatchError, match="expected 18, the length of the cache, found 20 tokens"):
        handover.publish(shorter)
    with handover.acquire(handover.publish(shorter, IDS[: PREFIX - 2])) as handoff:
        assert generate(tiny, IDS, handoff.as_transformers_cache()) == generate(tiny, IDS)


def test_the_token_that_generate_never_fed_back_is_noticed(bridge: Bridge) -> None:
    """All that `generate` returned is one token more than its cache covers."""
    tiny = model()
    handover = Handover(bridge, tiny)
    cache = prefill(tiny, IDS[:PREFIX])
    answer = generate(tiny, IDS, cache)
    with pytest.raises(CacheMismatchError, match="the last token is not in the cache yet"):
        handover.publish(cache, [*IDS, *answer])
    assert handover.publish(cache, [*IDS, *answer[:-1]]).published


@pytest.mark.parametrize("layout", ["llama-gqa", "llama-mha", "gemma3", "qwen2"])
@pytest.mark.parametrize("order", DimensionOrder)
@pytest.mark.parametrize("tokens", [2, 4, 20])
def test_nothing_is_swapped_permuted_transposed_or_rotated(
    bridge: Bridge, layout: str, order: DimensionOrder, tokens: int
) -> None:
    """K is K, and every head, token and layer arrives in its place, also where shapes would allow another reading."""
    tiny = model(layout)
    handover = Handover(bridge, tiny, order=order)
    original = prefill(tiny, IDS[:tokens])
    with handover.acquire(handover.publish(original, IDS[:tokens])) as handoff:
        cache = handoff.as_transformers_cache()
        for arrived, layer in zip(cache.layers, original.layers, strict=True):
            assert torch.equal(arrived.keys, layer.keys)
            assert torch.equal(arrived.values, layer.values)
            assert arrived.get_seq_length() == layer.get_seq_length()


def test_another_order_is_refused_by_the_gate(bridge: Bridge) -> None:
    """A consumer that reads heads first is not given tokens first."""
    handover = Handover(bridge, model(), model(), order=DimensionOrder.NHD)
    reason, detail = handover.refusal()
    assert reason is Reason.GEOMETRY_MISMATCH
    assert "order" in detail


def test_a_tensor_in_the_wrong_order_does_not_fit_the_slot(bridge: Bridge) -> None:
    """Who writes a slot by hand is held to the geometry's order."""
    tiny = model()
    extracted = extract(prefill(tiny, IDS[:PREFIX]), cache_geometry(tiny))
    port = ModelPort(tiny, tokenizer())
    part = extracted.layers[0]
    with (
        pytest.raises(ShapeMismatchError),
        bridge.publish("order", model=port.tag, geometry=port.geometry, tokens=IDS[:PREFIX]) as slot,
    ):
        slot.write(0, part.keys.transpose(0, 1), part.values.transpose(0, 1))


@pytest.mark.parametrize(
    ("layout", "changes", "field"),
    [
        ("llama-gqa", {"rope_theta": 500.0}, "theta"),
        ("llama-gqa", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ("gemma3", {"rope_local_base_freq": 500.0}, "theta"),
    ],
)
def test_another_rotation_is_refused_by_the_gate(
    bridge: Bridge, layout: str, changes: dict[str, Any], field: str
) -> None:
    """Keys that were rotated by other angles are told by the declared rotation, though all weights are equal."""
    handover = Handover(bridge, model(layout, **changes), model(layout))
    assert handover.producer.tag == handover.consumer.tag
    reason, detail = handover.refusal()
    assert reason is Reason.POSITION_ENCODING_MISMATCH
    assert field in detail


def test_other_weights_are_refused_by_the_gate(bridge: Bridge) -> None:
    """One step of fine-tuning in one parameter is another revision."""
    tuned = model()
    tuned.model.layers[3].self_attn.v_proj.weight.data[0, 0] += 1e-7
    reason, detail = Handover(bridge, tuned, model()).refusal()
    assert reason is Reason.MODEL_VERSION_MISMATCH
    assert "revision" in detail


@pytest.mark.parametrize("position", [0, 10, 19])
def test_another_token_is_refused_by_the_gate(bridge: Bridge, position: int) -> None:
    """A prompt that differs anywhere in the cached part does not continue the cache."""
    other = [*IDS[:position], IDS[position] + 1, *IDS[position + 1 :]]
    reason, _ = Handover(bridge, model()).refusal(other)
    assert reason is Reason.TOKENS_MISMATCH


def test_fp8_without_scales_has_no_geometry() -> None:
    """No geometry describes fp8 here, so neither the values nor their lost scale are ever handed over."""
    tiny = model()
    with pytest.raises(UnsupportedCacheError, match="float8_e4m3fn"):
        cache_geometry(tiny, dtype=torch.float8_e4m3fn)
    quantised = naive([(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in layers_of(tiny, IDS)])
    with pytest.raises(CacheMismatchError, match="expected float32, found float8_e4m3fn"):
        extract(quantised, cache_geometry(tiny))


@pytest.mark.parametrize("layout", ["mistral", "gemma3", "qwen2"])
def test_a_window_keeps_its_count(bridge: Bridge, layout: str) -> None:
    """Layers that forgot arrive with the length that they have seen, and continue exactly."""
    tiny = model(layout)
    handover = Handover(bridge, tiny)
    with handover.acquire(handover.publish(prefill(tiny, IDS[:PREFIX]))) as handoff:
        cache = handoff.as_transformers_cache()
        expected = continue_greedily(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))
        tokens, logits = continue_greedily(tiny, IDS[PREFIX:], cache)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("layout", ["mistral", "gemma3"])
def test_a_window_that_lost_its_count_is_refused(bridge: Bridge, layout: str) -> None:
    """A cache that was itself rebuilt without the count says that it covers fewer tokens than there are."""
    tiny = model(layout)
    broken = DynamicCache(config=tiny.config)
    for index, (keys, values) in enumerate(layers_of(tiny, IDS[:PREFIX])):
        broken.update(keys, values, index)
    with pytest.raises(CacheMismatchError, match=r"expected 6, the length|sequence length: expected 6, found 20"):
        Handover(bridge, tiny).publish(broken)


def test_half_precision_does_not_become_single(bridge: Bridge) -> None:
    """Another dtype is refused by the gate, when a cache is built, and when a model writes to it."""
    half, single = model(head_dim=4, hidden_size=16), model(head_dim=4, hidden_size=16)
    handover = Handover(bridge, half, single, dtype=torch.float16)
    cache = prefill(half, IDS[:PREFIX])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.half(), layer.values.half()
    with handover.acquire(handover.publish(cache)) as handoff:
        assert handoff.kv is None
        assert handoff.reason is Reason.GEOMETRY_MISMATCH
        assert "dtype" in handoff.detail
    extracted = extract(cache, handover.producer.geometry)
    with pytest.raises(CacheMismatchError, match="expected float32, found float16"):
        build_cache(windows(extracted), geometry=cache_geometry(single), valid_length=PREFIX)
    built = build_cache(windows(extracted, headroom=8), geometry=handover.producer.geometry, valid_length=PREFIX)
    with pytest.raises(CacheMismatchError, match=r"expected torch\.float16, found torch\.float32"):
        forward(single, IDS[PREFIX:], built)


def test_an_extra_layer_is_refused(bridge: Bridge) -> None:
    """One layer more than the geometry's is refused on both sides, and by the slot."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    with pytest.raises(CacheMismatchError, match="number of layers: expected 4, found 5"):
        Handover(bridge, tiny).publish(naive(SILENT["an extra layer"](tiny)))
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    built = list(windows(extracted))
    for extra in ((4, *built[0][1:]), built[0]):
        with pytest.raises(CacheMismatchError, match="layer"):
            build_cache([*built, extra], geometry=geometry, valid_length=PREFIX)
    with (
        pytest.raises(UnknownLayerError),
        bridge.publish("extra", model=port.tag, geometry=geometry, tokens=IDS[:PREFIX]) as slot,
    ):
        slot.write(4, extracted.layers[0].keys, extracted.layers[0].values)


def test_a_missing_layer_is_refused(bridge: Bridge) -> None:
    """One layer fewer than the geometry's is refused on both sides, and by the slot."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    with pytest.raises(CacheMismatchError, match="number of layers: expected 4, found 3"):
        Handover(bridge, tiny).publish(naive(layers_of(tiny, IDS[:PREFIX])[:3]))
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    with pytest.raises(CacheMismatchError, match=r"none for \[3\]"):
        build_cache(list(windows(extracted))[:3], geometry=geometry, valid_length=PREFIX)
    with (
        pytest.raises(LayersMissingError),
        bridge.publish("missing", model=port.tag, geometry=geometry, tokens=IDS[:PREFIX]) as slot,
    ):
        slot.write(0, extracted.layers[0].keys, extracted.layers[0].values)


def test_another_number_of_heads_is_refused(bridge: Bridge) -> None:
    """Heads are compared when a cache is read, when one is built, and by the gate."""
    tiny, wide = model(), model("llama-mha")
    with pytest.raises(CacheMismatchError, match=r"layer 0.keys.shape: expected \[2, 20, 8\], found \[4, 20, 8\]"):
        Handover(bridge, tiny).publish(prefill(wide, IDS[:PREFIX]))
    _, extracted = snapshot_of(wide, IDS[:PREFIX])
    with pytest.raises(CacheMismatchError, match="shape"):
        build_cache(windows(extracted), geometry=cache_geometry(tiny), valid_length=PREFIX)
    handover = Handover(bridge, wide)
    slot = handover.publish(prefill(wide, IDS[:PREFIX]))
    geometry = cache_geometry(tiny)
    with bridge.acquire(slot.key, model=handover.producer.tag, geometry=geometry, tokens=IDS, timeout=10) as handoff:
        assert handoff.reason is Reason.GEOMETRY_MISMATCH


def test_values_that_are_not_finite_are_refused(bridge: Bridge) -> None:
    """A cache with a NaN inside the valid length is not published, whoever computed it."""
    tiny = model()
    cache = prefill(tiny, IDS[:PREFIX])
    cache.layers[2].values[0, 1, 7, 3] = float("nan")
    slot = Handover(bridge, tiny).publish(cache, verification=Verification.FULL)
    assert not slot.published
    assert slot.reason is Reason.VALUES_NOT_FINITE


@pytest.mark.parametrize("layout", ["llama-gqa", "gemma3"])
def test_a_cache_of_the_whole_prompt_gives_its_last_token_up(bridge: Bridge, layout: str) -> None:
    """The library feeds some prompt a second time in new releases and fails in old ones; here it continues exactly."""
    tiny = model(layout)
    handover = Handover(bridge, tiny)
    short = IDS[:6]
    with handover.acquire(handover.publish(prefill(tiny, short), short), short) as handoff:
        cache = handoff.as_transformers_cache()
        assert cache.get_seq_length() == 5
        assert generate(tiny, short, cache) == generate(tiny, short)


def test_a_window_over_the_whole_prompt_cannot_give_one_up(bridge: Bridge) -> None:
    """What a sliding layer has forgotten cannot come back, so the text has to be taken."""
    tiny = model("gemma3")
    handover = Handover(bridge, tiny)
    with handover.acquire(handover.publish(prefill(tiny, IDS[:PREFIX])), IDS[:PREFIX]) as handoff:
        assert handoff.kv
        with pytest.raises(UnsupportedCacheError, match="sliding_window"):
            handoff.as_transformers_cache()


def test_positions_that_do_not_begin_at_0_are_refused(bridge: Bridge) -> None:
    """Transformers would put the first cached token at position 0."""
    tiny = model()
    handover = Handover(bridge, tiny)
    slot = handover.publish(prefill(tiny, IDS[:PREFIX]), first_position=11)
    with handover.acquire(slot) as handoff:
        assert handoff.reason is Reason.POSITION_ENCODING_MISMATCH
    with (
        handover.acquire(slot, first_position=11) as handoff,
        pytest.raises(UnsupportedCacheError, match="first_position: is 11"),
    ):
        handoff.as_transformers_cache()
