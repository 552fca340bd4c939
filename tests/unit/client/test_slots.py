"""Writing a payload into a slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from kvbridge.client.errors import (
    ArgumentTypeError,
    DtypeMismatchError,
    ShapeMismatchError,
    UnknownLayerError,
)
from kvbridge.client.private_memory import private_slot
from kvbridge.client.slots import SlotWriter
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype, LayerKind
from kvbridge.core.layout import Role, slot_layout
from tests.builders import geometry

HEADS, DIM, TOKENS, CAPACITY = 2, 8, 10, 12


def _writer(shape: CacheGeometry | None = None, *, digested: bool = True) -> SlotWriter:
    shape = shape or geometry()
    buffer = private_slot(slot_layout(shape, CAPACITY).slot_bytes)
    return SlotWriter(buffer, shape, capacity_tokens=CAPACITY, valid_length=TOKENS, digested=digested)


def _written(writer: SlotWriter) -> bytes:
    return b"".join(writer.canonical())


def _pair(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(*shape).to(dtype), torch.randn(*shape).to(dtype)


def _raw(*tensors: torch.Tensor) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("dtype", Dtype)
def test_tensors_arrive_bit_by_bit(dtype: Dtype) -> None:
    """Every dtype lands in canonical order: layer by layer, K before V."""
    writer = _writer(geometry(dtype=dtype))
    layers = [_pair(HEADS, TOKENS, DIM, dtype=getattr(torch, dtype.value)) for _ in range(2)]
    for layer, (k, v) in enumerate(layers):
        writer.write(layer, k, v)
    assert _written(writer) == _raw(*(tensor for pair in layers for tensor in pair))


def test_an_nhd_geometry_takes_tokens_first() -> None:
    """The order of the geometry is the order of the arguments."""
    writer = _writer(geometry(layers=(0,), order=DimensionOrder.NHD))
    k, v = _pair(TOKENS, HEADS, DIM)
    writer.write(0, k, v)
    assert _written(writer) == _raw(k, v)


def test_a_leading_dimension_of_one_is_taken() -> None:
    """The cache of a batch of one needs no indexing."""
    writer = _writer(geometry(layers=(0,)))
    k, v = _pair(1, HEADS, TOKENS, DIM)
    writer.write(0, k, v)
    assert _written(writer) == _raw(k, v)


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], dim=-1)[..., :DIM],
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.stack([x, x])[1],
    ],
    ids=["transposed", "sliced", "with gradient", "selected"],
)
def test_any_strides_are_taken(strided: Any) -> None:
    """Where a producer's values lie does not matter, nor whether they need gradients."""
    writer = _writer(geometry(layers=(0,)))
    k, v = _pair(HEADS, TOKENS, DIM)
    writer.write(0, strided(k), strided(v))
    assert _written(writer) == _raw(k, v)


def test_numpy_arrays_are_taken() -> None:
    """A producer without torch publishes arrays, read-only and strided ones included."""
    writer = _writer(geometry(layers=(0,)))
    k, v = (tensor.numpy() for tensor in _pair(HEADS, TOKENS, DIM))
    flipped = np.flip(np.flip(k, 1).copy(), 1)
    v.flags.writeable = False
    writer.write(0, flipped, v)
    assert _written(writer) == k.tobytes() + v.tobytes()


def test_arrays_with_a_mask_or_off_their_alignment_are_taken() -> None:
    """The values count as they lie in memory, hidden ones included."""
    writer = _writer(geometry(layers=(0,)))
    k, v = (tensor.numpy() for tensor in _pair(HEADS, TOKENS, DIM))
    odd = np.ndarray(k.shape, k.dtype, bytearray(b"-" + k.tobytes()), offset=1)
    writer.write(0, odd, np.ma.masked_array(v, mask=v > 0))
    assert _written(writer) == k.tobytes() + v.tobytes()


def test_a_window_layer_takes_what_it_stores() -> None:
    """A sliding layer is written with the newest tokens alone."""
    shape = geometry(layers=(0,), kind=LayerKind.SLIDING, window_tokens=6, stored_tokens_max=5)
    writer = _writer(shape)
    with pytest.raises(ShapeMismatchError):
        writer.write(0, *_pair(HEADS, TOKENS, DIM))
    k, v = _pair(HEADS, 5, DIM)
    writer.write(0, k, v)
    assert _written(writer) == _raw(k, v)


def test_writing_twice_overwrites() -> None:
    """The last write counts, in the bytes and in the digest."""
    writer = _writer(geometry(layers=(0,)))
    writer.write(0, *_pair(HEADS, TOKENS, DIM))
    k, v = _pair(HEADS, TOKENS, DIM)
    writer.write(0, k, v)
    assert writer.layer_digests() == (xxhash.xxh3_128_digest(_raw(k, v)),)


def test_of_several_layers_none_is_written_if_one_is_wrong() -> None:
    """The error names what is wrong, and what was written before stands."""
    writer = _writer()
    good = _pair(HEADS, TOKENS, DIM)
    writer.write(0, *good)
    for wrong, error in (
        ({0: _pair(HEADS, TOKENS, DIM), 1: _pair(HEADS, TOKENS - 1, DIM)}, ShapeMismatchError),
        ({0: _pair(HEADS, TOKENS, DIM), 7: good}, UnknownLayerError),
        ({0: _pair(HEADS, TOKENS, DIM), 1: (good[0], None)}, ArgumentTypeError),
    ):
        with pytest.raises(error):
            writer.write_layers(wrong)
        assert writer.missing_layers == (1,)
        assert _raw(*good) in _written(writer)
    writer.write_layers({1: good})
    assert writer.missing_layers == ()
    writer.write_layers({})


