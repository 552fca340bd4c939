"""Values of a cache in fewer bits, for slow networks: pure functions of numpy arrays, the same on every machine.

Keys have channels that are large for every token, values do not; so keys are scaled by channel and values by token
(KIVI, arXiv 2402.02750, section 3; KVQuant, arXiv 2401.18079, section 3.1). With `x` a run of values that share a
scale:

    affine, b bits        z = floor16(min x)        s = ceil16((max x - z) / (2^b - 1))
                          q = round((x - z) / s)    x' = q s + z
    symmetric, 8 bits     s = ceil16(max |x| / 127)
                          q = round(x / s)          x' = q s

    INT8    K affine for each head and channel; V symmetric for each head and token
    INT4    K affine for each head, channel and 32 tokens; V affine for each head, token and 32 channels

`s` and `z` are kept as bfloat16, rounded away from the values (`ceil16`, `floor16`), so that no code is cut off; for K
in INT8 they are float32, of which there are few. A run of equal values has s = 0 and x' = z. All else is float32
arithmetic, each operation rounded by itself, and the result is rounded to the cache's type, to even. An array of 4-bit
codes holds two in a byte, the first in the low half.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import Role
from kvbridge.core.transfer_encoding import TransferEncoding

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

GROUP = 32
"""Values that share a scale in four bits."""
_INT8_MAX = 127
_BFLOAT16_SHIFT = 16
_BFLOAT16_HALF = 0x7FFF
_BFLOAT16_LOW = 0xFFFF


def encode(values: Floats, role: Role, encoding: TransferEncoding) -> bytes:
    """Return `values`, [heads, tokens, channels], as so few bits as `encoding` says.

    Raises:
        InvalidFieldError: a value is not finite, or `encoding` keeps all bits.
    """
    if not np.isfinite(values).all():
        raise InvalidFieldError("values", "are not all finite and have no scale")
    if encoding is TransferEncoding.INT8 and role is Role.VALUE:
        return _encode_symmetric(values)
    runs = _runs(values, role, encoding)
    wide = encoding is TransferEncoding.INT8
    zero, scale, codes = _affine(runs, bits=_bits(encoding), wide=wide)
    return _floats_out(zero, wide=wide) + _floats_out(scale, wide=wide) + _codes_out(codes, encoding)


def decode(content: memoryview, shape: tuple[int, int, int], role: Role, encoding: TransferEncoding) -> Floats:
    """Return the values that `encode` was given, as far as they are still there.

    Raises:
        InvalidFieldError: the content has another length than such values take, or `encoding` keeps all bits.
    """
    if content.nbytes != encoded_bytes(shape, role, encoding):
        raise InvalidFieldError("content", f"has {content.nbytes} bytes, not {encoded_bytes(shape, role, encoding)}")
    if encoding is TransferEncoding.INT8 and role is Role.VALUE:
        return _decode_symmetric(content, shape)
    grouped, wide = _grouped_shape(shape, role, encoding), encoding is TransferEncoding.INT8
    count = grouped[0] * grouped[1]
    each = 4 if wide else 2
    zero = _floats_in(content[: count * each], wide=wide)[:, None]
    scale = _floats_in(content[count * each : 2 * count * each], wide=wide)[:, None]
    codes = _codes_in(content[2 * count * each :], count * grouped[2], encoding).reshape(count, grouped[2])
    runs = (codes.astype(np.float32) * scale + zero).reshape(grouped)
    return _from_runs(runs, shape, role, encoding)


def encoded_bytes(shape: tuple[int, int, int], role: Role, encoding: TransferEncoding) -> int:
    """Return how many bytes `encode` makes of values of this shape.

    Raises:
        InvalidFieldError: `encoding` keeps all bits.
    """
    heads, tokens, channels = shape
    if encoding is TransferEncoding.INT8 and role is Role.VALUE:
        return heads * tokens * (2 + channels)
    first, second, length = _grouped_shape(shape, role, encoding)
    each = 8 if encoding is TransferEncoding.INT8 else 4
    return first * second * each + -(-first * second * length * _bits(encoding) // 8)


def to_floats(content: memoryview, dtype: Dtype) -> Floats:
    """Return values of a cache's type as float32, which holds them all."""
    if dtype is Dtype.FLOAT32:
        return np.frombuffer(content, np.float32)
    if dtype is Dtype.FLOAT16:
        return np.frombuffer(content, np.float16).astype(np.float32)
    return _widened(np.frombuffer(content, np.uint16))


def from_floats(values: Floats, dtype: Dtype) -> bytes:
    """Return float32 values rounded to a cache's type, to even; too large ones to its greatest."""
    if dtype is Dtype.FLOAT32:
        return values.tobytes()
    if dtype is Dtype.FLOAT16:
        most = np.finfo(np.float16).max
        return np.clip(values, -most, most).astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(_BFLOAT16_HALF) + ((bits >> np.uint32(_BFLOAT16_SHIFT)) & np.uint32(1))
    return (rounded >> np.uint32(_BFLOAT16_SHIFT)).astype(np.uint16).tobytes()


# Runs of values that share a scale


