"""Values in fewer bits: within half a step of what they were, of the length that is said, and the same every time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Role
from kvbridge.core.transfer_encoding import TransferEncoding
from kvbridge.transform.quantise import GROUP, decode, encode, encoded_bytes, from_floats, to_floats

ENCODINGS = (TransferEncoding.INT8, TransferEncoding.INT4)
shapes = st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 70))
caches = shapes.flatmap(
    lambda shape: arrays(
        np.float32, shape, elements=st.floats(-(2.0**100), 2.0**100, width=32), fill=st.floats(-4, 4, width=32)
    )
)


def there_and_back(values: Any, role: Role, encoding: TransferEncoding) -> Any:
    """Return what arrives of some values."""
    content = encode(values, role, encoding)
    assert len(content) == encoded_bytes(values.shape, role, encoding)
    return decode(memoryview(content), values.shape, role, encoding)


def steps(values: Any, role: Role, encoding: TransferEncoding) -> Any:
    """Return the size of a step for every value, by the formulas, without their rounding."""
    axis = 1 if role is Role.KEY else 2
    if encoding is TransferEncoding.INT8 and role is Role.VALUE:
        return np.broadcast_to(np.abs(values).max(axis=2, keepdims=True) / 127, values.shape)
    if encoding is TransferEncoding.INT8:
        return np.broadcast_to(np.ptp(values, axis=1, keepdims=True) / 255, values.shape)
    step = np.empty_like(values)
    for start in range(0, values.shape[axis], GROUP):
        group = slice(start, start + GROUP)
        piece = (slice(None), group, slice(None)) if axis == 1 else (slice(None), slice(None), group)
        step[piece] = np.ptp(values[piece], axis=axis, keepdims=True) / 15
    return step


@given(caches, st.sampled_from([Role.KEY, Role.VALUE]), st.sampled_from(ENCODINGS))
def test_every_value_arrives_within_a_step(values: Any, role: Role, encoding: TransferEncoding) -> None:
    """Half a step, and what rounding scale and zero to eight bits of precision costs."""
    arrived = there_and_back(values, role, encoding)
    assert arrived.shape == values.shape
    assert np.isfinite(arrived).all()
    step = steps(values.astype(np.float64), role, encoding)
    slack = np.abs(values).max() * 2.0**-7 + 1e-37
    assert (np.abs(arrived.astype(np.float64) - values) <= 0.5 * step + slack).all()


@given(caches, st.sampled_from([Role.KEY, Role.VALUE]), st.sampled_from(ENCODINGS))
def test_the_same_values_give_the_same_bytes(values: Any, role: Role, encoding: TransferEncoding) -> None:
    """Both directions are functions, whatever the strides are that values come with."""
    content = encode(values, role, encoding)
    strided = np.asfortranarray(values)
    assert encode(strided, role, encoding) == content
    first, second = (decode(memoryview(content), values.shape, role, encoding) for _ in range(2))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("role", [Role.KEY, Role.VALUE])
def test_equal_values_and_zeroes(role: Role, encoding: TransferEncoding) -> None:
    """A run without any range has no step to divide by."""
    for value in (0.0, 1.5, -2.0):
        values = np.full((2, 33, 40), value, np.float32)
        assert np.allclose(there_and_back(values, role, encoding), values, rtol=0.01)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_channel_that_is_large_for_every_token_costs_the_others_nothing(encoding: TransferEncoding) -> None:
    """That is why keys are scaled by channel: scaled by token, the small channels would be lost."""
    values = np.random.default_rng(0).standard_normal((1, 256, 64)).astype(np.float32)
    values[:, :, 7] += 500
    others = np.arange(64) != 7
    by_channel, by_token = (there_and_back(values, role, encoding)[:, :, others] for role in (Role.KEY, Role.VALUE))
    right, wrong = (np.abs(arrived - values[:, :, others]).mean() for arrived in (by_channel, by_token))
    assert right < 0.1
    assert wrong > 5 * right


@pytest.mark.parametrize(("encoding", "most"), [(TransferEncoding.INT8, 0.52), (TransferEncoding.INT4, 0.32)])
def test_what_it_saves(encoding: TransferEncoding, most: float) -> None:
    """Bytes against those of bfloat16 for a cache of an ordinary shape."""
    shape = (3, 2048, 64)
    encoded = sum(encoded_bytes(shape, role, encoding) for role in (Role.KEY, Role.VALUE))
    assert encoded / (2 * 2 * 3 * 2048 * 64) < most


def test_what_has_no_scale_is_refused() -> None:
    """Values that are not finite, content of another length, and an encoding that keeps everything."""
    values = np.zeros((1, 4, 4), np.float32)
    values[0, 1, 2] = np.nan
    with pytest.raises(InvalidFieldError, match="finite"):
        encode(values, Role.KEY, TransferEncoding.INT8)
    content = memoryview(encode(np.ones((1, 4, 4), np.float32), Role.KEY, TransferEncoding.INT4))
    with pytest.raises(InvalidFieldError, match="bytes"):
        decode(content[1:], (1, 4, 4), Role.KEY, TransferEncoding.INT4)
    with pytest.raises(InvalidFieldError, match="all bits"):
        encode(np.ones((1, 4, 4), np.float32), Role.KEY, TransferEncoding.EXACT)


@given(st.binary(min_size=4, max_size=400), st.sampled_from(Dtype))
def test_a_caches_own_type_survives_float32(raw: bytes, dtype: Dtype) -> None:
    """Every finite value of a cache's type is a float32, and comes back as the same bits."""
    content = raw[: len(raw) // 4 * 4]
    values = to_floats(memoryview(content), dtype)
    finite = np.isfinite(values)
    size = dtype.bytes_per_element
    back, whole = (np.frombuffer(bits, f"<u{size}") for bits in (from_floats(values, dtype), content))
    assert (back[finite] == whole[finite]).all()
