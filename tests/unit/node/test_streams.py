"""Canonical bytes into slots and out of them, wherever the stream is cut."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.layout import slot_layout
from kvbridge.node.streams import SlotWriter, StreamDigests, canonical_chunks
from tests import builders


@given(builders.geometries(), st.integers(1, 40), st.integers(1, 5000), st.integers(1, 5000), st.data())
def test_what_goes_in_comes_out(
    geometry: CacheGeometry, capacity: int, write_bytes: int, read_bytes: int, data: st.DataObject
) -> None:
    """A stream written in pieces of one size and read in pieces of another, from any offset, is the same stream."""
    valid_length = data.draw(st.integers(1, capacity))
    layout = slot_layout(geometry, capacity)
    total = layout.canonical_bytes(valid_length)
    content = np.random.default_rng(total).bytes(total)
    slot = memoryview(bytearray(layout.slot_bytes))
    writer = SlotWriter(slot, layout, valid_length)
    for start in range(0, total, write_bytes):
        writer.write(memoryview(content)[start : start + write_bytes])
    assert writer.remaining_bytes == 0
    skip = data.draw(st.integers(0, total))
    chunks = list(canonical_chunks(slot, layout, valid_length, chunk_bytes=read_bytes, skip_bytes=skip))
    assert b"".join(bytes(piece) for pieces in chunks for piece in pieces) == content[skip:]
    sizes = [sum(piece.nbytes for piece in pieces) for pieces in chunks]
    assert all(size == read_bytes for size in sizes[:-1])


def test_a_stream_that_is_too_long_writes_nothing_of_the_last_chunk() -> None:
    """A chunk that goes beyond the declared payload is refused before it touches the slot."""
    layout = slot_layout(builders.geometry(), 1)
    slot = memoryview(bytearray(layout.slot_bytes))
    writer = SlotWriter(slot, layout, 1)
    with pytest.raises(InvalidFieldError, match="1 bytes beyond"):
        writer.write(memoryview(b"x" * (layout.canonical_bytes(1) + 1)))
    assert not any(slot)


@given(builders.geometries(), st.integers(1, 40), st.data())
def test_what_is_received_in_place_comes_out(geometry: CacheGeometry, capacity: int, data: st.DataObject) -> None:
    """Bytes that are put straight where `room` says, a few at a time, and others that are written are one stream."""
    valid_length = data.draw(st.integers(1, capacity))
    layout = slot_layout(geometry, capacity)
    total = layout.canonical_bytes(valid_length)
    content = np.random.default_rng(total).bytes(total)
    slot = memoryview(bytearray(layout.slot_bytes))
    writer = SlotWriter(slot, layout, valid_length)
    position = 0
    while position < total:
        room = writer.room()
        offered = sum(view.nbytes for view in room)
        assert 0 < offered <= writer.remaining_bytes == total - position
        count = data.draw(st.integers(min(offered, total // 20 + 1), offered))
        if data.draw(st.booleans()):
            writer.write(memoryview(content)[position : position + count])
        else:
            _scatter(memoryview(content)[position : position + count], room)
            writer.advance(count)
        position += count
    assert not writer.room()
    chunks = canonical_chunks(slot, layout, valid_length, chunk_bytes=1000)
    assert b"".join(bytes(piece) for pieces in chunks for piece in pieces) == content


def _scatter(piece: memoryview, room: list[memoryview]) -> None:
    for view in room:
        count = min(view.nbytes, piece.nbytes)
        view[:count] = piece[:count]
        piece = piece[count:]


@given(builders.geometries(), st.integers(1, 40), st.integers(1, 5000), st.data())
def test_layers_are_digested_as_they_come(
    geometry: CacheGeometry, capacity: int, piece_bytes: int, data: st.DataObject
) -> None:
    """However the stream is cut, each layer's digest is that of its own canonical bytes, and no layer is done early."""
    valid_length = data.draw(st.integers(1, capacity))
    layout = slot_layout(geometry, capacity)
    content = np.random.default_rng(capacity).bytes(layout.canonical_bytes(valid_length))
    lengths = [
        sum(
            region.strip_count * region.stored_strip_bytes(valid_length)
            for region in layout.regions
            if region.layer == layer
        )
        for layer in geometry.layers
    ]
    ends = list(accumulate(lengths))
    wanted = [xxhash.xxh3_128_digest(content[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    digests = StreamDigests(layout, valid_length)
    for start in range(0, len(content), piece_bytes):
        digests.update(memoryview(content)[start : start + piece_bytes])
        whole = sum(end <= start + piece_bytes for end in ends)
        assert digests.done == wanted[:whole]
    assert digests.done == wanted
