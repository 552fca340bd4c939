"""Real models, adapters and tokenizers that differ in one thing: the tags tell, and the gate refuses.

The tags and geometries are those that the integration computes; nothing is written by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbridge import Bridge, MediaItem, Reason, ScaledValuesError
from kvbridge.core.geometry import CacheGeometry
from kvbridge.integrations.transformers import ModelPort, cache_from_handoff
from tests.integration.client.kv import Contents, shape
from tests.integration.transformers.handover import IDS, PREFIX
from tests.integration.transformers.test_adapters import lora
from tests.integration.transformers.tiny import model, prefill, tokenizer

ALPHA = 8


def hand_over(bridge: Bridge, producer: ModelPort, of: Any, consumer: ModelPort) -> tuple[Reason | None, str]:
    """Publish what the producer computes, ask for it, and return why there is no cache."""
    slot = producer.publish(bridge, f"versions/{id(of)}/{id(consumer)}", prefill(of, IDS[:PREFIX]), tokens=IDS[:PREFIX])
    assert slot.published, slot.detail
    with producer.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        assert handoff.kv is not None, handoff.detail
    with consumer.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        return handoff.reason, handoff.detail


def named(field: str, mine: object, theirs: object) -> str:
    """Return what a finding says of a field that differs."""
    return f"{field}: consumer has {mine!r}, payload has {theirs!r}"


@pytest.mark.parametrize(
    "changes",
    [{"lora_alpha": ALPHA * 2}, {"seed": 1}, {"lora_alpha": ALPHA, "r": 2}, None],
    ids=["another scale", "another adapter", "another rank", "none"],
)
def test_another_adapter(bridge: Bridge, changes: dict[str, Any] | None) -> None:
    """An adapter's weights and scale belong to the version, over the very same base."""
    adapted, _ = lora(lora_alpha=ALPHA)
    other = model() if changes is None else lora(**changes)[0]
    producer, consumer = ModelPort(adapted, tokenizer(), name="m"), ModelPort(other, tokenizer(), name="m")
    reason, detail = hand_over(bridge, producer, adapted, consumer)
    assert reason is Reason.MODEL_VERSION_MISMATCH
    assert detail == named("adapter", consumer.tag.adapter, producer.tag.adapter)


def test_the_same_adapter_under_another_name(bridge: Bridge) -> None:
    """What an adapter is called does not matter, so the cache is handed over."""
    adapted, _ = lora(lora_alpha=ALPHA)
    again, configuration = lora(lora_alpha=ALPHA)
    again.add_adapter("idle", configuration)
    assert hand_over(bridge, ModelPort(adapted, tokenizer()), adapted, ModelPort(again, tokenizer()))[0] is None


def test_another_chat_template(bridge: Bridge) -> None:
    """The same vocabulary with another template makes other tokens of the same messages."""
    of = model()
    producer = ModelPort(of, tokenizer())
    consumer = ModelPort(of, tokenizer(chat_template="{{ messages }} please"))
    reason, detail = hand_over(bridge, producer, of, consumer)
    assert reason is Reason.TOKENIZER_MISMATCH
    assert detail == named("tokenizer_digest", consumer.tag.tokenizer_digest, producer.tag.tokenizer_digest)


def test_other_weights_by_one_value(bridge: Bridge) -> None:
    """One weight that was written in place is another revision."""
    of, other = model(), model()
    with torch.no_grad():
        other.model.layers[3].mlp.down_proj.weight[0, 0] += 1e-3
    producer, consumer = ModelPort(of, tokenizer()), ModelPort(other, tokenizer())
    reason, detail = hand_over(bridge, producer, of, consumer)
    assert reason is Reason.MODEL_VERSION_MISMATCH
    assert detail == named("revision", consumer.tag.revision, producer.tag.revision)


def test_another_element_type_of_the_cache(bridge: Bridge) -> None:
    """A consumer that keeps its cache in another dtype than its model's own does not read the model's."""
    of = model()
    producer, consumer = ModelPort(of, tokenizer()), ModelPort(of, tokenizer(), dtype=torch.bfloat16)
    reason, detail = hand_over(bridge, producer, of, consumer)
    assert reason is Reason.GEOMETRY_MISMATCH
    assert detail == "layer 0: dtype: consumer has bfloat16, payload has float32"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("theirs", "mine", "expected"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "linear", "factor": 2.0},
            "rope scaling factor: consumer has 2.0, payload has 4.0",
        ),
        (
            {**YARN, "beta_fast": 16.0},
            {**YARN, "beta_fast": 8.0},
            "rope scaling beta_fast: consumer has 8.0, payload has 16.0",
        ),
        (
            {**YARN, "attention_factor": 1.5},
            {**YARN, "attention_factor": 1.25},
            "rope scaling attention_factor: consumer has 1.25, payload has 1.5",
        ),
    ],
)
def test_another_parameter_of_a_scaled_rotation(
    bridge: Bridge, theirs: dict[str, Any], mine: dict[str, Any], expected: str
) -> None:
    """The scaling scheme's own parameters turn keys by other angles, with equal weights and theta."""
    of, other = model(rope_scaling=theirs), model(rope_scaling=mine)
    reason, detail = hand_over(bridge, ModelPort(of, tokenizer()), of, ModelPort(other, tokenizer()))
    assert reason is Reason.POSITION_ENCODING_MISMATCH
    assert detail == f"layer 0: {expected}"


def test_the_same_placeholders_with_another_picture(bridge: Bridge) -> None:
    """Two prompts of equal tokens and other pictures do not share a cache; one of equal pictures does."""
    of = model()
    port = ModelPort(of, tokenizer())
    picture = MediaItem(token_index=4, digest=b"\x01" * 32)
    other = MediaItem(token_index=4, digest=b"\x02" * 32)
    cache = prefill(of, IDS[:PREFIX])
    slot = port.publish(bridge, "versions/pictures", cache, tokens=IDS[:PREFIX], media=[picture])
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10, media=[picture]) as handoff:
        assert handoff.media == (picture,)
        assert handoff.as_transformers_cache().get_seq_length() == PREFIX
    for media in ([], [other]):
        with port.acquire(bridge, slot.key, tokens=IDS, timeout=10, media=media) as handoff:
            assert handoff.reason is Reason.TOKENS_MISMATCH
            assert "media" in handoff.detail


def test_scaled_values_do_not_become_a_cache(bridge: Bridge) -> None:
    """A consumer that reads scaled values may read them, but not as if they were not."""
    of: CacheGeometry = shape(k_scales=(0.5,) * 3, v_scales=(0.5,) * 3)
    contents = Contents(of=of)
    contents.publish(bridge, "versions/scaled")
    with contents.acquire(bridge, "versions/scaled", geometry=of) as handoff:
        contents.assert_in(handoff)
        with pytest.raises(ScaledValuesError, match="scaled"):
            handoff.as_transformers_cache()
        with pytest.raises(ScaledValuesError):
            cache_from_handoff(handoff)
        with pytest.raises(ScaledValuesError):
            handoff.scatter_paged(0, (torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 16)), range(8))
    with contents.acquire(bridge, "versions/scaled") as handoff:
        assert handoff.reason is Reason.GEOMETRY_MISMATCH
