"""The version tag of a model, field by field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import peft
import pytest
import torch

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import ModelTag
from kvbridge.integrations.transformers import ModelPort, UnsupportedModelError, model_tag, weights_digest
from tests.integration.transformers.tiny import model, token_ids, tokenizer


def test_every_field_differs_when_it_should_and_only_then() -> None:
    """Each kind of change shows in its own field and in no other."""
    base = model_tag(model(), tokenizer())
    other_weights = model()
    other_weights.model.layers[3].mlp.up_proj.weight.data[0, 0] += 1e-6
    adapted = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["k_proj"]))
    retemplated = tokenizer(chat_template="other")
    tags = {
        "name": model_tag(model(), tokenizer(), name="other"),
        "revision": model_tag(other_weights, tokenizer()),
        "adapter": model_tag(adapted, tokenizer()),
        "tokenizer_digest": model_tag(model(), retemplated),
    }
    for field, tag in tags.items():
        assert [difference.field for difference in base.differences(tag)] == [field]
    halved = base.differences(model_tag(model(dtype=torch.bfloat16), tokenizer()))
    assert [difference.field for difference in halved] == ["revision", "weight_dtype"]
    assert {*tags, "weight_dtype"} == {field.name for field in fields(ModelTag)}
    assert model_tag(model(), tokenizer()) == base


def test_rope_is_in_the_geometry_and_not_in_the_weights() -> None:
    """Another theta leaves the tag alone: it is the geometry that differs, and the gate compares both."""
    one, other = model(rope_theta=10_000.0), model(rope_theta=20_000.0)
    assert model_tag(one, tokenizer()) == model_tag(other, tokenizer())
    ports = [ModelPort(each, None, tokenizer_digest="t") for each in (one, other)]
    assert ports[0].geometry != ports[1].geometry


def test_a_tokenizer_or_a_digest_is_needed() -> None:
    """A tag without a tokenizer has to be asked for with a digest."""
    with pytest.raises(ValueError, match="tokenizer_digest"):
        model_tag(model(), None)
    assert model_tag(model(), None, tokenizer_digest="mine").tokenizer_digest == "mine"
    assert model_tag(model(), tokenizer(), tokenizer_digest="mine").tokenizer_digest == "mine"
    with pytest.raises(InvalidFieldError):
        model_tag(model(), None, tokenizer_digest="")


class Steps:
    """A port and the changes made behind its back."""

    def __init__(self) -> None:
        self.model: Any = peft.get_peft_model(
            model(), peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)
        )
        self.port = ModelPort(self.model, tokenizer())

    def expect_current(self) -> ModelTag:
        """Compare the port's tag with one computed anew."""
        assert self.port.tag == model_tag(self.model, tokenizer())
        return self.port.tag


def test_a_port_notices_changes() -> None:
    """Switched, scaled, disabled, added and merged adapters, and weights written or replaced, give another tag."""
    steps = Steps()
    tags = {steps.expect_current()}
    with steps.model.disable_adapter():
        tags.add(steps.expect_current())
    steps.model.base_model.model.model.layers[0].self_attn.k_proj.scale_layer(3.0)
    tags.add(steps.expect_current())
    steps.model.add_adapter("second", peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    steps.model.set_adapter("second")
    tags.add(steps.expect_current())
    steps.model.merge_adapter()
    tags.add(steps.expect_current())
    with torch.no_grad():
        steps.model.base_model.model.lm_head.weight.mul_(2)
    tags.add(steps.expect_current())
    steps.model.base_model.model.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 32))
    tags.add(steps.expect_current())
    assert len(tags) == 7


def test_a_port_looks_only_at_adapters_if_only_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switching adapters, which servers do between requests, does not read all weights again."""
    steps = Steps()
    before = steps.port.tag
    monkeypatch.setattr("kvbridge.integrations.transformers.identity.weights_digest", lambda _model: 1 / 0)
    with steps.model.disable_adapter():
        assert steps.port.tag.adapter == ""
        assert steps.port.tag.revision == before.revision
    assert steps.port.tag == before


def test_what_a_port_cannot_notice_is_seen_by_refresh() -> None:
    """Writes through `.data` leave no trace; `refresh` computes everything again."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    before = port.tag
    tiny.lm_head.weight.data.mul_(2)
    port.refresh()
    assert port.tag.revision == weights_digest(tiny) != before.revision


def test_a_port_shows_what_it_has() -> None:
    """A port's form for people names model, weights and adapters."""
    steps = Steps()
    assert repr(steps.port).startswith("<ModelPort of LlamaForCausalLM, xxh3:")
    assert "lora:scale=1" in repr(steps.port)
    assert steps.port.snapshot() == {"tag": steps.port.tag, "geometry": steps.port.geometry}


def test_the_token_ids_are_of_the_vocabulary() -> None:
    """The tiny models' tokens are such that no test meets a special one by chance."""
    assert set(token_ids(500)) == set(range(3, 64))


def test_an_unsupported_model_has_no_port() -> None:
    """A port is not made of something that is no model."""
    with pytest.raises(UnsupportedModelError, match="Linear"):
        ModelPort(torch.nn.Linear(2, 2), tokenizer())
