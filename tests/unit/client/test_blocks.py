"""Tensors of a slot in blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.client.blocks import Block, cut, whole
from kvbridge.client.forms import Form
from kvbridge.client.private_memory import private_slot
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.layout import Region, slot_layout
from tests import builders


def _bytes_of(slot: bytes, region: Region, block: Block) -> bytes:
    starts = [(region.offset_bytes + place.offset_bytes, place.length_bytes) for place in block.places]
    return b"".join(slot[start : start + length] for start, length in starts)


@given(builders.geometries(), st.integers(1, 60), st.integers(1, 1 << 14), st.data())
def test_blocks_are_the_canonical_bytes_of_every_geometry(
    geometry: CacheGeometry, capacity: int, block_bytes: int, data: st.DataObject
) -> None:
    """In their order they cover every stored byte once, and each is what its index picks out of the tensor."""
    valid_length = data.draw(st.integers(1, capacity))
    layout = slot_layout(geometry, capacity)
    buffer = private_slot(layout.slot_bytes)
    memory = memoryview(buffer).cast("B")
    memory[:] = np.random.default_rng(capacity).integers(0, 256, layout.slot_bytes, np.uint8).data
    slot = bytes(memory)
    region = data.draw(st.sampled_from(layout.regions))
    tokens = region.group.stored_tokens(valid_length)
    array = Form(region, tokens).array(buffer, region.offset_bytes)
    blocks = cut(region, tokens, block_bytes)
    pieces = [_bytes_of(slot, region, block) for block in blocks]
    assert pieces == [array[block.index].tobytes() for block in blocks]
    assert b"".join(pieces) == array.tobytes() == _bytes_of(slot, region, whole(region, tokens))
    assert all(len(piece) <= max(block_bytes, region.token_bytes) for piece in pieces)


def test_strips_without_padding_between_them_are_one_place() -> None:
    """What lies in one run is digested in one call."""
    region = slot_layout(builders.geometry(kv_heads=4, head_dim_k=64), 4096).regions[0]
    assert [len(block.places) for block in cut(region, 4096, 2 << 20)] == [1, 1]
    assert [len(block.places) for block in cut(region, 4095, 2 << 20)] == [2, 2]
