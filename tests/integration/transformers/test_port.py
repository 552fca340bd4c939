"""One model's way to a bridge and back."""

from __future__ import annotations

import gc
from typing import Any

import peft
import pytest
import torch

from kvbridge import Bridge, DimensionOrder, Reason, connect
from kvbridge.integrations.transformers import ModelPort, UnsupportedModelError, cache_from_handoff, cache_of
from kvbridge.integrations.transformers.devices import layer_devices
from tests.harness import BridgeProcess, wait_for
from tests.integration.transformers.tiny import (
    LAYOUTS,
    continue_greedily,
    generate,
    model,
    prefill,
    token_ids,
    tokenizer,
)

IDS = token_ids(24)
PREFIX = 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", DimensionOrder)
def test_there_and_back(bridge: Bridge, layout: str, order: DimensionOrder) -> None:
    """A cache goes through a real bridge and continues bit for bit, without a copy of its prefix."""
    producer, consumer = model(layout), model(layout)
    port = ModelPort(producer, tokenizer(), order=order)
    slot = port.publish(bridge, f"{layout}/{order}", prefill(producer, IDS[:PREFIX]), tokens=IDS[:PREFIX], text="text")
    assert slot.published, slot.detail
    port = ModelPort(consumer, tokenizer(), order=order)
    expected = continue_greedily(producer, IDS[PREFIX:], prefill(producer, IDS[:PREFIX]))
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        cache = port.cache(handoff, headroom_tokens=32)
        tokens, logits = continue_greedily(consumer, IDS[PREFIX:], cache)
        assert handoff.still_valid()
        snapshot = cache.snapshot()
    assert tokens == expected[0]
    assert torch.equal(logits, expected[1])
    assert (snapshot["copies"], snapshot["layers_in_place"]) == (0, 4)
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        again = continue_greedily(consumer, IDS[PREFIX:], handoff.as_transformers_cache())
        assert again[0] == expected[0]  # The first consumer has left nothing behind in the shared memory.


def test_by_value(bridge_process: BridgeProcess) -> None:
    """A consumer that shares no memory with the bridge continues from its own copy."""
    tiny = model("gemma3")
    port = ModelPort(tiny, tokenizer())
    with connect(bridge_process.tcp_target) as remote:
        slot = port.publish(remote, "by value", prefill(tiny, IDS[:PREFIX]), tokens=IDS[:PREFIX])
        with port.acquire(remote, slot.key, tokens=IDS, timeout=10) as handoff:
            assert generate(tiny, IDS, port.cache(handoff)) == generate(tiny, IDS)


def test_a_row_of_a_batch(bridge: Bridge) -> None:
    """One sequence of a left-padded batch is published with its own tokens and continues alone."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    ids = torch.tensor([[0] * 11 + IDS[:9], IDS[:PREFIX]])
    mask = (ids != 0).long()
    cache = prefill_batch(tiny, ids, mask)
    slot = port.publish(
        bridge, "row", cache, tokens=IDS[:9], row=0, valid_length=9, padding_side="left", first_position=0
    )
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        assert generate(tiny, IDS, port.cache(handoff)) == generate(tiny, IDS)


def prefill_batch(of: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """Return the library's cache over padded rows, as `generate` makes it."""
    with torch.no_grad():
        return cache_of(of(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=True))


@pytest.mark.parametrize(
    ("reason", "consumer", "of_tokenizer"),
    [
        (
            Reason.MODEL_VERSION_MISMATCH,
            lambda: peft.get_peft_model(model(), peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False)),
            tokenizer,
        ),
        (Reason.TOKENIZER_MISMATCH, model, lambda: tokenizer(chat_template="other")),
    ],
)
def test_what_differs_falls_back_to_the_text(bridge: Bridge, reason: Reason, consumer: Any, of_tokenizer: Any) -> None:
    """Another adapter or template gives the text and the reason."""
    tiny = model()
    slot = ModelPort(tiny, tokenizer(), name="m").publish(
        bridge, f"fallback/{reason}", prefill(tiny, IDS[:PREFIX]), tokens=IDS[:PREFIX], text="take this"
    )
    port = ModelPort(consumer(), of_tokenizer(), name="m")
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        assert handoff.kv is None
        assert handoff.text == "take this"
        assert handoff.reason is reason


def test_switching_adapters_between_requests(bridge: Bridge) -> None:
    """One model serves with and without its adapter, and neither takes the other's cache."""
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    port = ModelPort(wrapped, tokenizer())
    slot = port.publish(bridge, "adapters", prefill(wrapped, IDS[:PREFIX]), tokens=IDS[:PREFIX])
    with wrapped.disable_adapter(), port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        assert handoff.reason is Reason.MODEL_VERSION_MISMATCH
        assert "adapter" in handoff.detail
    with port.acquire(bridge, slot.key, tokens=IDS, timeout=10) as handoff:
        assert handoff.kv


def test_a_cache_keeps_its_lease(bridge: Bridge) -> None:
    """As long as the library's cache lives its memory is leased, wherever the handoff went."""
    tiny = model()
    port = ModelPort(tiny, tokenizer())
    slot = port.publish(bridge, "lease", prefill(tiny, IDS[:PREFIX]), tokens=IDS[:PREFIX])
    cache = cache_from_handoff(port.acquire(bridge, slot.key, tokens=IDS, timeout=10))
    gc.collect()
    assert bridge.node().arena.leases == 1
    assert generate(tiny, IDS, cache) == generate(tiny, IDS)
    del cache
    gc.collect()
    wait_for(lambda: bridge.node().arena.leases == 0)


def test_layers_are_found_on_their_devices() -> None:
    """Each layer's device is known, also where a model is spread over several."""
    tiny = model()
    assert layer_devices(tiny) == dict.fromkeys(range(4), torch.device("cpu"))
    tiny.model.layers[2].to("meta")
    assert layer_devices(tiny)[2] == torch.device("meta")
    assert layer_devices(tiny)[3] == torch.device("cpu")
    spread = model(model_type="gpt_neox")
    spread.gpt_neox.layers[1].to("meta")
    assert layer_devices(spread)[1] == torch.device("meta")
    other = model(model_type="gpt2", n_layer=4, n_head=4, n_embd=32)
    other.transformer.h[1].to("meta")
    with pytest.raises(UnsupportedModelError, match="several devices"):
        layer_devices(other)
