"""The self-test passes attention that does what the mask says, and catches every way of not doing so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvbridge.integrations.transformers import MaskForm, MaskSelfTest, attention_respects_mask, cache_argument
from kvbridge.integrations.transformers.families import FAMILIES
from kvbridge.integrations.transformers.selftest import DETAIL_CHARACTERS_MAX
from tests.integration.transformers.test_families import family_model
from tests.integration.transformers.tiny import model, token_ids

TINY = ("llama-gqa", "mistral", "gemma3")
NAME = "somebodys_own"


class Attention:
    """An attention function of somebody's own, which may change the mask before it uses it."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        self.change = change
        self.calls = 0

    def __call__(
        self,
        module: Any,
        *tensors: torch.Tensor,
        scaling: float | None = None,
        **_ignored: Any,
    ) -> tuple[torch.Tensor, None]:
        self.calls += 1
        query, key, value, attention_mask = tensors
        keys, values = (tensor.repeat_interleave(module.num_key_value_groups, 1) for tensor in (key, value))
        scale = key.shape[-1] ** -0.5 if scaling is None else scaling
        allowed = self.change(module, attention_mask)
        scores = (query @ keys.transpose(2, 3) * scale).masked_fill(~allowed, torch.finfo(query.dtype).min)
        return (scores.softmax(-1) @ values).transpose(1, 2), None


