"""Adapters have a tag of their own, and the base keeps its digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from kvbridge.integrations.transformers import UnsupportedModelError, adapter_tag, weights_digest
from tests.integration.transformers.tiny import continue_greedily, model, prefill, token_ids


def lora(seed: int = 0, **changes: Any) -> tuple[Any, Any]:
    """Return a model with a LoRA whose weights follow from the seed, and the configuration of the LoRA."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"], "init_lora_weights": False}
    configuration = peft.LoraConfig(**{**settings, **changes})
    base = model()
    torch.manual_seed(seed)
    return peft.get_peft_model(base, configuration), configuration


BASE = weights_digest(model())


def test_without_adapters_the_tag_is_empty() -> None:
    """A plain model has no adapter."""
    assert adapter_tag(model()) == ""


def test_the_base_is_visible_through_an_adapter() -> None:
    """Attaching, switching and disabling adapters leave the base's digest as it is."""
    wrapped, configuration = lora()
    assert weights_digest(wrapped) == BASE
    wrapped.add_adapter("second", configuration)
    wrapped.set_adapter("second")
    assert weights_digest(wrapped) == BASE
    with wrapped.disable_adapter():
        assert weights_digest(wrapped) == BASE
    assert weights_digest(wrapped.unload()) == BASE


def test_the_same_adapter_has_the_same_tag_whatever_it_is_called() -> None:
    """The tag says what the adapter does, not its name."""
    wrapped, configuration = lora()
    assert adapter_tag(wrapped) == adapter_tag(lora()[0])
    torch.manual_seed(0)
    other = model()
    torch.manual_seed(0)
    renamed = peft.get_peft_model(other, configuration, adapter_name="else")
    assert adapter_tag(renamed) == adapter_tag(wrapped)
    assert adapter_tag(wrapped).startswith("lora:scale=2:xxh3:")


CHANGES: dict[str, dict[str, Any]] = {
    "other weights": {"seed": 1},
    "other alpha": {"lora_alpha": 12},
    "other rank": {"r": 2, "lora_alpha": 4},
    "other targets": {"target_modules": ["q_proj", "v_proj"]},
    "fewer targets": {"target_modules": ["v_proj"]},
    "fewer layers": {"layers_to_transform": [0, 1]},
    "rank-stabilised": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "replaced module": {"modules_to_save": ["lm_head"]},
}


def test_everything_that_matters_is_in_the_tag() -> None:
    """Each change of weights, scale, rank, place or kind gives a tag of its own, over the same base."""
    tags = {"none": "", "plain": adapter_tag(lora()[0])}
    for name, change in CHANGES.items():
        wrapped, _ = lora(**change)
        tags[name] = adapter_tag(wrapped)
        assert weights_digest(wrapped) == BASE, name
    assert len(set(tags.values())) == len(tags), tags


def test_one_bit_of_an_adapter_counts() -> None:
    """The tag follows every parameter of the active adapter."""
    wrapped, _ = lora(use_dora=True)
    before = adapter_tag(wrapped)
    count = 0
    for name, parameter in wrapped.named_parameters():
        if "default" in name:
            count += 1
            parameter.data.view(-1)[-1].mul_(2)
            assert adapter_tag(wrapped) != before, name
            parameter.data.view(-1)[-1].div_(2)
    assert count == 4 * 2 * 3
    assert adapter_tag(wrapped) == before


def test_a_scale_changed_at_run_time_counts() -> None:
    """Scaling a layer after loading shows."""
    wrapped, _ = lora()
    before = adapter_tag(wrapped)
    wrapped.base_model.model.model.layers[0].self_attn.k_proj.scale_layer(0.5)
    assert "scale=1,2" in adapter_tag(wrapped)
    assert adapter_tag(wrapped) != before


def test_disabled_adapters_are_none() -> None:
    """What the forward pass skips is not in the tag."""
    wrapped, _ = lora()
    with wrapped.disable_adapter():
        assert adapter_tag(wrapped) == ""
    assert adapter_tag(wrapped) != ""


