"""Plans of several parts behind real attention: padded caches continue exactly as unpadded ones, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import DynamicCache
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvbridge.core.attention import AttentionLayout
from kvbridge.integrations.transformers import (
    CacheMismatchError,
    MaskForm,
    UnsupportedCacheError,
    UnsupportedModelError,
    build_cache,
    cache_argument,
    cache_geometry,
    mask_for_model,
    query_positions,
)
from kvbridge.integrations.transformers.families import FAMILIES
from kvbridge.integrations.transformers.masks import MASKS_BY_LAYER_TYPE, mask_form
from tests.integration.transformers.test_families import family_model
from tests.integration.transformers.tiny import WINDOW, config, model, token_ids
from tests.layouts import layout_of

LAYOUT = layout_of((4, 6), (5, 8))
"""Two parts with padding behind each."""
NEW = 3
"""New tokens behind the parts."""
TINY = ("llama-gqa", "mistral", "gemma3")


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits or keys differ by no more than rounding."""
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def keys_and_values(of: Any, ids: list[int]) -> Any:
    """Return keys and values of all tokens in all layers, sliding or not."""
    cache: Any = DynamicCache()
    with torch.no_grad():
        of(torch.tensor([ids]), use_cache=True, **{cache_argument(): cache})
    return cache


def assembled(into: Any, whole: Any, layout: AttentionLayout, *, garbage: float = 9.0) -> Any:
    """Put the real tokens of `whole` into a cache as the layout has them, and garbage into the padding."""
    real = [slot for slot in range(layout.key_length) if layout.position_of(slot) is not None]
    for index, layer in enumerate(whole.layers):
        tensors = []
        for tensor in (layer.keys, layer.values):
            batch, heads, _, dim = tensor.shape
            padded = torch.full((batch, heads, layout.key_length, dim), garbage, dtype=tensor.dtype)
            padded[:, :, real] = tensor[:, :, : len(real)]
            tensors.append(padded)
        into.update(*tensors, index)
    return into


