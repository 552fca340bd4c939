"""What is read of a cache is exactly one sequence, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from kvbridge.integrations.transformers import (
    CacheMismatchError,
    ExtractedCache,
    UnsupportedCacheError,
    build_cache,
    cache_argument,
    cache_geometry,
    cache_of,
    extract,
)
from kvbridge.integrations.transformers.extraction import PaddingSide
from tests.integration.transformers.tiny import LAYOUTS, WINDOW, forward, model, prefill, token_ids, windows

IDS = token_ids(20)
STATIC_COUNTS = hasattr(StaticLayer(max_cache_len=2), "cumulative_length")


def assert_same(found: ExtractedCache, expected: ExtractedCache, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare two sequences layer by layer, exactly unless a tolerance is given."""
    assert found.valid_length == expected.valid_length
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.layer == other.layer
        torch.testing.assert_close(one.keys, other.keys, rtol=rtol, atol=atol)
        torch.testing.assert_close(one.values, other.values, rtol=rtol, atol=atol)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_read_without_copying(layout: str) -> None:
    """The result is views, of the shapes that a payload of the geometry has."""
    tiny = model(layout)
    geometry, cache = cache_geometry(tiny), prefill(tiny, IDS)
    extracted = extract(cache, geometry)
    assert (extracted.valid_length, extracted.first_position) == (20, 0)
    for part, layer in zip(extracted.layers, cache.layers, strict=True):
        group = geometry.group_of(part.layer)
        assert part.keys.shape == (group.kv_heads, group.stored_tokens(20), group.head_dim_k)
        assert part.keys.data_ptr() == layer.keys.data_ptr()
        assert part.values.data_ptr() == layer.values.data_ptr()
        assert not part.keys.requires_grad


def batch(tiny: Any, lengths: list[int], side: PaddingSide) -> Any:
    """Return the library's cache over sequences of several lengths, whose positions skip the padding."""
    longest = max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), longest, dtype=torch.long),
        torch.zeros(len(lengths), longest, dtype=torch.long),
    )
    for row, length in enumerate(lengths):
        columns = slice(longest - length, None) if side == "left" else slice(length)
        ids[row, columns] = torch.tensor(token_ids(length, seed=row))
        mask[row, columns] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return cache_of(tiny(ids, attention_mask=mask, position_ids=positions, use_cache=True))


@pytest.mark.parametrize("layout", ["llama-gqa", "mistral", "gemma3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch(layout: str, side: PaddingSide) -> None:
    """Each row without its padding is the cache of its sequence alone, up to the rounding of a larger batch."""
    tiny = model(layout)
    geometry = cache_geometry(tiny)
    lengths = [20, 17, 20] if side == "right" else [9, 20, 3]
    cache = batch(tiny, lengths, side)
    for row, length in enumerate(lengths):
        expected = extract(prefill(tiny, token_ids(length, seed=row)), geometry)
        arguments: dict[str, Any] = {"row": row, "valid_length": length, "padding_side": side, "first_position": 0}
        if side == "right" and length == 17 and layout != "llama-gqa":
            with pytest.raises(CacheMismatchError, match="stored tokens"):  # Padding has pushed real tokens out.
                extract(cache, geometry, **arguments)
            continue
        found = extract(cache, geometry, **arguments)
        assert_same(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_of_a_row_padded_on_the_left_have_to_be_said() -> None:
    """Whether padding counts as positions cannot be seen in the cache, so it is not guessed."""
    tiny = model()
    geometry, cache = cache_geometry(tiny), batch(tiny, [9, 20], "left")
    with pytest.raises(CacheMismatchError, match="0 if positions skip the padding, 11 if they count it"):
        extract(cache, geometry, row=0, valid_length=9, padding_side="left")
    counted = extract(cache, geometry, row=0, valid_length=9, padding_side="left", first_position=11)
    assert counted.first_position == 11
    assert extract(cache, geometry, row=1, padding_side="left").first_position == 0


@pytest.mark.parametrize("layout", ["mistral", "gemma3", "qwen2"])
@pytest.mark.parametrize("tokens", [3, 6, 7, 20])
def test_a_cache_that_keeps_everything_is_cut_to_the_window(layout: str, tokens: int) -> None:
    """A cache made without a configuration stores all tokens of sliding layers; the payload holds the window's."""
    tiny = model(layout)
    geometry = cache_geometry(tiny)
    keeps_all = prefill(tiny, IDS[:tokens], **{cache_argument(): DynamicCache()})
    assert not any(keeps_all.is_sliding)
    assert_same(extract(keeps_all, geometry), extract(prefill(tiny, IDS[:tokens]), geometry))


@pytest.mark.skipif(not STATIC_COUNTS, reason="static caches of this release do not count their tokens")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [3, 6, 7, 8, 20])
def test_static_caches(layout: str, tokens: int) -> None:
    """A static cache gives the tokens that were put into it, wherever its window has moved to."""
    tiny = model(layout)
    geometry = cache_geometry(tiny)
    expected = extract(prefill(tiny, IDS[:tokens]), geometry)
    cache: Any = StaticCache(config=tiny.config, max_cache_len=32)
    for layer in prefill(tiny, IDS[:tokens], **{cache_argument(): DynamicCache()}).layers:
        index = len([one for one in cache.layers if one.is_initialized])
        for token in range(tokens):
            cache.update(layer.keys[:, :, token : token + 1], layer.values[:, :, token : token + 1], index)
    assert_same(extract(cache, geometry), expected)
    rebuilt = build_cache(windows(expected, headroom=4), geometry=geometry, valid_length=tokens)
    assert torch.equal(forward(tiny, [5, 6], rebuilt), forward(tiny, [5, 6], prefill(tiny, IDS[:tokens])))


@pytest.mark.skipif(STATIC_COUNTS, reason="static caches of this release count their tokens")
def test_static_caches_that_guess_their_length_are_refused() -> None:
    """Old releases take every position whose key is not zero for a token."""
    tiny = model()
    with pytest.raises(UnsupportedCacheError, match="StaticLayer: does not count"):
        extract(
            prefill(tiny, IDS, **{cache_argument(): StaticCache(config=tiny.config, max_cache_len=32)}),
            cache_geometry(tiny),
        )


class Mine(DynamicCache):
    """A cache of somebody's own."""


class MyLayer(DynamicLayer):  # type: ignore[no-untyped-call] # untyped there
    """A layer of somebody's own."""


def _made(kind: Any) -> Any:
    return kind()


def _with_layer(layer: Any) -> Any:
    cache = prefill(model(), IDS)
    cache.layers[2] = layer
    return cache


def _offloaded() -> Any:
    cache = prefill(model(), IDS)
    cache.offloading = True
    return cache


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("EncoderDecoderCache", lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())),
        ("Mine", Mine),
        ("DynamicCache", _offloaded),
        ("MyLayer", lambda: _with_layer(_made(MyLayer))),
        ("tuple", tuple),
        ("NoneType", lambda: None),
    ],
)
def test_other_classes_are_refused_by_name(name: str, build: Callable[[], Any]) -> None:
    """Subclasses count as other classes: they may keep their tokens in another way."""
    with pytest.raises(UnsupportedCacheError) as refusal:
        extract(build(), cache_geometry(model()))
    assert refusal.value.name == name


