"""Paged caches into and out of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, ShapeMismatchError
from kvbridge.client.paged import Paging, check_table, separate
from kvbridge.core.geometry import DimensionOrder

HEADS, DIM = 2, 4


def _paging(**changes: Any) -> Paging:
    fields: dict[str, Any] = {"block_table": [0], "block_order": "NHD", "block_axis": 0, "skip_tokens": 0}
    return Paging(**{**fields, **changes})


def _blocks(tokens: torch.Tensor, block_size: int, order: str) -> tuple[torch.Tensor, list[int]]:
    """Spread `[heads, tokens, dim]` over shuffled blocks."""
    count = -(-tokens.shape[1] // block_size)
    table = torch.randperm(count + 2)[:count]
    blocks = torch.full((count + 2, block_size, HEADS, DIM), float("nan"))
    padded = torch.zeros(HEADS, count * block_size, DIM)
    padded[:, : tokens.shape[1]] = tokens
    blocks[table] = padded.transpose(0, 1).reshape(count, block_size, HEADS, DIM)
    return (blocks.transpose(1, 2).contiguous() if order == "HND" else blocks), table.tolist()


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9), st.sampled_from(DimensionOrder))
def test_gathering_takes_the_tokens_behind_those_skipped(
    total: int, skip: int, block_size: int, order: DimensionOrder
) -> None:
    """Wherever the stored tokens start, inside a block or at its edge, exactly they arrive."""
    skip = min(skip, total - 1)
    tokens = torch.randn(HEADS, total, DIM)
    blocks, table = _blocks(tokens, block_size, order)
    out = torch.zeros(HEADS, total - skip, DIM)
    _paging(block_table=table, block_order=order, skip_tokens=skip).gather(blocks, out, tokens=total - skip)
    assert torch.equal(out, tokens[:, skip:])


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 9), st.sampled_from(DimensionOrder))
def test_scattering_is_the_inverse_of_gathering(total: int, skip: int, block_size: int, order: DimensionOrder) -> None:
    """What was scattered is gathered again, and nothing else was touched."""
    skip = min(skip, total - 1)
    blocks, table = _blocks(torch.zeros(HEADS, total, DIM), block_size, order)
    source, before = torch.randn(HEADS, total - skip, DIM), blocks.clone()
    paging = _paging(block_table=table, block_order=order, skip_tokens=skip)
    paging.scatter(source, blocks)
    out = torch.zeros_like(source)
    paging.gather(blocks, out, tokens=total - skip)
    assert torch.equal(out, source)
    changed = (blocks != before) & ~(blocks.isnan() & before.isnan())
    assert int(changed.sum()) <= source.numel()


@pytest.mark.parametrize("axis", [0, 1])
def test_one_tensor_is_separated_along_its_axis(axis: int) -> None:
    """Both common forms, K and V first or blocks first, give views of the same memory."""
    both = torch.arange(2.0 * 3 * 4 * HEADS * DIM).reshape(
        (2, 3, 4, HEADS, DIM) if axis == 0 else (3, 2, 4, HEADS, DIM)
    )
    k, v = separate(both, axis)
    assert torch.equal(k, both.select(axis, 0))
    assert torch.equal(v, both.select(axis, 1))
    assert k.data_ptr() == both.data_ptr()


def test_a_single_tensor_needs_its_axis() -> None:
    """Two blocks look like K and V, so nothing is guessed."""
    both = torch.zeros(2, 2, 4, HEADS, DIM)
    with pytest.raises(ArgumentValueError, match="kv_axis"):
        separate(both, None)
    with pytest.raises(ShapeMismatchError, match="kv_axis"):
        separate(both, 2)


@pytest.mark.parametrize("blocks", [None, (torch.zeros(1),), [torch.zeros(1), None], "kv"])
def test_what_is_no_pair_of_blocks_is_refused(blocks: Any) -> None:
    """K without V is a mistake."""
    with pytest.raises(ArgumentTypeError, match="kv_blocks"):
        separate(blocks, None)


@pytest.mark.parametrize("table", [None, "01", 3, {0, 1}])
def test_what_is_no_block_table_is_refused(table: Any) -> None:
    """Block ids come in order."""
    with pytest.raises(ArgumentTypeError, match="block_table"):
        check_table(table)
    with pytest.raises(ShapeMismatchError):
        check_table(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"block_table": []}, "block_table"),
        ({"block_table": [7]}, "block_table"),
        ({"block_order": "DHN"}, "block_order"),
        ({"block_axis": 4}, "kv_blocks"),
        ({"skip_tokens": -1}, "skip_tokens"),
        ({"skip_tokens": 3}, "block_table"),
    ],
)
def test_a_mistake_is_named(changes: dict[str, Any], field: str) -> None:
    """The transform's refusals come as this package's errors."""
    with pytest.raises(ArgumentValueError) as caught:
        _paging(**changes).gather(torch.zeros(2, 4, HEADS, DIM), torch.zeros(HEADS, 4, DIM), tokens=4)
    assert caught.value.field == field


def test_a_fraction_of_a_token_cannot_be_skipped() -> None:
    """Counts are whole numbers."""
    with pytest.raises(ArgumentTypeError, match="skip_tokens"):
        _paging(skip_tokens=0.5).gather(torch.zeros(2, 4, HEADS, DIM), torch.zeros(HEADS, 4, DIM), tokens=4)
