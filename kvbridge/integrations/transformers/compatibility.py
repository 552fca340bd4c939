"""What the supported releases of transformers name differently."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from transformers import GenerationMixin


@cache
def cache_argument() -> str:
    """Return the keyword by which `forward` and `generate` take a cache: `cache`, or `past_key_values` before 5.24."""
    parameters = inspect.signature(inspect.unwrap(GenerationMixin.prepare_inputs_for_generation)).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def cache_of(output: Any) -> Any:
    """Return the cache in the output of `forward` or `generate`, whatever this release calls it."""
    return getattr(output, cache_argument())
