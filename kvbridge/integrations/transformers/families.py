"""The model families whose cached keys are understood, and how positions enter them.

Which elements of a key rotate together, and which layers rotate at all, is written in no configuration: it is in each
family's code. So the families are listed here, one by one, each checked by a test that rotates a key of position 0 by
the declared parameters and compares it with the key that the model itself caches at another position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbridge.core.geometry import PositionKind, RopePairing
from kvbridge.integrations.transformers.errors import UnsupportedCacheError


def _every_layer(_config: Any, _layer: int) -> bool:
    return True


def _listed_layers(config: Any, layer: int) -> bool:
    return bool(config.no_rope_layers[layer])  # True where a layer does rotate: the name says the opposite.


def _sliding_layers(config: Any, layer: int) -> bool:
    return bool(config.layer_types[layer] == "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one `model_type` encode positions."""

    kind: PositionKind = PositionKind.ROPE
    """How positions enter the keys of the layers that `rotates` selects."""
    pairing: RopePairing = RopePairing.HALF_SPLIT
    """Which elements of a key rotate together."""
    partial: bool = False
    """Whether the family's code can rotate a part of the head dimension only."""
    grouped_heads: bool = True
    """Whether the family's code can have fewer KV heads than query heads."""
    rotates: Callable[[Any, int], bool] = _every_layer
    """Tells of a configuration and a layer whether its keys are rotated; others hold no position at all."""


_HALF_SPLIT = Family()
_PARTIAL = Family(partial=True)
FAMILIES: dict[str, Family] = {
    "cohere": Family(pairing=RopePairing.INTERLEAVED),
    "cohere2": Family(pairing=RopePairing.INTERLEAVED, rotates=_sliding_layers),
    "gemma": _HALF_SPLIT,
    "gemma2": _HALF_SPLIT,
    "gemma3_text": _HALF_SPLIT,
    "glm": Family(pairing=RopePairing.INTERLEAVED, partial=True),
    "gpt2": Family(kind=PositionKind.ABSOLUTE, grouped_heads=False),
    "gpt_neox": Family(partial=True, grouped_heads=False),
    "gpt_oss": _HALF_SPLIT,
    "granite": _HALF_SPLIT,
    "llama": _HALF_SPLIT,
    "mistral": _HALF_SPLIT,
    "mixtral": _HALF_SPLIT,
    "olmo2": _HALF_SPLIT,
    "opt": Family(kind=PositionKind.ABSOLUTE, grouped_heads=False),
    "phi": _PARTIAL,
    "phi3": _PARTIAL,
    "qwen2": _HALF_SPLIT,
    "qwen2_moe": _HALF_SPLIT,
    "qwen3": _HALF_SPLIT,
    "qwen3_moe": _HALF_SPLIT,
    "smollm3": Family(rotates=_listed_layers),
    "stablelm": _PARTIAL,
    "starcoder2": _HALF_SPLIT,
}
"""The families by `model_type`."""


def family_of(config: Any) -> Family:
    """Return the family of a configuration.

    Raises:
        UnsupportedCacheError: nobody has checked how this `model_type` encodes positions; the error names it.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedCacheError(
            config.model_type, "how this model type encodes positions in its keys has not been checked"
        )
    return family
