"""A cache rebuilt from handed-over tensors continues bit for bit as the original does."""

from __future__ import annotations

import copy

import pytest
import torch

from kvbridge.integrations.transformers import build_cache, cache_geometry, extract
from tests.integration.transformers.tiny import (
    LAYOUTS,
    continue_greedily,
    generate,
    model,
    prefill,
    snapshot_of,
    token_ids,
    windows,
)

PREFIX = 20
IDS = token_ids(24)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("headroom", [0, 3, 64])
def test_tokens_and_logits_are_identical(layout: str, attention: str, headroom: int) -> None:
    """Whatever the layout, the attention kernel and the head-room, not a bit of any logit differs."""
    tiny = model(layout)
    tiny.set_attn_implementation(attention)
    geometry = cache_geometry(tiny)
    original = prefill(tiny, IDS[:PREFIX])
    extracted = extract(original, geometry)
    rebuilt = build_cache(windows(extracted, headroom=headroom), geometry=geometry, valid_length=PREFIX)
    expected_tokens, expected_logits = continue_greedily(tiny, IDS[PREFIX:], original)
    tokens, logits = continue_greedily(tiny, IDS[PREFIX:], rebuilt)
    assert tokens == expected_tokens
    assert torch.equal(logits, expected_logits)
    assert rebuilt.get_seq_length() == original.get_seq_length()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", [1, 5, 6, 7, 8, 21])
def test_every_length_around_the_window_continues(layout: str, prefix: int) -> None:
    """A prefix below, at and beyond the sliding window is handed over exactly."""
    tiny = model(layout)
    geometry, extracted = snapshot_of(tiny, IDS[:prefix])
    rebuilt = build_cache(windows(extracted, headroom=4), geometry=geometry, valid_length=prefix)
    expected = continue_greedily(tiny, IDS[prefix:], prefill(tiny, IDS[:prefix]))
    tokens, logits = continue_greedily(tiny, IDS[prefix:], rebuilt)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generate_with_all_ids(layout: str) -> None:
    """`generate` with the whole prompt and the cache says what it says without."""
    tiny = model(layout)
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=32), geometry=geometry, valid_length=PREFIX)
    assert generate(tiny, IDS, rebuilt) == generate(tiny, IDS)
    assert rebuilt.snapshot()["copies"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_generate_with_a_suffix_does_what_the_library_does(layout: str) -> None:
    """With the suffix and a full mask the answer, or in old releases the refusal, is the library's own."""
    tiny = model(layout)
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=32), geometry=geometry, valid_length=PREFIX)
    mask = torch.ones(1, len(IDS), dtype=torch.long)
    try:
        expected = generate(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]), attention_mask=mask)
    except IndexError:
        with pytest.raises(IndexError):
            generate(tiny, IDS[PREFIX:], rebuilt, attention_mask=mask)
    else:
        assert generate(tiny, IDS[PREFIX:], rebuilt, attention_mask=mask) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_beams(layout: str) -> None:
    """Repeated for beam search and reordered in every step, the cache keeps up with the library's own."""
    tiny = model(layout)
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    original = prefill(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=32), geometry=geometry, valid_length=PREFIX)
    for cache in (original, rebuilt):
        cache.batch_repeat_interleave(3)
    assert generate(tiny, IDS, rebuilt, num_beams=3) == generate(tiny, IDS, original, num_beams=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_rebuilt_cache_became_can_be_handed_on(layout: str) -> None:
    """After some generated tokens the cache is extracted as if the library had made it."""
    tiny = model(layout)
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    original = prefill(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=9), geometry=geometry, valid_length=PREFIX)
    continue_greedily(tiny, IDS[PREFIX:], original)
    continue_greedily(tiny, IDS[PREFIX:], rebuilt)
    expected, found = extract(original, geometry), extract(rebuilt, geometry)
    assert found.valid_length == expected.valid_length
    for one, other in zip(expected.layers, found.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


@pytest.mark.parametrize("layout", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_continues_identically(layout: str, dtype: torch.dtype) -> None:
    """Against a continuation of the very same prefill, 16-bit caches are exact as well."""
    tiny = model(layout, dtype=dtype)
    for module in tiny.modules():  # Casting the whole model rounded the frequencies, as `from_pretrained` does not.
        for name in [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]:
            setattr(module, name, getattr(model(layout).model.rotary_emb, name))
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=9), geometry=geometry, valid_length=PREFIX)
    expected = continue_greedily(tiny, IDS[PREFIX:], prefill(tiny, IDS[:PREFIX]))
    tokens, logits = continue_greedily(tiny, IDS[PREFIX:], rebuilt)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])


def test_two_consumers_of_one_prefix_do_not_meet() -> None:
    """Deep copies of a rebuilt cache continue on their own."""
    tiny = model("gemma3")
    geometry, extracted = snapshot_of(tiny, IDS[:PREFIX])
    rebuilt = build_cache(windows(extracted, headroom=32), geometry=geometry, valid_length=PREFIX, owner=object())
    twin = copy.deepcopy(rebuilt)
    assert twin.owner is None
    expected = continue_greedily(tiny, [5, 6], prefill(tiny, IDS[:PREFIX]))
    continue_greedily(tiny, [7, 8, 9], rebuilt)
    tokens, logits = continue_greedily(tiny, [5, 6], twin)
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])
    assert twin.snapshot()["copies"] == 0
