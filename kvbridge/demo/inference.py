"""Greedy inference with nothing hidden: one forward pass for the prompt, then one for each token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbridge.integrations.transformers import cache_argument, cache_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What a model said after a prompt."""

    tokens: tuple[int, ...]
    """The greedy tokens."""
    first_token_seconds: float
    """From the start of the prompt's forward pass to the first token."""
    cache: Any
    """The cache behind prompt and tokens, the last token excepted."""


def continue_greedily(model: Any, prompt: Sequence[int], *, count: int, cache: Any = None) -> Continuation:
    """Return the next `count` tokens after `prompt`, which stands behind what is in `cache` already."""
    with torch.inference_mode():
        started = time.perf_counter()
        output = _forward(model, prompt, cache)
        tokens = [_greedy(output)]
        first_token_seconds = time.perf_counter() - started
        while len(tokens) < count:
            output = _forward(model, tokens[-1:], cache_of(output))
            tokens.append(_greedy(output))
    return Continuation(tokens=tuple(tokens), first_token_seconds=first_token_seconds, cache=cache_of(output))


def _forward(model: Any, tokens: Sequence[int], cache: Any) -> Any:
    # Only the last position's logits are computed, as servers do; all of them would flatter the cache.
    return model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1, **{cache_argument(): cache})


def _greedy(output: Any) -> int:
    return int(output.logits[0, -1].argmax())
