"""Cache geometries."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from kvbridge.core.errors import InvalidFieldError
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
from kvbridge.v1 import types_pb2 as pb
from kvbridge.wire.enums import EnumCodec

_DTYPES = EnumCodec(Dtype, dict(pb.Dtype.items()), "DTYPE_")
_KINDS = EnumCodec(LayerKind, dict(pb.LayerKind.items()), "LAYER_KIND_")
_ORDERS = EnumCodec(DimensionOrder, dict(pb.DimensionOrder.items()), "DIMENSION_ORDER_")
_POSITIONS = EnumCodec(PositionKind, dict(pb.PositionKind.items()), "POSITION_KIND_")
_PAIRINGS = EnumCodec(RopePairing, dict(pb.RopePairing.items()), "ROPE_PAIRING_")


_GEOMETRIES_MAX = 256
"""Most geometries kept in either direction: a node meets few, and meets them on every handoff."""


@lru_cache(maxsize=_GEOMETRIES_MAX)
def encode_geometry(geometry: CacheGeometry) -> pb.CacheGeometry:
    """Return `geometry` as a message, which is shared: put it into another message, which copies it, or copy it."""
    return pb.CacheGeometry(
        groups=[_encode_group(group) for group in geometry.groups],
        tensor_parallel_rank=geometry.tensor_parallel_rank,
        tensor_parallel_size=geometry.tensor_parallel_size,
    )


def decode_geometry(message: pb.CacheGeometry) -> CacheGeometry:
    """Return the geometry in `message`; the same object for the same message, so that comparing is quick.

    Raises:
        InvalidFieldError: a field is missing, unknown or out of range.
    """
    return _decode_serialized(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=_GEOMETRIES_MAX)
def _decode_serialized(serialized: bytes) -> CacheGeometry:
    message = pb.CacheGeometry.FromString(serialized)
    return CacheGeometry(
        groups=tuple(_decode_group(group) for group in message.groups),
        tensor_parallel_rank=message.tensor_parallel_rank,
        tensor_parallel_size=message.tensor_parallel_size,
    )


def _encode_group(group: LayerGroup) -> pb.LayerGroup:
    return pb.LayerGroup(
        layers=group.layers,
        kind=cast("pb.LayerKind.ValueType", _KINDS.encode(group.kind)),
        kv_heads=group.kv_heads,
        head_dim_k=group.head_dim_k,
        head_dim_v=group.head_dim_v,
        dtype=cast("pb.Dtype.ValueType", _DTYPES.encode(group.dtype)),
        order=cast("pb.DimensionOrder.ValueType", _ORDERS.encode(group.order)),
        window_tokens=group.window_tokens,
        stored_tokens_max=group.stored_tokens_max,
        position_encoding=_encode_position(group.position_encoding),
        k_scales=group.k_scales,
        v_scales=group.v_scales,
    )


def _decode_group(message: pb.LayerGroup) -> LayerGroup:
    if not message.HasField("position_encoding"):
        raise InvalidFieldError("geometry.groups.position_encoding", "is required")
    return LayerGroup(
        layers=tuple(message.layers),
        kind=_KINDS.decode(message.kind, "geometry.groups.kind"),
        kv_heads=message.kv_heads,
        head_dim_k=message.head_dim_k,
        head_dim_v=message.head_dim_v,
        dtype=_DTYPES.decode(message.dtype, "geometry.groups.dtype"),
        order=_ORDERS.decode(message.order, "geometry.groups.order"),
        window_tokens=message.window_tokens if message.HasField("window_tokens") else None,
        stored_tokens_max=message.stored_tokens_max if message.HasField("stored_tokens_max") else None,
        position_encoding=_decode_position(message.position_encoding),
        k_scales=tuple(message.k_scales),
        v_scales=tuple(message.v_scales),
    )


def _encode_position(encoding: PositionEncoding) -> pb.PositionEncoding:
    return pb.PositionEncoding(
        kind=cast("pb.PositionKind.ValueType", _POSITIONS.encode(encoding.kind)),
        rope=None if encoding.rope is None else _encode_rope(encoding.rope),
    )


def _decode_position(message: pb.PositionEncoding) -> PositionEncoding:
    return PositionEncoding(
        kind=_POSITIONS.decode(message.kind, "geometry.groups.position_encoding.kind"),
        rope=_decode_rope(message.rope) if message.HasField("rope") else None,
    )


def _encode_rope(rope: RopeParameters) -> pb.RopeParameters:
    return pb.RopeParameters(
        rope_type=rope.rope_type,
        theta=rope.theta,
        partial_factor=rope.partial_factor,
        pairing=cast("pb.RopePairing.ValueType", _PAIRINGS.encode(rope.pairing)),
        scaling=[pb.RopeScaling(name=name, values=values) for name, values in rope.scaling],
    )


def _decode_rope(message: pb.RopeParameters) -> RopeParameters:
    return RopeParameters(
        rope_type=message.rope_type,
        theta=message.theta,
        partial_factor=message.partial_factor,
        pairing=_PAIRINGS.decode(message.pairing, "geometry.groups.position_encoding.rope.pairing"),
        scaling=tuple((entry.name, tuple(entry.values)) for entry in message.scaling),
    )
