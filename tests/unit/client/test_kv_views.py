"""Reading a payload in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvbridge.client.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    HandoffInvalidError,
    NoCacheError,
    UnknownLayerError,
)
from kvbridge.client.handoffs import Answer, Handoff
from kvbridge.client.holdings import PrivateHolding
from kvbridge.client.kv_views import KvView
from kvbridge.client.private_memory import private_slot
from kvbridge.client.slots import SlotWriter
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype
from kvbridge.core.layout import slot_layout
from kvbridge.core.reasons import Reason
from kvbridge.v1 import types_pb2
from tests.builders import geometry

HEADS, DIM, TOKENS = 2, 8, 10


def _payload(shape: CacheGeometry) -> tuple[PrivateHolding, list[torch.Tensor]]:
    """Return a payload of one layer and its K and V, heads first."""
    buffer = private_slot(slot_layout(shape, TOKENS).slot_bytes)
    writer = SlotWriter(buffer, shape, capacity_tokens=TOKENS, valid_length=TOKENS, digested=False)
    dtype = getattr(torch, shape.groups[0].dtype.value)
    tensors = [torch.randn(HEADS, TOKENS, DIM).to(dtype) for _ in range(2)]
    tokens_first = shape.groups[0].order is DimensionOrder.NHD
    writer.write(0, *(tensor.transpose(0, 1) if tokens_first else tensor for tensor in tensors))
    return PrivateHolding(buffer, capacity_tokens=TOKENS), tensors


def _handoff(shape: CacheGeometry) -> tuple[Handoff, PrivateHolding, list[torch.Tensor]]:
    holding, tensors = _payload(shape)
    answer = Answer(key="a", text="own text", descriptor=types_pb2.PayloadDescriptor(valid_length=TOKENS))
    return Handoff(answer, KvView(holding, shape, valid_length=TOKENS)), holding, tensors


@pytest.mark.parametrize("order", DimensionOrder)
@pytest.mark.parametrize("dtype", Dtype)
def test_layers_are_read_heads_first(order: DimensionOrder, dtype: Dtype) -> None:
    """Whatever the order in memory, a consumer sees `[heads, tokens, dim]`, without a copy."""
    handoff, holding, wanted = _handoff(geometry(layers=(0,), order=order, dtype=dtype))
    start = torch.frombuffer(holding.buffer, dtype=torch.uint8).data_ptr()
    for tensor, right in zip(handoff.layer(0), wanted, strict=True):
        assert torch.equal(tensor, right)
        assert start <= tensor.data_ptr() < start + len(holding.buffer)


@pytest.mark.parametrize("order", DimensionOrder)
def test_arrays_are_read_only(order: DimensionOrder) -> None:
    """Numpy knows read-only memory, so writing raises there."""
    handoff, _, wanted = _handoff(geometry(layers=(0,), order=order))
    key, value = handoff.numpy_layer(0)
    assert np.array_equal(key, wanted[0].numpy())
    assert np.array_equal(value, wanted[1].numpy())
    with pytest.raises(ValueError, match="read-only"):
        key[0, 0, 0] = 1


def test_numpy_has_no_bfloat16() -> None:
    """Reading integers as values would be a wrong cache, so it is refused."""
    handoff, _, _ = _handoff(geometry(layers=(0,), dtype=Dtype.BFLOAT16))
    with pytest.raises(TypeError, match="bfloat16"):
        handoff.numpy_layer(0)


@pytest.mark.parametrize("order", DimensionOrder)
def test_a_private_window_has_room_behind_the_cache(order: DimensionOrder) -> None:
    """New tokens are appended in place, and the payload does not change."""
    handoff, _, wanted = _handoff(geometry(layers=(0,), order=order))
    window = handoff.private_window(4)[0]
    assert window.stored_tokens == TOKENS
    for tensor, right in zip((window.key, window.value), wanted, strict=True):
        assert tensor.shape == (HEADS, TOKENS + 4, DIM)
        assert torch.equal(tensor[:, :TOKENS], right)
        assert not tensor[:, TOKENS:].any()
        tensor.fill_(7)
    assert torch.equal(handoff.layer(0)[0], wanted[0])


@pytest.mark.parametrize(("room", "error"), [(-1, ArgumentValueError), (0.5, ArgumentTypeError)])
def test_a_window_needs_a_whole_number_of_tokens(room: Any, error: type[Exception]) -> None:
    """There is no room for half a token."""
    handoff, _, _ = _handoff(geometry(layers=(0,)))
    with pytest.raises(error, match="headroom_tokens"):
        handoff.private_window(room)


def test_an_unknown_layer_is_refused() -> None:
    """A layer that the payload lacks is a mistake."""
    handoff, _, _ = _handoff(geometry(layers=(0,)))
    with pytest.raises(UnknownLayerError):
        handoff.layer(1)


def test_a_copy_is_checked_afterwards() -> None:
    """When the lease was lost, the copy is refused and the handoff becomes a fallback."""
    handoff, holding, wanted = _handoff(geometry(layers=(0,)))
    assert torch.equal(handoff.copy_layer(0)[1], wanted[1])
    holding.release()
    with pytest.raises(HandoffInvalidError):
        handoff.copy_layer(0)
    assert handoff.kv is None
    assert handoff.reason is Reason.PAYLOAD_EXPIRED
    assert handoff.text == "own text"


def test_a_scatter_is_checked_afterwards() -> None:
    """When the lease was lost, the caller is told to discard its blocks."""
    handoff, holding, wanted = _handoff(geometry(layers=(0,)))
    blocks = torch.zeros(2, 5, 4, HEADS, DIM)
    assert handoff.scatter_paged(0, blocks, [3, 0, 2], kv_axis=0)
    assert torch.equal(blocks[1, 3], wanted[1].transpose(0, 1)[:4])
    holding.release()
    assert not handoff.scatter_paged(0, blocks, [3, 0, 2], kv_axis=0)
    assert handoff.kv is None


def test_a_lost_lease_is_noticed() -> None:
    """Asking makes the handoff a fallback, for good."""
    handoff, holding, _ = _handoff(geometry(layers=(0,)))
    assert handoff.kv is not None
    assert handoff.still_valid()
    holding.release()
    assert not handoff.still_valid()
    assert handoff.kv is None
    assert handoff.reason is Reason.PAYLOAD_EXPIRED


def test_a_released_handoff_has_no_cache() -> None:
    """After the `with` block reading is a mistake, and releasing again is none."""
    handoff, _, _ = _handoff(geometry(layers=(0,)))
    with handoff:
        assert handoff.kv is not None
    handoff.release()
    assert handoff.kv is None
    assert handoff.reason is None
    with pytest.raises(NoCacheError, match="released"):
        handoff.layer(0)


def test_a_fallback_says_why() -> None:
    """Reading without looking is a mistake that names the reason."""
    handoff = Handoff(Answer(key="a", reason=Reason.PAYLOAD_UNKNOWN, detail="nobody knows it", text="text"))
    assert handoff.kv is None
    assert not handoff.still_valid()
    assert (handoff.valid_length, handoff.descriptor, handoff.tokens) == (0, None, None)
    with pytest.raises(NoCacheError, match="PAYLOAD_UNKNOWN: nobody knows it"):
        handoff.layer(0)
