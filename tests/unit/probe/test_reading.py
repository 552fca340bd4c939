"""Tokens out of slots against the layout's own account of where they are."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.geometry import CacheGeometry, DimensionOrder
from kvbridge.core.layout import Role, slot_layout
from kvbridge.probe.reading import read_tokens
from tests import builders


@given(builders.geometries(), st.integers(1, 60), st.data())
def test_tokens_are_read_as_the_layout_places_them(geometry: CacheGeometry, capacity: int, data: st.DataObject) -> None:
    """For every geometry the picked tokens are the ones whose bytes the canonical order names."""
    valid_length = data.draw(st.integers(1, capacity))
    layout = slot_layout(geometry, capacity)
    slot = np.random.default_rng(capacity).integers(0, 60, layout.slot_bytes, np.uint8)
    for region in layout.regions:
        group = region.group
        stored = group.stored_tokens(valid_length)
        index = np.asarray(data.draw(st.lists(st.integers(0, stored - 1), min_size=1, unique=True).map(sorted)))
        content = b"".join(
            slot[piece.offset_bytes : piece.offset_bytes + piece.length_bytes].tobytes()
            for piece in region.stored(valid_length)
        )
        values = torch.frombuffer(bytearray(content), dtype=getattr(torch, group.dtype.value)).float()
        if group.order is DimensionOrder.HND:
            expected = values.reshape(group.kv_heads, stored, region.head_dim).transpose(0, 1)
        else:
            expected = values.reshape(stored, group.kv_heads, region.head_dim)
        scales = group.k_scales if region.role is Role.KEY else group.v_scales
        scale = scales[group.layers.index(region.layer)] if scales else 1.0
        with np.errstate(all="ignore"):  # Scales may be as large as numbers get.
            found = read_tokens(slot, region, valid_length=valid_length, stored_index=index)
            scaled = expected[torch.from_numpy(index)].numpy() * np.float32(scale)
        np.testing.assert_array_equal(found, scaled)
