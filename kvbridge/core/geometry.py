"""The shape of a KV-cache: which layers, how many heads, which dtype, which order, which positions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum, unique

from kvbridge.core.errors import InvalidFieldError

LAYERS_MAX = 1024
"""Most attention layers in one geometry."""
HEADS_MAX = 4096
"""Most KV heads of a layer."""
HEAD_DIM_MAX = 16_384
"""Largest head dimension."""
TOKENS_MAX = 1 << 22
"""Most tokens, and so the largest capacity, first position or window, of one payload (4 Mi)."""
SHARDS_MAX = 1024
"""Largest tensor-parallel size."""
SCALING_VALUES_MAX = 4096
"""Most numbers in all rope scaling parameters of a group together."""


@unique
class Dtype(StrEnum):
    """Element type of cached values; the value is the name that torch uses."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def bytes_per_element(self) -> int:
        """Return the size of one value in bytes."""
        return 4 if self is Dtype.FLOAT32 else 2


@unique
class LayerKind(StrEnum):
    """What a layer keeps for each token."""

    ATTENTION = "ATTENTION"
    """K and V of every token."""
    SLIDING = "SLIDING"
    """K and V of the newest tokens inside a window."""


@unique
class DimensionOrder(StrEnum):
    """How one tensor lies in memory, slowest dimension first."""

    HND = "HND"
    """heads, tokens, head dimension."""
    NHD = "NHD"
    """tokens, heads, head dimension."""


@unique
class PositionKind(StrEnum):
    """How a position enters the cached keys."""

    NONE = "NONE"
    """Not at all, or through biases that are added to the scores."""
    ABSOLUTE = "ABSOLUTE"
    """Through learned embeddings of absolute positions."""
    ROPE = "ROPE"
    """Keys are stored after rotation."""