def continued(of: Any, ids: list[int], cache: Any, positions: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` of new tokens behind a cache."""
    arguments = {"attention_mask": mask, "position_ids": positions, cache_argument(): cache}
    with torch.no_grad():
        logits: torch.Tensor = of(torch.tensor([ids]), use_cache=True, **arguments).logits[0]
    return logits


def unpadded(of: Any, ids: list[int]) -> torch.Tensor:
    """Return the logits of a whole sequence."""
    with torch.no_grad():
        logits: torch.Tensor = of(torch.tensor([ids])).logits[0]
    return logits


def assert_continues(of: Any, layout: AttentionLayout = LAYOUT, *, reference: Any = None) -> None:
    """A cache with garbage between its parts continues as the sequence itself, with several tokens and one by one."""
    whole = of if reference is None else reference
    ids = token_ids(layout.valid_length + NEW + 2)
    cache = assembled(DynamicCache(), keys_and_values(whole, ids[: layout.valid_length]), layout)
    found = []
    slot = layout.key_length
    for count in (NEW, 1, 1):
        asking, taken = range(slot, slot + count), layout.valid_length + slot - layout.key_length
        mask = mask_for_model(of.config, layout, asking, torch.float32, sliding_slots=slot)
        positions = query_positions(layout, asking)
        found.append(continued(of, ids[taken : taken + count], cache, positions, mask))
        slot += count
    assert close(torch.cat(found), unpadded(whole, ids)[layout.valid_length :])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_takes_the_mask(model_type: str) -> None:
    """With mask and positions from the layout, garbage between the parts changes no logit of any listed family."""
    assert_continues(family_model(model_type))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", TINY)
def test_a_padded_cache_continues_exactly(layout: str, implementation: str) -> None:
    """The same with either form of mask, for full attention, for sliding windows, and for both in one model."""
    of = model(layout, attn_implementation=implementation)
    assert mask_form(of.config).value == implementation
    assert_continues(of)
    assert_continues(of, layout_of((1, 4), (2, 2), (9, 10)))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("layout", TINY)
def test_a_padded_cache_continues_exactly_with_flex_attention(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """UNCOMPILED ONLY: the model's flex attention takes the `BlockMask`, but no fused kernel is tested here.

    The library always compiles flex attention. For CPUs the C++ that torch 2.13 writes for it does not compile, so the
    library's wrapper is told to return torch's own uncompiled function, which computes the same without fusing.
    """
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _wrapper: flex_attention)
    of = model(layout, attn_implementation="flex_attention")
    assert mask_form(of.config) is MaskForm.FLEX
    assert_continues(of, reference=model(layout))


@pytest.mark.parametrize("layout", TINY)
def test_without_the_mask_the_logits_are_wrong(layout: str) -> None:
    """The garbage is seen unless the mask hides it, so the tests above would notice a mask that is ignored."""
    of = model(layout)
    ids = token_ids(LAYOUT.valid_length + NEW)
    whole = keys_and_values(of, ids[: LAYOUT.valid_length])
    expected = unpadded(of, ids)[LAYOUT.valid_length :]
    new, positions = ids[LAYOUT.valid_length :], query_positions(LAYOUT, NEW)

    unmasked = continued(of, new, assembled(DynamicCache(), whole, LAYOUT), positions, None)
    assert not close(unmasked, expected)
    mask = mask_for_model(of.config, LAYOUT, NEW, torch.float32, sliding_slots=LAYOUT.key_length)
    misplaced = continued(of, new, assembled(DynamicCache(), whole, LAYOUT), positions + LAYOUT.padding_length, mask)
    assert not close(misplaced, expected)


@pytest.mark.parametrize("layout", TINY)
def test_a_text_part_is_prefilled_inside_the_plan(layout: str) -> None:
    """The second part as text, with its padding, gives the keys that its tokens have in the sequence itself."""
    of = model(layout)
    plan = layout_of((4, 6), (2, 3), (3, 3))
    ids = token_ids(plan.valid_length)
    whole = keys_and_values(of, ids)
    cache = assembled(DynamicCache(), whole, layout_of((4, 6)))
    asking = range(6, plan.key_length)
    tokens = [*ids[4:6], 7, *ids[6:]]
    mask = mask_for_model(of.config, plan, asking, torch.float32, sliding_slots=6)
    logits = continued(of, tokens, cache, query_positions(plan, asking), mask)

    real = [0, 1, 3, 4, 5]
    assert close(logits[real], unpadded(of, ids)[4:])
    layers: Any = zip(cache.layers, whole.layers, strict=True)
    for ours, theirs in layers:
        assert close(ours.keys[:, :, [6, 7, 9, 10, 11]], theirs.keys[:, :, 4:])


@pytest.mark.parametrize("layout", TINY)
def test_plans_of_different_length_make_a_batch(layout: str) -> None:
    """Each row of a padded batch continues as its own sequence."""
    of = model(layout)
    plans = [LAYOUT, layout_of((2, 3), (1, 1))]
    longest = max(plan.key_length for plan in plans)
    sequences = [token_ids(plan.valid_length + NEW, seed=row) for row, plan in enumerate(plans)]
    rows = [
        assembled(DynamicCache(), keys_and_values(of, ids[: plan.valid_length]), plan.padded_to(longest))
        for plan, ids in zip(plans, sequences, strict=True)
    ]
    cache: Any = DynamicCache()
    for index in range(len(rows[0].layers)):
        layers = [row.layers[index] for row in rows]
        cache.update(torch.cat([layer.keys for layer in layers]), torch.cat([layer.values for layer in layers]), index)
    mask = mask_for_model(of.config, plans, NEW, torch.float32, sliding_slots=longest)
    arguments = {"attention_mask": mask, "position_ids": query_positions(plans, NEW), cache_argument(): cache}
    with torch.no_grad():
        logits = of(torch.tensor([ids[-NEW:] for ids in sequences]), use_cache=True, **arguments).logits

    for row, ids in zip(logits, sequences, strict=True):
        assert close(row, unpadded(of, ids)[-NEW:])


@pytest.mark.parametrize("layout", ["mistral", "gemma3"])
def test_the_librarys_sliding_layers_have_forgotten_the_first_slots(layout: str) -> None:
    """By default the mask is as wide as what they keep, which is enough where no padding lies inside the window."""
    of = model(layout)
    plan = layout_of((4, 9), (WINDOW + 1, WINDOW + 1))
    ids = token_ids(plan.valid_length + NEW)
    cache = assembled(DynamicCache(config=of.config), keys_and_values(of, ids[: plan.valid_length]), plan)
    mask = mask_for_model(of.config, plan, NEW, torch.float32)
    logits = continued(of, ids[-NEW:], cache, query_positions(plan, NEW), mask)
    assert close(logits, unpadded(of, ids)[-NEW:])


@pytest.mark.parametrize("layout", TINY)
def test_a_cache_in_lent_memory_takes_the_same_mask(layout: str) -> None:
    """A cache that appends in place behind padded parts continues exactly, first at once and then token by token."""
    of = model(layout)
    plan = layout_of((4, 9), (WINDOW + 1, WINDOW + 1))
    ids = token_ids(plan.valid_length + NEW + 1)
    padded = assembled(DynamicCache(config=of.config), keys_and_values(of, ids[: plan.valid_length]), plan)
    memory: list[Any] = [
        (index, *(torch.nn.functional.pad(tensor, (0, 0, 0, 8)) for tensor in (layer.keys, layer.values)))
        for index, layer in enumerate(padded.layers)
    ]
    cache = build_cache(memory, geometry=cache_geometry(of), valid_length=plan.key_length)
    expected, slot = unpadded(of, ids)[plan.valid_length :], plan.key_length
    for start, count in ((0, NEW), (NEW, 1)):
        asking = range(slot + start, slot + start + count)
        mask = mask_for_model(of.config, plan, asking, torch.float32)
        new = ids[plan.valid_length + start :][:count]
        logits = continued(of, new, cache, query_positions(plan, asking), mask)
        assert close(logits, expected[start : start + count])
    assert cache.snapshot()["copies"] == 0


@pytest.mark.parametrize("layout", ["mistral", "gemma3"])
def test_tokens_that_sliding_layers_lost_are_missed(layout: str) -> None:
    """Padding inside the window pushes tokens out of the library's layers: no mask can bring them back."""
    plan = layout_of((4, 6), (2, 2))
    with pytest.raises(CacheMismatchError, match="expected at least 8 and at most 8, found 6") as refused:
        mask_for_model(config(layout), plan, NEW, torch.float32, form=MaskForm.SDPA)
    assert refused.value.field == "sliding_slots"
    assert mask_for_model(config("llama-gqa"), plan, NEW, torch.float32, form=MaskForm.SDPA) is not None


@pytest.mark.parametrize("slots", [6, 9])
def test_an_impossible_number_of_held_slots_is_refused(slots: int) -> None:
    """Too few slots hide tokens, and more than there are cannot be held."""
    with pytest.raises(CacheMismatchError, match="sliding_slots"):
        mask_for_model(
            config("mistral"), layout_of((4, 6), (2, 2)), 1, torch.float32, form=MaskForm.SDPA, sliding_slots=slots
        )


def test_models_with_several_layer_types_take_a_dictionary() -> None:
    """One mask for each type of layer that the model has, and only there."""
    gemma: Any = mask_for_model(config("gemma3"), layout_of((2, 2)), 2, torch.float32, form=MaskForm.SDPA)
    assert set(gemma) == {"sliding_attention", "full_attention"}
    qwen: Any = mask_for_model(config("qwen3"), layout_of((2, 2)), 2, torch.float32, form=MaskForm.SDPA)
    assert set(qwen) == {"full_attention"}
    for layout in ("llama-gqa", "mistral"):
        plain: Any = mask_for_model(config(layout), layout_of((2, 2)), 2, torch.float32, form=MaskForm.EAGER)
        assert plain.shape == (1, 1, 2, 4)
        assert plain.dtype is torch.float32
    assert set(FAMILIES) >= MASKS_BY_LAYER_TYPE


def test_one_mask_for_layers_with_different_windows_is_refused() -> None:
    """A family that takes a plain tensor cannot be told two windows."""
    types = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(UnsupportedCacheError, match="takes one mask for all layers, whose windows are 7 and None"):
        mask_for_model(config("mistral", layer_types=types), layout_of((2, 2)), 2, torch.float32, form=MaskForm.SDPA)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "paged|sdpa", "somebodys_own", None])
def test_implementations_without_such_masks_are_refused(implementation: str | None) -> None:
    """Flash attention drops a mask of four dimensions, and of unknown ones nobody knows."""
    settings = config()
    settings._attn_implementation_internal = implementation
    with pytest.raises(UnsupportedModelError) as refused:
        mask_for_model(settings, LAYOUT, NEW, torch.float32)
    assert refused.value.name == str(implementation)
    assert mask_for_model(settings, LAYOUT, NEW, torch.float32, form=MaskForm.EAGER) is not None


def test_an_implementation_of_somebodys_own_may_say_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is registered with a mask function of the library takes that function's form."""
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "somebodys_own", sdpa_mask)
    settings = config()
    settings._attn_implementation_internal = "somebodys_own"
    assert mask_form(settings) is MaskForm.SDPA
