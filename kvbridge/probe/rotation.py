"""Turning cached keys back to what they were before their position entered them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.geometry import PositionEncoding, RopePairing, RopeParameters

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TURN = 2 * math.pi


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """The rotation of one layer's keys as numbers."""

    frequencies: NDArray[np.float32]
    """Radians per position of each pair of elements; empty if nothing rotates."""
    pairing: RopePairing
    """Which elements are a pair."""
    factor: float
    """What rotated elements are multiplied by besides."""

    def undo(self, keys: NDArray[np.float32], positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return `keys`, `[tokens, heads, head dimension]`, as they were before rotation at these positions."""
        pairs = len(self.frequencies)
        if not pairs:
            return keys
        # In float32, as models do: at large positions the rounding of the angle itself is a part of the key.
        angles = positions.astype(np.float32)[:, None, None] * self.frequencies
        cosines, sines = np.cos(angles) / np.float32(self.factor), np.sin(angles) / np.float32(self.factor)
        firsts, seconds = pair_slices(pairs, self.pairing)
        first, second = keys[..., firsts], keys[..., seconds]
        plain = keys.copy()
        plain[..., firsts] = first * cosines + second * sines
        plain[..., seconds] = second * cosines - first * sines
        return plain


def pair_slices(pairs: int, pairing: RopePairing) -> tuple[slice, slice]:
    """Return where the first and the second elements of the rotating pairs are."""
    if pairing is RopePairing.HALF_SPLIT:
        return slice(0, pairs), slice(pairs, 2 * pairs)
    return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)


def rotation(encoding: PositionEncoding, head_dim: int) -> Rotation | None:
    """Return the rotation of keys, or None if the declared parameters do not determine it."""
    if encoding.rope is None:
        return Rotation(frequencies=np.empty(0, np.float32), pairing=RopePairing.HALF_SPLIT, factor=1.0)
    frequencies, factor = inverse_frequencies(encoding.rope, head_dim), _factor(encoding.rope)
    if frequencies is None or factor is None:
        return None
    return Rotation(frequencies=frequencies, pairing=encoding.rope.pairing, factor=factor)


def _factor(rope: RopeParameters) -> float | None:
    """Return what rotated elements are multiplied by besides, or None if that is not said."""
    # YaRN always has such a factor, and several ways to compute it: its absence says nothing.
    absent = () if rope.rope_type == "yarn" else (1.0,)
    given = dict(rope.scaling).get("attention_factor", absent)
    return given[0] if len(given) == 1 and given[0] > 0 else None


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> NDArray[np.float32] | None:
    """Return the angle per position of each pair, or None if the type is unknown, incomplete or length-dependent."""
    rotating = int(head_dim * rope.partial_factor)
    if rotating % 2:
        return None
    exponents = np.arange(0, rotating, 2, dtype=np.float32) / np.float32(max(rotating, 1))
    with np.errstate(all="ignore"):
        plain = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
        try:
            scaled = _scaled(plain, rope, {name: value for name, (value,) in rope.scaling}, rotating)
        except (ArithmeticError, KeyError, ValueError):
            return None
    return None if scaled is None or not np.isfinite(scaled).all() else scaled


def _scaled(
    plain: NDArray[np.float32], rope: RopeParameters, scaling: Mapping[str, float], rotating: int
) -> NDArray[np.float32] | None:
    match rope.rope_type:
        case "default":
            return plain
        case "linear":
            return (plain / np.float32(scaling["factor"])).astype(np.float32)
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, theta=rope.theta, rotating=rotating)
        case _:
            return None


def _llama3(plain: NDArray[np.float32], scaling: Mapping[str, float]) -> NDArray[np.float32]:
    """Blend linearly, in turns per original context, between divided low frequencies and kept high ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = plain * np.float32(scaling["original_max_position_embeddings"] / _TURN)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    scaled: NDArray[np.float32] = plain * (kept + (1 - kept) / np.float32(scaling["factor"]))
    return scaled


def _yarn(
    plain: NDArray[np.float32], scaling: Mapping[str, float], *, theta: float, rotating: int
) -> NDArray[np.float32]:
    """Blend linearly, in the index of the pair, between kept high frequencies and divided low ones."""
    length = scaling["original_max_position_embeddings"]
    first, last = (
        rotating * math.log(length / (scaling[name] * _TURN)) / (2 * math.log(theta))
        for name in ("beta_fast", "beta_slow")
    )
    if scaling["truncate"]:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, rotating - 1.0)
    width = (last - first) or 0.001
    divided = np.clip((np.arange(rotating // 2, dtype=np.float32) - np.float32(first)) / np.float32(width), 0, 1)
    scaled: NDArray[np.float32] = plain * (1 - divided) + plain / np.float32(scaling["factor"]) * divided
    return scaled
