"""The slot layout of `kvbridge.core.layout`, worked out only for the layers that are touched.

Laying out every region takes longer than a whole acquire. All layers of a group take the same bytes, so one laid-out
layer per group and a running sum of offsets say where everything is. Geometries are remembered by the bytes in which
they came, so that an answer's geometry is decoded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from kvbridge.core.geometry import CacheGeometry, LayerGroup
from kvbridge.core.layout import HEADER_BYTES, ByteRange, Region, SlotLayout, slot_layout
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_geometry, encode_geometry

GEOMETRIES_MAX = 64
"""Geometries that are remembered; a process handles few models."""
LAYOUTS_MAX = 256
"""Layouts that are remembered; there is one for each geometry and capacity."""


class LazyLayout:
    """Where each value of a payload lies in its slot; the same as `SlotLayout`, layer by layer."""

    def __init__(self, geometry: CacheGeometry, capacity_tokens: int) -> None:
        """Sum up the layers of `geometry` with room for `capacity_tokens` tokens (at least 1)."""
        self.geometry = geometry
        self._first_layers = {group: _lone_layer(group, capacity_tokens) for group in geometry.groups}
        self._offsets: dict[int, int] = {}
        self._regions: dict[int, tuple[Region, Region]] = {}
        offset = HEADER_BYTES
        bytes_per_layer = {
            layer: lone.slot_bytes - HEADER_BYTES
            for group, lone in self._first_layers.items()
            for layer in group.layers
        }
        for layer in geometry.layers:
            self._offsets[layer] = offset
            offset += bytes_per_layer[layer]
        self.slot_bytes = offset
        """Length of the slot, header included; a multiple of the page."""

    def __contains__(self, layer: object) -> bool:
        return layer in self._offsets

    def regions(self, layer: int) -> tuple[Region, Region]:
        """Return the regions of K and V of `layer`, which must be in the geometry."""
        regions = self._regions.get(layer)
        if regions is None:
            regions = self._regions[layer] = self._placed(layer)
        return regions

    def canonical(self, valid_length: int) -> Iterator[ByteRange]:
        """Yield the canonical bytes of the whole payload in order."""
        for layer in self._offsets:
            for region in self.regions(layer):
                yield from region.runs(valid_length)

    def _placed(self, layer: int) -> tuple[Region, Region]:
        moved_bytes = self._offsets[layer] - HEADER_BYTES
        group = self.geometry.group_of(layer)
        key, value = (
            replace(region, layer=layer, group=group, offset_bytes=region.offset_bytes + moved_bytes)
            for region in self._first_layers[group].regions
        )
        return key, value


@lru_cache(maxsize=LAYOUTS_MAX)
def lazy_layout(geometry: CacheGeometry, capacity_tokens: int) -> LazyLayout:
    """Return the layout of a slot for `geometry` with room for `capacity_tokens` tokens (at least 1)."""
    return LazyLayout(geometry, capacity_tokens)


@lru_cache(maxsize=GEOMETRIES_MAX)
def geometry_message(geometry: CacheGeometry) -> types_pb2.CacheGeometry:
    """Return `geometry` as a message, which nobody changes."""
    return encode_geometry(geometry)


def geometry_of(message: types_pb2.CacheGeometry) -> CacheGeometry:
    """Return the geometry in `message`.

    Raises:
        InvalidFieldError: a field is missing or out of range.
    """
    return _parsed_geometry(message.SerializeToString(deterministic=True))


@lru_cache(maxsize=GEOMETRIES_MAX)
def _parsed_geometry(serialized: bytes) -> CacheGeometry:
    return decode_geometry(types_pb2.CacheGeometry.FromString(serialized))


def _lone_layer(group: LayerGroup, capacity_tokens: int) -> SlotLayout:
    """Return the layout of the group's first layer alone in a slot; what its values are scaled by takes no room."""
    lone = replace(group, layers=group.layers[:1], k_scales=(), v_scales=())
    return slot_layout(CacheGeometry(groups=(lone,)), capacity_tokens)
