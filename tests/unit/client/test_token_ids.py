"""Packing token ids."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError
from kvbridge.client.token_ids import pack_token_ids, token_sequence, unpack_token_ids
from kvbridge.core.tokens import TokenSequence

_IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50)


@settings(deadline=None)
@given(_IDS)
def test_ids_survive_packing(ids: list[int]) -> None:
    """Packing is little-endian, 4 bytes each, and unpacking gives the same ids."""
    packed = pack_token_ids(ids)
    assert packed == struct.pack(f"<{len(ids)}I", *ids)
    assert unpack_token_ids(packed) == ids


@settings(deadline=None)
@given(_IDS)
def test_every_container_packs_alike(ids: list[int]) -> None:
    """Tuples, arrays and tensors of any integer type that fits give the same bytes."""
    packed = pack_token_ids(ids)
    forms: list[Any] = [tuple(ids), np.array(ids, dtype=np.uint32), np.array(ids, dtype=">i8"), torch.tensor(ids)]
    assert all(pack_token_ids(form) == packed for form in forms)


def test_a_range_and_a_strided_tensor_pack() -> None:
    """Sequences need not be lists, and tensors need not be contiguous."""
    assert pack_token_ids(range(3)) == pack_token_ids(torch.tensor([0, 9, 1, 9, 2, 9])[::2])


@pytest.mark.parametrize(
    "ids", [[-1], [2**32], np.array([-1]), np.array([2**32]), torch.tensor([-5]), torch.tensor([2**40]), []]
)
def test_ids_out_of_range_are_refused(ids: Any) -> None:
    """What does not fit 32 bits is refused by the field's name, not wrapped around."""
    with pytest.raises(ArgumentValueError) as caught:
        pack_token_ids(ids)
    assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    "ids",
    [
        "text",
        b"bytes",
        5,
        None,
        [1.5],
        ["1"],
        {1, 2},
        np.array([1.0]),
        np.array([[1]]),
        np.array([True]),
        torch.tensor([1.0]),
        torch.tensor([1.0], dtype=torch.bfloat16),
        torch.tensor([True]),
        torch.tensor([[1]]),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: Any) -> None:
    """Text, fractions, truth values and batches are no token ids."""
    with pytest.raises(ArgumentTypeError) as caught:
        pack_token_ids(ids)
    assert caught.value.field == "tokens"


def test_a_sequence_of_the_core_passes() -> None:
    """A caller that has only a digest can give it."""
    sequence = TokenSequence(count=3, digest=bytes(32))
    assert token_sequence(sequence) is sequence
