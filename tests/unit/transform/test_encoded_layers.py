"""Frames of layers: of the length that both sides know beforehand, and refused whatever byte of them is another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype
from kvbridge.core.transfer_encoding import TransferEncoding, form_of
from kvbridge.transform.encoded_layers import LayerFrame, NotFiniteError, frames_of, gains, stream_bytes
from kvbridge.transform.quantise import decode, encode, from_floats, to_floats
from tests import builders

TOKENS = 48
ENCODINGS = (TransferEncoding.INT8, TransferEncoding.INT4)
orders = pytest.mark.parametrize("order", list(DimensionOrder))
dtypes = pytest.mark.parametrize("dtype", list(Dtype))
encodings = pytest.mark.parametrize("encoding", ENCODINGS)


def geometry(**changes: Any) -> CacheGeometry:
    """Return two layers of two heads with 32 channels."""
    return builders.geometry(**{"layers": (0, 1), "kv_heads": 2, "head_dim_k": 32, "head_dim_v": 32, **changes})


def values_of(frame: LayerFrame, *, seed: int = 0) -> bytes:
    """Return canonical bytes of a layer of normal values."""
    generator, group = np.random.default_rng(seed), frame.regions[0].group
    count = frame.exact_bytes // group.dtype.bytes_per_element
    return from_floats(generator.standard_normal(count, dtype=np.float32), group.dtype)


def sealed(content: bytes) -> bytes:
    """Return the digest that an owner seals."""
    return xxhash.xxh3_128(content).digest()


@orders
@dtypes
@encodings
def test_a_layer_arrives_as_the_encoder_leaves_it(
    order: DimensionOrder, dtype: Dtype, encoding: TransferEncoding
) -> None:
    """Bit for bit what encoding and decoding each tensor by heads gives, in the order in memory."""
    frame = frames_of(geometry(order=order, dtype=dtype), TOKENS, form_of(encoding, 0))[1]
    content = values_of(frame)
    written = frame.write(content, sealed(content))
    assert len(written) == frame.frame_bytes
    expected, at = [], 0
    for region in frame.regions:
        tensor = to_floats(memoryview(content)[at : at + len(content) // 2], dtype)
        at += len(content) // 2
        by_head = tensor.reshape(2, TOKENS, 32) if order is DimensionOrder.HND else tensor.reshape(TOKENS, 2, 32)
        by_head = by_head if order is DimensionOrder.HND else np.ascontiguousarray(by_head.transpose(1, 0, 2))
        back = decode(memoryview(encode(by_head, region.role, encoding)), by_head.shape, region.role, encoding)
        back = back if order is DimensionOrder.HND else np.ascontiguousarray(back.transpose(1, 0, 2))
        expected.append(from_floats(back, dtype))
    assert frame.read(memoryview(written), sealed(content)) == b"".join(expected)


@given(st.sampled_from([*ENCODINGS, TransferEncoding.EXACT]), st.data())
def test_a_frame_with_another_byte_is_refused(encoding: TransferEncoding, data: st.DataObject) -> None:
    """Whichever byte it is: flag, content or digest."""
    frame = frames_of(geometry(), TOKENS, form_of(encoding, 0))[0]
    content = values_of(frame)
    written = bytearray(frame.write(content, sealed(content)))
    at = data.draw(st.sampled_from([0, len(written) - 1]) | st.integers(0, len(written) - 1))
    written[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(InvalidFieldError, match="layer 0"):
        frame.read(memoryview(written), sealed(content))


@given(st.integers(0, 100))
def test_a_frame_of_another_length_is_refused(nbytes: int) -> None:
    """Be it shorter than its digest."""
    frame = frames_of(geometry(), TOKENS, form_of(TransferEncoding.INT8, 0))[0]
    content = values_of(frame)
    with pytest.raises(InvalidFieldError, match="layer 0"):
        frame.read(memoryview(frame.write(content, sealed(content))[:nbytes]), sealed(content))


def test_a_frame_of_another_layer_payload_or_form_is_refused() -> None:
    """Each is whole, and of the same length."""
    first, second = frames_of(geometry(), TOKENS, form_of(TransferEncoding.INT8, 0))
    content, other = values_of(first), values_of(first, seed=1)
    written = memoryview(first.write(content, sealed(content)))
    for reader, digest in ((second, sealed(content)), (first, sealed(other))):
        with pytest.raises(InvalidFieldError, match="did not arrive"):
            reader.read(written, digest)


def test_an_owner_sends_nothing_that_is_not_what_it_sealed() -> None:
    """Its memory may have changed."""
    frame = frames_of(geometry(), TOKENS, form_of(TransferEncoding.INT8, 0))[0]
    content = values_of(frame)
    with pytest.raises(InvalidFieldError, match="sealed"):
        frame.write(content, sealed(content[:-1] + b"?"))


def test_shallow_layers_keep_all_bits() -> None:
    """Those below the index, by the model's count and not the payload's."""
    wanted = form_of(TransferEncoding.INT8, 6)
    frames = frames_of(geometry(layers=(5, 6)), TOKENS, wanted)
    assert [frame.encoding for frame in frames] == [TransferEncoding.EXACT, TransferEncoding.INT8]
    content = values_of(frames[0])
    assert frames[0].read(memoryview(frames[0].write(content, sealed(content))), sealed(content)) == content
    assert stream_bytes(frames) == len(content) + frames[1].content_bytes + 2 * 17


def test_what_has_scales_or_would_not_shrink_keeps_all_bits() -> None:
    """A form that changes nothing is not asked for."""
    int8 = form_of(TransferEncoding.INT8, 0)
    assert gains(geometry(), TOKENS, int8)
    assert not gains(geometry(), 1, int8)  # The scales alone are as long.
    assert not gains(geometry(k_scales=(1.0, 1.0), v_scales=(1.0, 1.0)), TOKENS, int8)
    assert not gains(geometry(), TOKENS, form_of(TransferEncoding.INT8, 2))


@encodings
def test_values_that_are_not_finite_are_told_of(encoding: TransferEncoding) -> None:
    """The frame has its length all the same, and whoever reads it knows that this payload must come exactly."""
    frame = frames_of(geometry(dtype=Dtype.FLOAT32), TOKENS, form_of(encoding, 0))[0]
    values = np.ones(frame.exact_bytes // 4, np.float32)
    values[7] = np.nan
    content = values.tobytes()
    written = frame.write(content, sealed(content))
    assert len(written) == frame.frame_bytes
    with pytest.raises(NotFiniteError, match="layer 0"):
        frame.read(memoryview(written), sealed(content))