def test_digests_are_those_of_the_canonical_bytes() -> None:
    """Each layer's digest covers K, then V, as they lie in the slot."""
    writer = _writer()
    layers = [_pair(HEADS, TOKENS, DIM) for _ in range(2)]
    for layer, (k, v) in enumerate(layers):
        writer.write(layer, k, v)
    assert writer.layer_digests() == tuple(xxhash.xxh3_128_digest(_raw(k, v)) for k, v in layers)
    undigested = _writer(digested=False)
    undigested.write(0, *layers[0])
    assert undigested.layer_digests() == ()


def test_views_are_the_slot_itself() -> None:
    """A producer computes straight into the slot, and the digest is taken at the end."""
    writer = _writer(geometry(layers=(0,)))
    k, v = _pair(HEADS, TOKENS, DIM)
    writer.write(0, *_pair(HEADS, TOKENS, DIM))
    key, value = writer.view(0, Role.KEY), writer.view(0, Role.VALUE)
    torch.mul(k, 1, out=key)
    value.copy_(v)
    assert _written(writer) == _raw(k, v)
    assert writer.layer_digests() == (xxhash.xxh3_128_digest(_raw(k, v)),)


def test_missing_layers_are_named() -> None:
    """A layer counts when both K and V were written or their views were given out."""
    writer = _writer(geometry(layers=(0, 1, 4)))
    missing = [writer.missing_layers]
    writer.write(1, *_pair(HEADS, TOKENS, DIM))
    writer.view(4, Role.KEY)
    missing.append(writer.missing_layers)
    writer.view(4, Role.VALUE)
    missing.append(writer.missing_layers)
    assert missing == [(0, 1, 4), (0, 4), (0,)]


@pytest.mark.parametrize("layers", [None, [], [_pair(HEADS, TOKENS, DIM)], {0: ()}, {0: (1, 2, 3)}, {0: None}])
def test_what_maps_no_layers_to_pairs_is_refused(layers: Any) -> None:
    """By name, before anything is written."""
    writer = _writer()
    with pytest.raises(ArgumentTypeError, match="layers"):
        writer.write_layers(layers)
    assert writer.missing_layers == (0, 1)


@pytest.mark.parametrize("layer", [2, -1, "0", None])
def test_an_unknown_layer_is_refused(layer: Any) -> None:
    """A layer that the geometry lacks is a mistake, whatever its type."""
    writer = _writer()
    with pytest.raises(UnknownLayerError, match="layer"):
        writer.write(layer, *_pair(HEADS, TOKENS, DIM))
    with pytest.raises(UnknownLayerError):
        writer.view(layer, Role.KEY)


@pytest.mark.parametrize(
    "shape",
    [
        (HEADS, TOKENS - 1, DIM),
        (HEADS, CAPACITY, DIM),
        (HEADS + 1, TOKENS, DIM),
        (HEADS, TOKENS, DIM + 1),
        (TOKENS, HEADS, DIM),
        (2, HEADS, TOKENS, DIM),
        (HEADS * TOKENS, DIM),
        (1, 1, HEADS, TOKENS, DIM),
    ],
)
@pytest.mark.parametrize("field", ["k", "v"])
def test_a_wrong_shape_is_refused_before_anything_is_written(shape: tuple[int, ...], field: str) -> None:
    """Heads, tokens and dimension must be exact, and the other tensor is not written either."""
    writer = _writer()
    good = torch.ones(HEADS, TOKENS, DIM)
    pair = (torch.ones(shape), good) if field == "k" else (good, torch.ones(shape))
    with pytest.raises(ShapeMismatchError) as caught:
        writer.write(0, *pair)
    assert caught.value.field == field
    assert not any(_written(writer))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(HEADS, TOKENS, DIM, dtype=torch.float64),
        torch.ones(HEADS, TOKENS, DIM, dtype=torch.bfloat16),
        np.ones((HEADS, TOKENS, DIM)),
        np.ones((HEADS, TOKENS, DIM), dtype=">f4"),
        np.ones((HEADS, TOKENS, DIM), dtype=np.int32),
    ],
)
def test_another_dtype_is_refused(value: Any) -> None:
    """Nothing is cast, not even to more precision, another byte order or from integers of the same width."""
    writer = _writer()
    with pytest.raises(DtypeMismatchError, match="float32"):
        writer.write(0, torch.ones(HEADS, TOKENS, DIM), value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [[[0.0]]],
        torch.ones(HEADS, TOKENS, DIM).to_sparse(),
        torch.ones(HEADS, TOKENS, DIM, device="meta"),
        memoryview(b"x"),
    ],
)
def test_what_has_no_plain_values_is_refused(value: Any) -> None:
    """Lists, sparse tensors and tensors without memory are no K or V."""
    writer = _writer()
    with pytest.raises(ArgumentTypeError) as caught:
        writer.write(0, value, torch.ones(HEADS, TOKENS, DIM))
    assert caught.value.field == "k"
