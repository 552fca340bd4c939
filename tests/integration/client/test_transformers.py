"""A handoff as a cache of the transformers library."""

from __future__ import annotations

import gc

import pytest
import torch

from kvbridge import Bridge, NoCacheError
from tests.harness import wait_for
from tests.integration.client.kv import DIM, HEADS, MODEL, Contents

pytest.importorskip("transformers")


def test_a_handoff_becomes_a_cache_with_room(either: Bridge) -> None:
    """The library sees the handed-over tokens, appends behind them, and the payload does not change."""
    contents = Contents()
    contents.publish(either, "transformers")
    handoff = contents.acquire(either, "transformers", tokens=[*contents.ids, 100, 101, 102])
    cache = handoff.as_transformers_cache(headroom_tokens=8)
    assert cache.get_seq_length() == len(contents.ids)
    for layer, pair in contents.layers.items():
        new = torch.ones(1, HEADS, 3, DIM)
        for found, wanted in zip(cache.update(new, new, layer), pair, strict=True):
            assert torch.equal(found[0, :, :20], wanted)
            assert torch.equal(found[:, :, 20:], new)
    contents.assert_in(handoff)
    assert handoff.still_valid()


def test_a_cache_of_the_whole_prompt_gives_one_token_up(either: Bridge) -> None:
    """A model has to be given at least one token."""
    contents = Contents()
    contents.publish(either, "transformers")
    cache = contents.acquire(either, "transformers").as_transformers_cache()
    assert cache.get_seq_length() == len(contents.ids) - 1


def test_the_cache_keeps_the_lease(bridge: Bridge) -> None:
    """The handoff may be forgotten; the library's cache is what is in use."""
    contents = Contents()
    contents.publish(bridge, "transformers")
    cache = contents.acquire(bridge, "transformers").as_transformers_cache()
    gc.collect()
    assert bridge.node().arena.leases == 1
    del cache
    gc.collect()
    wait_for(lambda: bridge.node().arena.leases == 0)


def test_without_a_cache_there_is_none_to_convert(bridge: Bridge) -> None:
    """Converting without looking at `kv` first is a mistake."""
    handoff = bridge.acquire("unknown", model=MODEL, tokens=[1], timeout=10)
    with pytest.raises(NoCacheError):
        handoff.as_transformers_cache()
