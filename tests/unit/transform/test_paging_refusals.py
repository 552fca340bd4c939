"""What the paged copies refuse: each check names its argument and leaves every bit as it was."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.geometry import TOKENS_MAX, DimensionOrder
from kvbridge.transform.paging import (
    PagingError,
    address_ranges_meet,
    gather_blocks,
    scatter_blocks,
    shares_memory_within,
)

SHAPE_BLOCKS = (4, 4, 2, 8)
SHAPE_SLOT = (2, 11, 8)
DIRECTIONS: dict[str, tuple[Callable[..., None], str]] = {
    "gather": (gather_blocks, "out"),
    "scatter": (scatter_blocks, "source"),
}
"""For each direction its function and what that calls the slot view."""


def zeros(size: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    """Return a tensor that fits `fitting` in dtype and device."""
    return torch.zeros(size, dtype=dtype, device=device)


def fitting(slot_name: str) -> dict[str, Any]:
    """Return arguments that no check refuses: NHD blocks, an HND slot with room for 11 tokens, 10 of them used."""
    return {
        "kv_blocks": torch.randn(SHAPE_BLOCKS).to(torch.bfloat16),
        "block_table": [2, 0, 3],
        slot_name: torch.randn(SHAPE_SLOT).to(torch.bfloat16),
        "token_count": 10,
        "block_order": DimensionOrder.NHD,
        "slot_order": DimensionOrder.HND,
    }


def refusal(direction: str, **changed: Any) -> PagingError:
    """Call with some arguments of `fitting` changed and return the error, after comparing all memory with before.

    `SLOT` stands for the slot argument, which the two directions name differently.
    """
    function, slot_name = DIRECTIONS[direction]
    arguments = fitting(slot_name)
    arguments |= {slot_name if name == "SLOT" else name: value for name, value in changed.items()}
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    tensors = [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.device.type != "meta"]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(PagingError) as caught:
        function(**arguments)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)
    return caught.value


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("blocks of three dimensions", {"kv_blocks": zeros((4, 4, 16))}, "kv_blocks"),
    ("blocks of five dimensions", {"kv_blocks": zeros((4, 2, 4, 2, 8))}, "kv_blocks"),
    ("blocks without rows", {"kv_blocks": zeros((4, 0, 2, 8))}, "kv_blocks"),
    ("complex blocks", {"kv_blocks": zeros(SHAPE_BLOCKS, torch.complex64)}, "kv_blocks"),
    ("sparse blocks", {"kv_blocks": zeros(SHAPE_BLOCKS).to_sparse()}, "kv_blocks"),
    ("no blocks", {"kv_blocks": zeros((0, 4, 2, 8))}, "block_table"),
    ("wrong block order", {"block_order": DimensionOrder.HND}, "SLOT"),
    ("unknown block order", {"block_order": "NDH"}, "block_order"),
    ("wrong slot order", {"slot_order": DimensionOrder.NHD}, "SLOT"),
    ("unknown slot order", {"slot_order": "nhd"}, "slot_order"),
    ("block axis beyond the dimensions", {"block_axis": 4}, "block_axis"),
    ("negative block axis", {"block_axis": -1}, "block_axis"),
    ("block axis not a number", {"block_axis": "0"}, "block_axis"),
    ("slot of two dimensions", {"SLOT": zeros((2, 88))}, "SLOT"),
    ("slot of other heads", {"SLOT": zeros((3, 11, 8))}, "SLOT"),
    ("slot of one head", {"SLOT": zeros((1, 11, 8))}, "SLOT"),
    ("slot of another dim", {"SLOT": zeros((2, 11, 7))}, "SLOT"),
    ("slot of another dtype", {"SLOT": zeros(SHAPE_SLOT, torch.float16)}, "SLOT"),
    ("slot on another device", {"SLOT": zeros(SHAPE_SLOT, device="meta")}, "SLOT"),
    ("slot without room", {"SLOT": zeros((2, 0, 8))}, "token_count"),
    ("no tokens", {"token_count": 0}, "token_count"),
    ("negative token count", {"token_count": -1}, "token_count"),
    ("more tokens than the capacity", {"token_count": 12}, "token_count"),
    ("more tokens than any payload", {"token_count": TOKENS_MAX + 1}, "token_count"),
    ("token count not an int", {"token_count": 10.0}, "token_count"),
    ("short list", {"block_table": [2, 0]}, "block_table"),
    ("short tensor", {"block_table": torch.tensor([2, 0])}, "block_table"),
    ("empty table", {"block_table": []}, "block_table"),
    ("id beyond the blocks", {"block_table": [2, 0, 4]}, "block_table"),
    ("negative id", {"block_table": [2, -1, 3]}, "block_table"),
    ("negative id in a tensor", {"block_table": torch.tensor([2, -1, 3], dtype=torch.int32)}, "block_table"),
    ("id beyond 32 bits", {"block_table": [2, 2**32, 3]}, "block_table"),
    ("id beyond 64 bits", {"block_table": [2, 2**64, 3]}, "block_table"),
    ("fractions", {"block_table": [2.0, 0.0, 3.0]}, "block_table"),
    ("truth values", {"block_table": [True, False, True]}, "block_table"),
    ("nothing in the table", {"block_table": [2, None, 3]}, "block_table"),
    ("text", {"block_table": "203"}, "block_table"),
    ("float tensor", {"block_table": torch.tensor([2.0, 0.0, 3.0])}, "block_table"),
    ("uint8 tensor", {"block_table": torch.tensor([2, 0, 3], dtype=torch.uint8)}, "block_table"),
    ("nested table", {"block_table": [[2], [0], [3]]}, "block_table"),
    ("ragged table", {"block_table": [[2], [0, 1], [3]]}, "block_table"),
    ("two-dimensional tensor", {"block_table": torch.tensor([[2, 0, 3]])}, "block_table"),
    ("tensor without dimensions", {"block_table": torch.tensor(2)}, "block_table"),
]


@pytest.mark.parametrize(("changed", "field"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_refusals_name_the_argument_and_write_nothing(changed: dict[str, Any], field: str, direction: str) -> None:
    """An argument that does not fit is named by the error, and no bit of either side has changed."""
    error = refusal(direction, **changed)

    assert error.field == (DIRECTIONS[direction][1] if field == "SLOT" else field)
    assert str(error) == f"{error.field}: {error.problem}"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_refused_arguments_fit_otherwise(direction: str) -> None:
    """The arguments that the refusals start from are accepted, so each refusal is due to its change alone."""
    function, slot_name = DIRECTIONS[direction]

    function(**fitting(slot_name))


@pytest.mark.parametrize("table", [[2, 0, 2], torch.tensor([3, 3, 0])], ids=["list", "tensor"])
def test_scatter_refuses_a_block_named_twice(table: Any) -> None:
    """A scatter into one block from two places is refused because its result would depend on the order of writes."""
    error = refusal("scatter", block_table=table)

    assert error.field == "block_table"
    assert "occurs twice" in error.problem


def test_gather_refuses_a_slot_that_overlaps_itself() -> None:
    """A slot whose heads share memory, as after `expand`, is no destination."""
    assert refusal("gather", out=zeros((1, 11, 8)).expand(SHAPE_SLOT)).field == "out"


def test_scatter_refuses_blocks_that_overlap_themselves() -> None:
    """Blocks that share memory, as after `expand`, are no destination."""
    assert refusal("scatter", kv_blocks=zeros((1, 4, 2, 8)).expand(SHAPE_BLOCKS)).field == "kv_blocks"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_blocks_and_slot_must_not_share_memory(direction: str) -> None:
    """A slot view inside the memory of the blocks is refused before anything moves."""
    blocks = torch.randn(SHAPE_BLOCKS).to(torch.bfloat16)

    error = refusal(direction, kv_blocks=blocks, SLOT=blocks.as_strided(SHAPE_SLOT, (8, 16, 1)))

    assert error.field == DIRECTIONS[direction][1]
    assert "address range" in error.problem


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    strides=st.lists(st.integers(0, 40), min_size=4, max_size=4),
)
@settings(deadline=None)
def test_no_overlap_is_claimed_only_where_addresses_differ(shape: list[int], strides: list[int]) -> None:
    """A view said to be free of overlap has as many addresses as elements."""
    view = torch.zeros(1000).as_strided(shape, strides[: len(shape)])
    offsets = {
        sum(stride * index for stride, index in zip(strides, indices, strict=False))
        for indices in itertools.product(*(range(size) for size in shape))
    }

    assert shares_memory_within(view) or len(offsets) == math.prod(shape)


@given(gaps=st.lists(st.integers(0, 9), min_size=4, max_size=4), order=st.permutations(range(4)))
@settings(deadline=None)
def test_nested_views_are_free_of_overlap(gaps: list[int], order: list[int]) -> None:
    """Gaps and permuted dimensions are never taken for overlap."""
    roomy = torch.zeros([size + gap for size, gap in zip((2, 3, 1, 4), gaps, strict=True)])

    assert not shares_memory_within(roomy[:2, :3, :1, :4].permute(order))


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [((0, 4), (4, 8), False), ((4, 8), (0, 4), False), ((0, 5), (4, 8), True), ((2, 3), (0, 8), True)],
)
def test_address_ranges(first: tuple[int, int], second: tuple[int, int], meet: bool) -> None:
    """Ranges meet if they have a byte in common, and not if they only touch."""
    memory = torch.zeros(8)

    assert address_ranges_meet(memory[slice(*first)], memory[slice(*second)]) is meet