def _bits(encoding: TransferEncoding) -> int:
    if encoding is TransferEncoding.EXACT:
        raise InvalidFieldError("encoding", "keeps all bits, and has no codes")
    return 8 if encoding is TransferEncoding.INT8 else 4


def _grouped_shape(shape: tuple[int, int, int], role: Role, encoding: TransferEncoding) -> tuple[int, int, int]:
    """Return how many runs there are, as two factors, and how long each is."""
    heads, tokens, channels = shape
    across, along = (heads * channels, tokens) if role is Role.KEY else (heads * tokens, channels)
    length = along if _bits(encoding) == 8 else GROUP  # noqa: PLR2004 - the other case is four
    return across, -(-along // length), length


def _runs(values: Floats, role: Role, encoding: TransferEncoding) -> Floats:
    """Return the runs of values, the last one of each channel or token filled up with its last value."""
    heads, tokens, channels = values.shape
    lines = values.transpose(0, 2, 1) if role is Role.KEY else values
    across, count, length = _grouped_shape((heads, tokens, channels), role, encoding)
    lines = np.ascontiguousarray(lines).reshape(across, -1)
    missing = count * length - lines.shape[1]
    if missing:
        lines = np.pad(lines, ((0, 0), (0, missing)), mode="edge")
    return lines.reshape(across * count, length)


def _from_runs(runs: Floats, shape: tuple[int, int, int], role: Role, encoding: TransferEncoding) -> Floats:
    heads, tokens, channels = shape
    across, count, length = _grouped_shape(shape, role, encoding)
    lines = runs.reshape(across, count * length)
    if role is Role.KEY:
        return np.ascontiguousarray(lines[:, :tokens].reshape(heads, channels, tokens).transpose(0, 2, 1))
    return np.ascontiguousarray(lines[:, :channels].reshape(heads, tokens, channels))


# Scales and codes


def _affine(runs: Floats, *, bits: int, wide: bool) -> tuple[Floats, Floats, Codes]:
    steps = np.float32((1 << bits) - 1)
    zero = runs.min(axis=1)
    zero = zero if wide else _rounded(zero, up=False)
    with np.errstate(over="ignore"):
        scale = (runs.max(axis=1) - zero) / steps
    scale = np.minimum(scale, np.finfo(np.float32).max)  # A run from one end of all numbers to the other.
    scale = scale if wide else _rounded(scale, up=True)
    return zero, scale, _nearest(runs - zero[:, None], scale[:, None], 0, int(steps)).astype(np.uint8)


def _encode_symmetric(values: Floats) -> bytes:
    scale = _rounded(np.abs(values).max(axis=2) / np.float32(_INT8_MAX), up=True)
    codes = _nearest(values, scale[:, :, None], -_INT8_MAX, _INT8_MAX).astype(np.int8)
    return _floats_out(scale, wide=False) + codes.tobytes()


def _decode_symmetric(content: memoryview, shape: tuple[int, int, int]) -> Floats:
    heads, tokens, _ = shape
    count = heads * tokens
    scale = _floats_in(content[: 2 * count], wide=False).reshape(heads, tokens, 1)
    codes = np.frombuffer(content[2 * count :], np.int8).reshape(shape)
    return codes.astype(np.float32) * scale


def _nearest(values: Floats, scale: Floats, least: int, most: int) -> Floats:
    safe = np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint(values / safe), least, most)


def _rounded(values: Floats, *, up: bool) -> Floats:
    """Return the next bfloat16 that is not below, or not above, each value."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    away = (values > 0) if up else (values < 0)
    truncated = bits & ~np.uint32(_BFLOAT16_LOW)
    more = away & ((bits & np.uint32(_BFLOAT16_LOW)) != 0)
    grown: Floats = (truncated + (more.astype(np.uint32) << np.uint32(_BFLOAT16_SHIFT))).view(np.float32)
    return np.where(np.isfinite(grown), grown, truncated.view(np.float32))


def _floats_out(values: Floats, *, wide: bool) -> bytes:
    if wide:
        return values.astype("<f4").tobytes()
    return (values.view(np.uint32) >> np.uint32(_BFLOAT16_SHIFT)).astype("<u2").tobytes()


def _floats_in(content: memoryview, *, wide: bool) -> Floats:
    if wide:
        return np.frombuffer(content, "<f4").astype(np.float32)
    return _widened(np.frombuffer(content, "<u2"))


def _widened(halves: np.ndarray[Any, np.dtype[np.uint16]]) -> Floats:
    return (halves.astype(np.uint32) << np.uint32(_BFLOAT16_SHIFT)).view(np.float32)


def _codes_out(codes: Codes, encoding: TransferEncoding) -> bytes:
    flat = codes.reshape(-1)
    if encoding is TransferEncoding.INT8:
        return flat.tobytes()
    return (flat[0::2] | (flat[1::2] << np.uint8(4))).tobytes()  # A run is even.


def _codes_in(content: memoryview, count: int, encoding: TransferEncoding) -> Codes:
    packed = np.frombuffer(content, np.uint8)
    if encoding is TransferEncoding.INT8:
        return packed
    codes = np.empty(count, np.uint8)
    codes[0::2], codes[1::2] = packed & np.uint8(15), packed >> np.uint8(4)
    return codes