@unique
class RopePairing(StrEnum):
    """Which two elements of a head rotate together."""

    HALF_SPLIT = "HALF_SPLIT"
    """Element i with element i + dim/2 (the NeoX convention)."""
    INTERLEAVED = "INTERLEAVED"
    """Element 2i with element 2i + 1 (the GPT-J convention)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Everything that decides the angle by which a key was rotated."""

    rope_type: str = "default"
    """The scaling scheme, as transformers names it: default, linear, dynamic, yarn, longrope, llama3."""
    theta: float
    """The base of the geometric series of frequencies; greater than 0."""
    partial_factor: float = 1.0
    """The share of the head dimension that rotates, in (0, 1]."""
    pairing: RopePairing = RopePairing.HALF_SPLIT
    """Which elements rotate together."""
    scaling: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """The scheme's own parameters by name, sorted by name; a scalar is a tuple of one."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be a rotation.

        Raises:
            InvalidFieldError: a parameter is outside its range, or the names are not sorted and unique.
        """
        _require(bool(self.rope_type), "rope.rope_type", "must not be empty")
        _require(
            math.isfinite(self.theta) and self.theta > 0, "rope.theta", f"must be finite and positive, got {self.theta}"
        )
        _require(0 < self.partial_factor <= 1, "rope.partial_factor", f"must lie in (0, 1], got {self.partial_factor}")
        names = [name for name, _ in self.scaling]
        _require(names == sorted(set(names)), "rope.scaling", "names must be unique and sorted")
        values = [value for _, numbers in self.scaling for value in numbers]
        _require(len(values) <= SCALING_VALUES_MAX, "rope.scaling", f"at most {SCALING_VALUES_MAX} numbers are allowed")
        _require(all(math.isfinite(value) for value in values), "rope.scaling", "numbers must be finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionEncoding:
    """How positions enter the keys of a group of layers."""

    kind: PositionKind
    """The family."""
    rope: RopeParameters | None = None
    """Present exactly if the kind is `ROPE`."""

    def __post_init__(self) -> None:
        """Refuse a rotation without parameters and parameters without a rotation.

        Raises:
            InvalidFieldError: `rope` and `kind` disagree.
        """
        _require(
            (self.rope is not None) == (self.kind is PositionKind.ROPE),
            "position_encoding.rope",
            "must be present exactly for kind ROPE",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that are alike in everything but their index."""

    layers: tuple[int, ...]
    """Indices of the layers in the model, strictly increasing."""
    kind: LayerKind = LayerKind.ATTENTION
    """What each layer keeps."""
    kv_heads: int
    """KV heads that each layer stores (on this shard)."""
    head_dim_k: int
    """Elements of one key."""
    head_dim_v: int
    """Elements of one value."""
    dtype: Dtype
    """Element type of K and V."""
    order: DimensionOrder = DimensionOrder.HND
    """Memory order of K and V."""
    window_tokens: int | None = None
    """Attention window in tokens; present exactly for `SLIDING`."""
    stored_tokens_max: int | None = None
    """The most recent tokens that a `SLIDING` layer keeps, at most `window_tokens`; present exactly for `SLIDING`."""
    position_encoding: PositionEncoding
    """How positions enter these layers' keys."""
    k_scales: tuple[float, ...] = ()
    """What stored keys are multiplied by, one number for each layer; empty if they are stored as they are."""
    v_scales: tuple[float, ...] = ()
    """The same for values."""

    def __post_init__(self) -> None:
        """Refuse shapes that no model has and sizes that would overflow.

        Raises:
            InvalidFieldError: a field is out of range or disagrees with the layer kind.
        """
        _require(0 < len(self.layers) <= LAYERS_MAX, "geometry.groups.layers", f"must name 1 to {LAYERS_MAX} layers")
        _require(
            all(_in_range(layer, 0, LAYERS_MAX - 1) for layer in self.layers),
            "geometry.groups.layers",
            f"indices must lie in [0, {LAYERS_MAX})",
        )
        _require(
            list(self.layers) == sorted(set(self.layers)), "geometry.groups.layers", "indices must increase strictly"
        )
        _require_range("geometry.groups.kv_heads", self.kv_heads, 1, HEADS_MAX)
        _require_range("geometry.groups.head_dim_k", self.head_dim_k, 1, HEAD_DIM_MAX)
        _require_range("geometry.groups.head_dim_v", self.head_dim_v, 1, HEAD_DIM_MAX)
        self._check_window()
        for name in ("k_scales", "v_scales"):
            self._check_scales(name, getattr(self, name))

    def _check_scales(self, name: str, scales: tuple[float, ...]) -> None:
        field_name = f"geometry.groups.{name}"
        _require(len(scales) in {0, len(self.layers)}, field_name, "must hold one number for each layer, or none")
        _require(all(math.isfinite(scale) and scale > 0 for scale in scales), field_name, "must be finite and positive")

    def _check_window(self) -> None:
        if self.kind is LayerKind.ATTENTION:
            _require(self.window_tokens is None, "geometry.groups.window_tokens", "is only allowed for SLIDING layers")
            _require(
                self.stored_tokens_max is None,
                "geometry.groups.stored_tokens_max",
                "is only allowed for SLIDING layers",
            )
            return
        _require_range("geometry.groups.window_tokens", self.window_tokens, 1, TOKENS_MAX)
        _require_range("geometry.groups.stored_tokens_max", self.stored_tokens_max, 1, self.window_tokens or 0)

    def stored_tokens(self, valid_length: int) -> int:
        """Return how many of `valid_length` tokens each layer stores: all of them, or the newest in the window."""
        return valid_length if self.stored_tokens_max is None else min(valid_length, self.stored_tokens_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """The shape of a whole cache, without any payload's own length."""

    groups: tuple[LayerGroup, ...]
    """Groups of like layers; no layer is in two groups."""
    tensor_parallel_rank: int = 0
    """Which shard of the heads this is."""
    tensor_parallel_size: int = 1
    """Over how many shards the heads are split."""
    _group_of_layer: dict[int, LayerGroup] = field(init=False, repr=False, compare=False)
    """Derived: the group of each layer index."""
    _hash: int = field(init=False, repr=False, compare=False)
    """Derived: geometries key caches on the path of every handoff, and have hundreds of values."""

    def __post_init__(self) -> None:
        """Refuse overlapping groups and impossible shards.

        Raises:
            InvalidFieldError: a layer is missing or named twice, or the shard is out of range.
        """
        _require(0 < len(self.groups) <= LAYERS_MAX, "geometry.groups", f"must hold 1 to {LAYERS_MAX} groups")
        _require_range("geometry.tensor_parallel_size", self.tensor_parallel_size, 1, SHARDS_MAX)
        _require_range("geometry.tensor_parallel_rank", self.tensor_parallel_rank, 0, self.tensor_parallel_size - 1)
        by_layer = {layer: group for group in self.groups for layer in group.layers}
        _require(
            len(by_layer) == sum(len(group.layers) for group in self.groups),
            "geometry.groups.layers",
            "a layer is in two groups",
        )
        object.__setattr__(self, "_group_of_layer", dict(sorted(by_layer.items())))
        object.__setattr__(self, "_hash", hash((self.groups, self.tensor_parallel_rank, self.tensor_parallel_size)))

    def __hash__(self) -> int:
        """Return the hash that was computed once."""
        return self._hash

    @property
    def layers(self) -> tuple[int, ...]:
        """Return all layer indices in increasing order."""
        return tuple(self._group_of_layer)

    def group_of(self, layer: int) -> LayerGroup:
        """Return the group of `layer`.

        Raises:
            InvalidFieldError: the geometry has no such layer.
        """
        group = self._group_of_layer.get(layer)
        if group is None:
            raise InvalidFieldError("layer", f"the geometry has no layer {layer}")
        return group


def _in_range(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _require(condition: bool, name: str, problem: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise InvalidFieldError(name, problem)


def _require_range(name: str, value: object, least: int, most: int) -> None:
    _require(_in_range(value, least, most), name, f"must be an integer in [{least}, {most}], got {value!r}")
