"""A model made of numbers: each token has a K and a V in layer 0, and each other layer a direction of its own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, Verification
from kvbridge.core.geometry import (
    CacheGeometry,
    DimensionOrder,
    Dtype,
    LayerGroup,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.layout import Role, slot_layout
from kvbridge.core.tokens import TokenSequence
from kvbridge.probe import Fingerprint, RoleFingerprint
from kvbridge.probe.tables import chance_error, make_projection, project
from tests import builders

VOCABULARY, HEADS, DIM_K, DIM_V, LAYERS = 300, 4, 16, 8, 5
FIRST_TOKENS = (1, 7)
THETA = 10_000.0
PLAIN_ROPE = PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(theta=THETA))


def rotate(keys: NDArray[Any], positions: NDArray[Any], rope: RopeParameters | None) -> NDArray[Any]:
    """Rotate keys, `[tokens, heads, dim]`, by a plain rope, with complex numbers."""
    if rope is None:
        return keys
    rotating = int(keys.shape[-1] * rope.partial_factor)
    half = np.arange(rotating // 2)
    split = rope.pairing is RopePairing.HALF_SPLIT
    first, second = (half, half + rotating // 2) if split else (2 * half, 2 * half + 1)
    angles = np.asarray(positions)[:, None, None] * rope.theta ** (-2.0 * half / rotating)
    turned = (keys[..., first] + 1j * keys[..., second]) * np.exp(1j * angles)
    rotated = keys.copy()
    rotated[..., first], rotated[..., second] = turned.real, turned.imag
    return rotated


@dataclass(frozen=True, kw_only=True)
class Payload:
    """A slot and what is declared of it."""

    descriptor: PayloadDescriptor
    slot: NDArray[np.uint8]

    def declared(self, **changes: Any) -> Payload:
        """Return the same bytes under another descriptor."""
        return replace(self, descriptor=replace(self.descriptor, **changes))


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """The model."""

    encoding: PositionEncoding = PLAIN_ROPE
    seed: int = 0
    keys: NDArray[Any] = field(init=False)
    values: NDArray[Any] = field(init=False)
    directions: dict[Role, NDArray[Any]] = field(init=False)
    firsts: dict[Role, NDArray[Any]] = field(init=False)

    def __post_init__(self) -> None:
        dice = np.random.default_rng(self.seed)
        # One pair has a bias that is far larger than what tells tokens apart.
        bias = np.zeros((HEADS, DIM_K))
        bias[:, 3] = 40.0
        sizes = {Role.KEY: DIM_K, Role.VALUE: DIM_V}
        made: dict[str, Any] = {
            "keys": dice.standard_normal((VOCABULARY, HEADS, DIM_K)) + bias,
            "values": dice.standard_normal((VOCABULARY, HEADS, DIM_V)) * 1e-3,
            "directions": {role: dice.standard_normal((LAYERS, HEADS, dim)) for role, dim in sizes.items()},
            "firsts": {
                role: dice.standard_normal((len(FIRST_TOKENS), LAYERS, HEADS, dim)) for role, dim in sizes.items()
            },
        }
        for row, token in enumerate(FIRST_TOKENS):
            made["firsts"][Role.KEY][row, 0] = made["keys"][token]
            made["firsts"][Role.VALUE][row, 0] = made["values"][token]
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def fingerprint(self, **changes: Any) -> Fingerprint:
        """Return what a builder would make of it."""
        dice = np.random.default_rng(5)
        rope = self.encoding.rope
        pairs = 0 if rope is None else int(DIM_K * rope.partial_factor) // 2
        pairing = RopePairing.HALF_SPLIT if rope is None else rope.pairing
        roles = {}
        for role, plain, turning in ((Role.KEY, self.keys, pairs), (Role.VALUE, self.values, 0)):
            vectors = plain.astype(np.float32)
            projection = make_projection(vectors, pairs=turning, pairing=pairing, dice=dice)
            table = project(vectors, projection).astype(np.float16)
            roles[role] = RoleFingerprint(
                projection=projection,
                table=table,
                chance=chance_error(table, dice),
                first=self.firsts[role].astype(np.float32),
                means=self.directions[role].astype(np.float32),
            )
        made = Fingerprint(
            model=builders.model_tag(),
            position_encoding=self.encoding,
            dtype=Dtype.FLOAT32,
            first_tokens=FIRST_TOKENS,
            layer_margin=0.5,
            keys=roles[Role.KEY],
            values=roles[Role.VALUE],
        )
        return replace(made, **changes)

    def geometry(
        self, *, rank: int = 0, size: int = 1, layers: tuple[int, ...] = tuple(range(LAYERS)), **changes: Any
    ) -> CacheGeometry:
        """Return a shape of its caches; a `window` makes them slide."""
        window = changes.pop("window", None)
        sliding = {"kind": LayerKind.SLIDING, "window_tokens": window, "stored_tokens_max": window}
        settings = {
            "layers": layers,
            "kv_heads": max(HEADS // size, 1),
            "head_dim_k": DIM_K,
            "head_dim_v": DIM_V,
            "dtype": Dtype.FLOAT32,
            "position_encoding": self.encoding,
            **({} if window is None else sliding),
            **changes,
        }
        group = LayerGroup(**settings)
        return CacheGeometry(groups=(group,), tensor_parallel_rank=rank, tensor_parallel_size=size)

    def held(self, ids: NDArray[Any], first_position: int) -> dict[Role, NDArray[Any]]:
        """Return what all layers hold, `[layers, tokens, heads, dim]`, keys rotated."""
        dice = np.random.default_rng(9)
        positions = first_position + np.arange(len(ids))
        held = {}
        for role, zero in ((Role.KEY, self.keys), (Role.VALUE, self.values)):
            directions = self.directions[role]
            layers = directions[:, None] + 0.3 * dice.standard_normal((LAYERS, len(ids), *directions.shape[1:]))
            layers[0] = zero[ids]
            if first_position == 0 and int(ids[0]) in FIRST_TOKENS:
                layers[:, 0] = self.firsts[role][FIRST_TOKENS.index(int(ids[0]))]
            held[role] = layers
        held[Role.KEY] = np.stack([rotate(layer, positions, self.encoding.rope) for layer in held[Role.KEY]])
        return held

    def payload(
        self,
        ids: NDArray[Any],
        *,
        first_position: int = 0,
        geometry: CacheGeometry | None = None,
        held: dict[Role, NDArray[Any]] | None = None,
        room: int = 3,
    ) -> Payload:
        """Return the cache of `ids` in a slot, or whatever else is said to be held."""
        shape = self.geometry() if geometry is None else geometry
        held = self.held(ids, first_position) if held is None else held
        capacity = len(ids) + room
        slot = _write(shape, capacity, held)
        descriptor = PayloadDescriptor(
            reference=PayloadReference(key="k", generation=1),
            model=builders.model_tag(),
            geometry=shape,
            capacity_tokens=capacity,
            valid_length=len(ids),
            first_position=first_position,
            tokens=TokenSequence.from_packed(np.asarray(ids, "<u4").tobytes()),
            verified=Verification.NONE,
        )
        return Payload(descriptor=descriptor, slot=slot)


def ids_of(count: int, *, seed: int = 1, first: int | None = None) -> NDArray[Any]:
    """Return different tokens that follow from the seed."""
    ids = np.random.default_rng(seed).choice(np.arange(10, VOCABULARY), count, replace=False)
    if first is not None:
        ids[0] = first
    return ids


def encoded(values: NDArray[Any], dtype: Dtype) -> NDArray[np.uint8]:
    """Return the bytes of values in an element type, the last axis in bytes."""
    if dtype is Dtype.BFLOAT16:  # Rounded to nearest by adding half of what is cut off.
        bits = values.astype(np.float32).view(np.uint32) + 0x8000
        return (bits >> 16).astype("<u2").view(np.uint8)
    return values.astype("<f4" if dtype is Dtype.FLOAT32 else "<f2").view(np.uint8)


def _write(geometry: CacheGeometry, capacity: int, held: dict[Role, NDArray[Any]]) -> NDArray[np.uint8]:
    layout = slot_layout(geometry, capacity)
    slot = np.full(layout.slot_bytes, 0xFF, np.uint8)  # What is not written is NaN.
    for region in layout.regions:
        group = region.group
        first = geometry.tensor_parallel_rank * HEADS // geometry.tensor_parallel_size
        tokens = held[region.role][region.layer][:, first : first + group.kv_heads]
        stored = tokens[len(tokens) - group.stored_tokens(len(tokens)) :]
        if group.order is DimensionOrder.HND:
            stored = stored.transpose(1, 0, 2)
        content = encoded(np.ascontiguousarray(stored), group.dtype).reshape(-1)
        offset = 0
        for piece in region.stored(len(tokens)):
            slot[piece.offset_bytes : piece.offset_bytes + piece.length_bytes] = content[offset:][: piece.length_bytes]
            offset += piece.length_bytes
    return slot