def causal(mask: torch.Tensor) -> torch.Tensor:
    """Return what flash attention makes of a mask: the last queries see everything before them."""
    queries, keys = mask.shape[2:]
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def ignoring(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Ignore the mask, but attend causally."""
    return causal(mask)


def ignoring_for_one_token(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Do as the mask says except where there is one query."""
    return causal(mask) if mask.shape[2] == 1 else mask


def ignoring_behind_a_cache(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Do as the mask says except where there are more keys than queries."""
    return causal(mask) if mask.shape[2] < mask.shape[3] else mask


def ignoring_in_sliding_layers(module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Ignore the mask in some layers."""
    return mask if module.sliding_window is None else causal(mask)


def seeing_the_future(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Hide the padding alone, as implementations do that reduce the mask to one row."""
    return mask[:, :, -1:]


def seeing_itself(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Hide everything but the newest slot."""
    keys = mask.shape[-1]
    return torch.eye(keys, dtype=torch.bool)[-mask.shape[2] :]


def inverting(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Take True for hidden, as some libraries do."""
    return ~mask


def obeying(_module: Any, mask: torch.Tensor) -> torch.Tensor:
    """Do as the mask says."""
    return mask


def result_of(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, torch.Tensor], torch.Tensor], layout: str = "llama-gqa"
) -> MaskSelfTest:
    """Test a model that runs somebody's own attention function."""
    attention = Attention(change)
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, attention)
    result = attention_respects_mask(model(layout, attn_implementation=NAME))
    assert attention.calls > 0
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", TINY)
def test_the_librarys_own_attention_passes(layout: str, implementation: str, dtype: torch.dtype) -> None:
    """With full attention, sliding windows and both, in every dtype, hidden tokens move nothing and visible ones do."""
    result = attention_respects_mask(model(layout, attn_implementation=implementation, dtype=dtype))
    assert result.ok, result.detail
    assert [figures.step for figures in result.figures] == ["prefill", "behind a cache", "one token"]
    for figures in result.figures:
        assert figures.hidden_shift <= figures.tolerance < figures.visible_shift
    assert "hidden tokens moved no logit" in result.detail


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_passes(model_type: str) -> None:
    """No listed family does something to masks that the test takes for disregard."""
    result = attention_respects_mask(family_model(model_type))
    assert result.ok, result.detail


@pytest.mark.parametrize("layout", TINY)
def test_an_implementation_that_ignores_its_mask_is_caught(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal attention over the padding moves logits at once, in every step."""
    result = result_of(monkeypatch, ignoring, layout)
    assert not result.ok
    assert "the mask is not respected: prefill" in result.detail
    assert not any(figures.hides for figures in result.figures)


def test_one_with_a_mask_function_of_the_library_is_caught_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the library prepares a mask for an implementation does not mean that it is used."""
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, NAME, sdpa_mask)
    assert not result_of(monkeypatch, ignoring).ok


@pytest.mark.parametrize(
    ("change", "layout", "detail"),
    [
        (ignoring_for_one_token, "llama-gqa", "the mask is not respected: one token"),
        (ignoring_behind_a_cache, "llama-gqa", "the mask is not respected: behind a cache"),
        (ignoring_in_sliding_layers, "gemma3", "the mask is not respected: prefill"),
        (seeing_the_future, "llama-gqa", "the mask is not respected: prefill"),
        (inverting, "llama-gqa", "the mask is not respected: prefill"),
        (seeing_itself, "llama-gqa", "nothing can be told: prefill"),
    ],
)
def test_partial_disregard_is_caught(
    change: Callable[[Any, torch.Tensor], torch.Tensor], layout: str, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignoring the mask in one step, in some layers or in one direction is enough, and so is hiding too much."""
    result = result_of(monkeypatch, change, layout)
    assert not result.ok
    assert detail in result.detail


@pytest.mark.parametrize("layout", TINY)
def test_somebodys_own_attention_passes_if_it_obeys(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Being unknown is no disregard: the same function that is caught above passes once it uses its mask."""
    result = result_of(monkeypatch, obeying, layout)
    assert result.ok, result.detail


def test_the_form_of_mask_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floats are no booleans: an implementation is tested with what it takes, not with what it misreads."""
    attention = Attention(lambda _module, mask: mask == 0)
    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, attention)
    of = model(attn_implementation=NAME)
    assert attention_respects_mask(of, form=MaskForm.EAGER).ok
    assert not attention_respects_mask(of).ok


def test_an_implementation_that_raises_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the result, however long."""

    def refuse(_module: Any, _mask: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("takes no mask" * 100)

    result = result_of(monkeypatch, refuse)
    assert not result.ok
    assert result.detail.startswith("NotImplementedError: takes no mask")
    assert len(result.detail) == DETAIL_CHARACTERS_MAX
    assert result.figures == ()


def test_logits_that_are_no_numbers_do_not_pass() -> None:
    """NaN compares as neither hidden nor shown."""
    of = model()
    with torch.no_grad():
        of.lm_head.weight.fill_(float("nan"))
    result = attention_respects_mask(of)
    assert not result.ok
    assert len(result.figures) == 3


@pytest.mark.parametrize(("change", "ok"), [(2.0**-24, True), (1e-3, False)])
def test_rounding_is_no_disregard(change: float, ok: bool) -> None:
    """A row with other garbage may come out of the kernels with a last bit of its own, but not with more."""
    of = model()

    def disturb(_module: Any, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        logits[2] *= 1 - change
        return logits

    of.lm_head.register_forward_hook(disturb)
    result = attention_respects_mask(of)
    assert result.ok is ok, result.detail
    assert all(figures.hidden_shift > 0 for figures in result.figures)


def test_what_is_no_model_does_not_pass() -> None:
    """There is an answer for everything."""
    result = attention_respects_mask(torch.nn.Linear(2, 2))
    assert not result.ok
    assert "UnsupportedModelError" in result.detail


def test_models_whose_attention_moves_nothing_tell_nothing() -> None:
    """With all weights zero no logit moves, which is not taken for a mask that hides."""
    of = model()
    with torch.no_grad():
        for parameter in of.parameters():
            parameter.zero_()
    result = attention_respects_mask(of)
    assert not result.ok
    assert "nothing can be told" in result.detail


def test_modes_random_numbers_and_gradients_are_left_alone() -> None:
    """A model in training, parts of it frozen, is tested without dropout and afterwards as it was."""
    of = model(attention_dropout=0.5).train()
    of.model.layers[1].eval()
    modes = [module.training for module in of.modules()]
    weights = {name: tensor.clone() for name, tensor in of.state_dict().items()}
    state = torch.get_rng_state()

    result = attention_respects_mask(of)

    assert result.ok, result.detail
    assert [module.training for module in of.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in of.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in of.state_dict().items())


def test_random_numbers_that_attention_draws_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An implementation that draws some leaves the caller's sequence where it was."""

    def drawing(_module: Any, mask: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return mask

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, Attention(drawing))
    of = model(attn_implementation=NAME)
    state = torch.get_rng_state()
    assert attention_respects_mask(of).ok
    assert torch.equal(torch.get_rng_state(), state)


def test_modes_come_back_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the attention function raises, the model stays in training."""

    def refuse(_module: Any, _mask: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    monkeypatch.setitem(AttentionInterface._global_mapping, NAME, Attention(refuse))
    of = model(attn_implementation=NAME).train()
    assert not attention_respects_mask(of).ok
    assert all(module.training for module in of.modules())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
    ],
)
@pytest.mark.parametrize("length", [60, 4])
def test_models_that_change_with_the_text_are_not_run(rope: dict[str, Any], length: int) -> None:
    """Rotary embeddings that would adapt to the test's few tokens keep what they had last adapted to."""
    parameters = {**rope, "rope_theta": 10_000.0, "original_max_position_embeddings": 32}
    of = model(rope_parameters=parameters, max_position_embeddings=32)
    with torch.no_grad():
        of(torch.tensor([token_ids(length)]))
    buffers = {name: tensor.clone() for name, tensor in of.model.rotary_emb.named_buffers()}

    result = attention_respects_mask(of)

    assert not result.ok
    assert "depend on the current sequence length" in result.detail
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in of.model.rotary_emb.named_buffers())


def test_no_generation_state_is_left() -> None:
    """A cache that the caller has is not touched, and generation goes on as without the test."""
    of = model()
    ids = torch.tensor([token_ids(9)])
    with torch.no_grad():
        expected = of.generate(ids, do_sample=False, max_new_tokens=6)
        first = of(ids, use_cache=True)
        cache = getattr(first, cache_argument())
        assert attention_respects_mask(of).ok
        assert cache.get_seq_length() == 9
        assert torch.equal(of.generate(ids, do_sample=False, max_new_tokens=6), expected)


def test_compiled_models_are_run_uncompiled() -> None:
    """The test takes no compilation, whether the model is wrapped or compiles itself."""

    def never(_graph: Any, _inputs: Any) -> Any:
        raise AssertionError("compiled")

    compiled: Any = torch.compile(model(), backend=never)
    itself = model()
    itself.compile(backend=never)
    for of in (compiled, itself):
        result = attention_respects_mask(of)
        assert result.ok, result.detail


@pytest.mark.parametrize("vocabulary", [8, 40, 1000])
def test_any_vocabulary_gets_an_answer(vocabulary: int) -> None:
    """Ids stay inside the vocabulary; where it has fewer than the test needs, nothing worse happens than no pass."""
    result = attention_respects_mask(model(vocab_size=vocabulary, pad_token_id=None))
    assert len(result.figures) == 3
    assert result.ok or vocabulary < 20