def _cropped_layer() -> Any:
    cache = prefill(model(), IDS)
    cache.layers[3].crop(-1)
    return cache


def _swapped_layer(**changes: Any) -> Any:
    cache = prefill(model(), IDS)
    for name, change in changes.items():
        setattr(cache.layers[1], name, change(getattr(cache.layers[1], name)))
    return cache


def _sliding(window: int) -> Any:
    layer = DynamicSlidingWindowLayer(sliding_window=window)
    layer.update(torch.zeros(1, 2, 20, 8), torch.zeros(1, 2, 20, 8))
    return layer


@pytest.mark.parametrize(
    ("field", "build"),
    [
        ("number of layers", lambda: prefill(model(num_hidden_layers=3), IDS)),
        ("number of layers", lambda: prefill(model(num_hidden_layers=5), IDS)),
        ("layer 0", lambda: DynamicCache(config=model().config)),
        ("layer 2", lambda: _with_layer(_made(DynamicLayer))),
        ("layer 3.sequence length", _cropped_layer),
        ("layer 0.keys.shape", lambda: prefill(model("llama-mha"), IDS)),
        ("layer 0.keys.shape", lambda: prefill(model(head_dim=16), IDS)),
        ("layer 0.keys.dtype", lambda: prefill(model(dtype=torch.float16), IDS)),
        ("layer 1.values.dtype", lambda: _swapped_layer(values=torch.Tensor.double)),
        ("layer 1.values.shape", lambda: _swapped_layer(values=lambda values: values[:, :, :-1])),
        ("layer 1.keys.shape", lambda: _swapped_layer(keys=_first_half, values=_first_half)),
        ("layer 2", lambda: _with_layer(_sliding(32))),
    ],
)
def test_disagreements_are_refused_by_field(field: str, build: Callable[[], Any]) -> None:
    """Layers, lengths, shapes and dtypes must be the geometry's, in every layer."""
    with pytest.raises(CacheMismatchError) as refusal:
        extract(build(), cache_geometry(model()))
    assert refusal.value.field == field


def _first_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :4]


def test_another_window_is_refused() -> None:
    """A layer that forgets by another window than the geometry's has attended otherwise."""
    cache = prefill(model("mistral", sliding_window=9), IDS)
    with pytest.raises(CacheMismatchError, match=f"expected {WINDOW}, found 9"):
        extract(cache, cache_geometry(model("mistral")))


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("valid_length", {"valid_length": 0}),
        ("valid_length", {"valid_length": 21}),
        ("row", {"row": 1}),
        ("row", {"row": -1}),
    ],
)
def test_arguments_out_of_range_are_refused(field: str, arguments: dict[str, Any]) -> None:
    """A length beyond the cache or a row beyond the batch is a mistake."""
    with pytest.raises(CacheMismatchError) as refusal:
        extract(prefill(model(), IDS), cache_geometry(model()), **arguments)
    assert refusal.value.field == field


def test_a_batch_needs_a_row() -> None:
    """Which of several sequences is meant has to be said."""
    tiny = model()
    with pytest.raises(CacheMismatchError, match="2 rows"):
        extract(batch(tiny, [5, 5], "right"), cache_geometry(tiny))