def test_only_active_adapters_count_and_their_order_does() -> None:
    """Of several loaded adapters those in use are digested, in the order in which they are added."""
    wrapped, configuration = lora()
    first = adapter_tag(wrapped)
    torch.manual_seed(1)
    wrapped.add_adapter("second", configuration)
    assert adapter_tag(wrapped) == first
    wrapped.set_adapter("second")
    second = adapter_tag(wrapped)
    wrapped.base_model.set_adapter(["default", "second"])
    both = adapter_tag(wrapped)
    wrapped.base_model.set_adapter(["second", "default"])
    assert len({first, second, both, adapter_tag(wrapped)}) == 4


def test_merged_adapters_are_weights() -> None:
    """After merging there is no adapter any more, and the base is another."""
    wrapped, _ = lora()
    wrapped.merge_adapter()
    assert adapter_tag(wrapped) == ""
    merged = weights_digest(wrapped)
    assert merged != BASE
    assert weights_digest(lora()[0].merge_and_unload()) == merged


def test_merged_and_disabled_is_refused() -> None:
    """The next forward pass would change the weights, so the tag would not hold for it."""
    wrapped, _ = lora()
    wrapped.merge_adapter()
    with wrapped.disable_adapter(), pytest.raises(UnsupportedModelError, match="merged and disabled"):
        adapter_tag(wrapped)


def test_the_librarys_own_adapters(tmp_path: Path) -> None:
    """An adapter loaded through transformers has the tag that it has in a PEFT model, and is switched there."""
    wrapped, _ = lora()
    wrapped.save_pretrained(tmp_path)
    native = model()
    native.load_adapter(str(tmp_path))
    assert adapter_tag(native) == adapter_tag(wrapped)
    assert weights_digest(native) == BASE
    layers = [module for module in native.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:  # As `native.disable_adapters()` does, which newer releases refuse with an older PEFT.
        layer.enable_adapters(enabled=False)
    assert adapter_tag(native) == ""
    for layer in layers:
        layer.enable_adapters(enabled=True)
    assert adapter_tag(native) == adapter_tag(wrapped)


OTHER_KINDS: dict[str, Callable[[], Any]] = {
    "peft.tuners.ia3.layer.Linear": lambda: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "peft.tuners.loha.layer.Linear": lambda: peft.LoHaConfig(target_modules=["k_proj"]),
    "peft.tuners.adalora.layer.SVDLinear": lambda: peft.AdaLoraConfig(target_modules=["k_proj"], total_step=9),
    "PrefixTuningConfig": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "PromptTuningConfig": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "peft.utils.other.TrainableTokensWrapper": lambda: peft.LoraConfig(
        target_modules=["k_proj"], trainable_token_indices=[5]
    ),
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    """An adapter whose effect nobody has checked is not ignored."""
    with pytest.raises(UnsupportedModelError) as refusal:
        adapter_tag(peft.get_peft_model(model(), OTHER_KINDS[kind]()))
    assert refusal.value.name == kind


def test_other_variants_of_lora_are_refused_by_name() -> None:
    """A LoRA that acts from some token on only depends on more than its weights."""
    configuration = peft.LoraConfig(
        target_modules=["k_proj"], alora_invocation_tokens=[5], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with pytest.raises(UnsupportedModelError, match="ALoraLinearVariant"):
        adapter_tag(peft.get_peft_model(model(), configuration))


def test_an_adapter_does_change_the_cache() -> None:
    """What all this is about: the same tokens through another adapter are another cache."""
    ids = token_ids(12)
    plain, (wrapped, _) = model(), lora()
    cached, adapted = prefill(plain, ids), prefill(wrapped, ids)
    assert not torch.equal(cached.layers[0].keys, adapted.layers[0].keys)
    assert continue_greedily(plain, [5], cached)[0] != continue_greedily(wrapped, [5], adapted)[0]
