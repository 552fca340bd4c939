"""Paged caches: gather blocks straight into a slot, scatter a slot straight into blocks.

Both directions move ONE tensor (K or V of one layer) and never make a second copy of it:

1. Everything is checked before anything is written. This matters more than elsewhere, because
   `torch.index_select(out=...)` answers a wrong shape with a warning and then writes past the view.
2. Both sides are seen token by token, through views: blocks as `[num_blocks, block_size, heads, dim]`, the slot as
   `[capacity, heads, dim]`, whatever order their memory has. Any two orders therefore take the same path.
3. Both are reinterpreted as the widest elements that their strides allow. The kernels behind `index_copy_` move
   element by element, so sixteen bytes at a time instead of two is most of their speed.
4. The full blocks move in one call, the rows of a partly filled last block in a second one.

Caches without a head dimension (MLA latents, `[num_blocks, block_size, dim]`) pass `tensor.unsqueeze(2)` as NHD.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvbridge.core.geometry import TOKENS_MAX, DimensionOrder

BlockTable = Sequence[int] | torch.Tensor
"""Block ids in token order: any sequence of ints, or a one-dimensional int32 or int64 tensor on any device."""

_WIDE_DTYPES = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
_TABLE_DTYPES = (torch.int32, torch.int64)
_BLOCK_DIMENSIONS = 4
_SLOT_DIMENSIONS = 3


class PagingError(ValueError):
    """An argument does not fit the others; nothing was written."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the argument and say what is wrong with it."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def gather_blocks(
    kv_blocks: torch.Tensor,
    block_table: BlockTable,
    out: torch.Tensor,
    *,
    token_count: int,
    block_order: DimensionOrder | str,
    slot_order: DimensionOrder | str,
    block_axis: int = 0,
) -> None:
    """Copy the first `token_count` tokens of a paged tensor into a slot view.

    Token `t` comes from row `t % block_size` of block `block_table[t // block_size]`. Values are copied bit by bit;
    what `out` holds behind `token_count` stays as it is. A block may occur more than once in the table.

    Args:
        kv_blocks: `[num_blocks, block_size, heads, dim]` for NHD or `[num_blocks, heads, block_size, dim]` for HND,
            with any strides (so `cache[:, 0]` and `cache[..., :dim]` do).
        block_table: Block ids in token order. The first `ceil(token_count / block_size)` are used, more are ignored.
            A table on an accelerator is read back to be checked, which waits for that device.
        out: `[capacity, heads, dim]` for NHD or `[heads, capacity, dim]` for HND, with any strides that do not make
            two elements share memory (so strips padded to pages do).
        token_count: Tokens to copy, at least 1 and at most the capacity.
        block_order: Dimension order inside a block.
        slot_order: Dimension order of `out`.
        block_axis: Which dimension of `kv_blocks` counts the blocks; the other three follow `block_order`.

    Raises:
        PagingError: An argument does not fit; its name is in `field`, and `out` is untouched.
    """
    plan = _plan(
        kv_blocks,
        block_table,
        out,
        slot_field="out",
        token_count=token_count,
        block_order=block_order,
        slot_order=slot_order,
        block_axis=block_axis,
    )
    _check_writable(out, field="out")
    with torch.inference_mode():
        plan.gather()


def scatter_blocks(
    source: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_table: BlockTable,
    *,
    token_count: int,
    block_order: DimensionOrder | str,
    slot_order: DimensionOrder | str,
    block_axis: int = 0,
) -> None:
    """Copy the first `token_count` tokens of a slot view into the blocks of a paged tensor.

    Token `t` goes to row `t % block_size` of block `block_table[t // block_size]`. Values are copied bit by bit;
    other blocks, and the rows of the last block behind `token_count`, stay as they are.

    Args:
        source: `[capacity, heads, dim]` for NHD or `[heads, capacity, dim]` for HND, with any strides.
        kv_blocks: `[num_blocks, block_size, heads, dim]` for NHD or `[num_blocks, heads, block_size, dim]` for HND,
            with any strides that do not make two elements share memory.
        block_table: Block ids in token order. The first `ceil(token_count / block_size)` are used and must differ from
            each other; more are ignored. A table on an accelerator is read back, which waits for that device.
        token_count: Tokens to copy, at least 1 and at most the capacity.
        block_order: Dimension order inside a block.
        slot_order: Dimension order of `source`.
        block_axis: Which dimension of `kv_blocks` counts the blocks; the other three follow `block_order`.

    Raises:
        PagingError: An argument does not fit; its name is in `field`, and `kv_blocks` is untouched.
    """
    plan = _plan(
        kv_blocks,
        block_table,
        source,
        slot_field="source",
        token_count=token_count,
        block_order=block_order,
        slot_order=slot_order,
        block_axis=block_axis,
    )
    _check_distinct(plan.block_ids)
    _check_writable(kv_blocks, field="kv_blocks")
    with torch.inference_mode():
        plan.scatter()


def shares_memory_within(tensor: torch.Tensor) -> bool:
    """Return whether two elements of `tensor` may lie at one address, as after `expand`.

    Views whose dimensions do not nest are answered with true although some of them are free of overlap.
    """
    steps = sorted(step for step in zip(tensor.stride(), tensor.shape, strict=True) if step[1] > 1)
    reach = 0
    for stride, size in steps:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def address_ranges_meet(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether the address ranges of two tensors on one device, from first to last element, intersect."""
    first_start, first_end = _address_range(first)
    second_start, second_end = _address_range(second)
    return first_start < second_end and second_start < first_end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A checked copy between blocks and a slot, both seen token by token."""

    blocks: torch.Tensor
    """`[num_blocks, block_size, heads, dim]`, with any strides."""
    slot: torch.Tensor
    """`[capacity, heads, dim]`, with any strides and the dtype and device of `blocks`."""
    block_ids: torch.Tensor
    """int64 `[ceil(token_count / block_size)]` on the CPU, each in `[0, num_blocks)`."""
    token_count: int
    """Tokens to copy, in `[1, capacity]`."""

    def gather(self) -> None:
        """Copy from the blocks into the slot."""
        blocks, slot = _widened(self.blocks, self.slot)
        full, rest = divmod(self.token_count, blocks.shape[1])
        if full:
            torch.index_select(blocks, 0, self._full_block_ids(full), out=_in_blocks(slot, full, blocks))
        if rest:
            slot[self.token_count - rest : self.token_count].copy_(blocks[int(self.block_ids[-1]), :rest])

    def scatter(self) -> None:
        """Copy from the slot into the blocks."""
        blocks, slot = _widened(self.blocks, self.slot)
        full, rest = divmod(self.token_count, blocks.shape[1])
        if full:
            blocks.index_copy_(0, self._full_block_ids(full), _in_blocks(slot, full, blocks))
        if rest:
            blocks[int(self.block_ids[-1]), :rest].copy_(slot[self.token_count - rest : self.token_count])

    def _full_block_ids(self, full: int) -> torch.Tensor:
        return self.block_ids[:full].to(self.blocks.device)


def _plan(
    kv_blocks: torch.Tensor,
    block_table: BlockTable,
    slot: torch.Tensor,
    *,
    slot_field: str,
    token_count: int,
    block_order: DimensionOrder | str,
    slot_order: DimensionOrder | str,
    block_axis: int,
) -> _Plan:
    """Check all that both directions have in common and return the copy to make."""
    _check_kind(kv_blocks, field="kv_blocks", dimensions=_BLOCK_DIMENSIONS)
    _check_kind(slot, field=slot_field, dimensions=_SLOT_DIMENSIONS)
    _check_alike(slot, kv_blocks, field=slot_field)
    blocks = _blocks_by_token(kv_blocks, _order(block_order, field="block_order"), block_axis)
    tokens = slot.transpose(0, 1) if _order(slot_order, field="slot_order") is DimensionOrder.HND else slot
    _check_shapes(tokens, blocks, field=slot_field)
    count = _checked_count(token_count, capacity=tokens.shape[0], slot_field=slot_field)
    block_ids = _checked_ids(block_table, needed=-(-count // blocks.shape[1]), num_blocks=blocks.shape[0])
    if address_ranges_meet(slot, kv_blocks):
        raise PagingError(slot_field, "lies in the address range of kv_blocks")
    return _Plan(blocks=blocks, slot=tokens, block_ids=block_ids, token_count=count)


def _order(order: DimensionOrder | str, *, field: str) -> DimensionOrder:
    try:
        return DimensionOrder(order)
    except ValueError:
        raise PagingError(field, f"must be one of {', '.join(DimensionOrder)}, not {order!r}") from None


def _blocks_by_token(kv_blocks: torch.Tensor, order: DimensionOrder, block_axis: int) -> torch.Tensor:
    if block_axis not in range(_BLOCK_DIMENSIONS):
        raise PagingError("block_axis", f"must be from 0 to {_BLOCK_DIMENSIONS - 1}, not {block_axis!r}")
    blocks = kv_blocks.movedim(block_axis, 0)
    return blocks.transpose(1, 2) if order is DimensionOrder.HND else blocks


def _check_kind(tensor: torch.Tensor, *, field: str, dimensions: int) -> None:
    if tensor.layout != torch.strided or tensor.dtype.is_complex or tensor.is_quantized:
        raise PagingError(field, f"must be a plain strided tensor of real numbers, not {tensor.layout} {tensor.dtype}")
    if tensor.ndim != dimensions:
        raise PagingError(field, f"must have {dimensions} dimensions, not the shape {list(tensor.shape)}")


def _check_alike(slot: torch.Tensor, kv_blocks: torch.Tensor, *, field: str) -> None:
    if slot.dtype != kv_blocks.dtype:
        raise PagingError(field, f"has dtype {slot.dtype}, kv_blocks has {kv_blocks.dtype}")
    if slot.device != kv_blocks.device:
        raise PagingError(field, f"is on {slot.device}, kv_blocks is on {kv_blocks.device}")


def _check_shapes(slot: torch.Tensor, blocks: torch.Tensor, *, field: str) -> None:
    _, block_size, heads, dim = blocks.shape
    if not (block_size and heads and dim):
        raise PagingError("kv_blocks", f"holds nothing: block size {block_size}, {heads} heads of dimension {dim}")
    if slot.shape[1:] != blocks.shape[2:]:
        got_heads, got_dim = slot.shape[1:]
        problem = f"has {got_heads} heads of dimension {got_dim}, kv_blocks has {heads} of dimension {dim}"
        raise PagingError(field, f"{problem} (are both orders right?)")


def _checked_count(token_count: int, *, capacity: int, slot_field: str) -> int:
    try:
        count = operator.index(token_count)
    except TypeError:
        raise PagingError("token_count", f"must be an int, not {token_count!r}") from None
    if not 1 <= count <= TOKENS_MAX:
        raise PagingError("token_count", f"must be from 1 to {TOKENS_MAX}, not {count}")
    if count > capacity:
        raise PagingError("token_count", f"{count} tokens exceed the capacity of {slot_field}, which is {capacity}")
    return count


def _checked_ids(block_table: BlockTable, *, needed: int, num_blocks: int) -> torch.Tensor:
    """Return the first `needed` block ids as int64 on the CPU."""
    table = block_table if isinstance(block_table, torch.Tensor) else _table_tensor(block_table, needed)
    if table.ndim != 1 or table.dtype not in _TABLE_DTYPES:
        problem = f"must be one-dimensional int32 or int64, not {table.dtype} of shape {list(table.shape)}"
        raise PagingError("block_table", problem)
    if len(table) < needed:
        raise PagingError("block_table", f"has {len(table)} blocks, {needed} are needed")
    ids = table[:needed].to(device="cpu", dtype=torch.int64)
    least, greatest = int(ids.min()), int(ids.max())
    if least < 0 or greatest >= num_blocks:
        outlier = least if least < 0 else greatest
        raise PagingError("block_table", f"block id {outlier} is not from 0 to {num_blocks - 1}")
    return ids


def _table_tensor(block_table: Sequence[int], needed: int) -> torch.Tensor:
    # The dtype is left to torch, so that fractions and truth values show up as such instead of being converted.
    if len(block_table) < needed:
        raise PagingError("block_table", f"has {len(block_table)} blocks, {needed} are needed")
    try:
        return torch.tensor(list(block_table[:needed]), device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise PagingError("block_table", f"must hold ints of at most 64 bits ({error})") from None


def _check_distinct(block_ids: torch.Tensor) -> None:
    ordered = block_ids.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise PagingError("block_table", f"block id {int(repeated[0])} occurs twice, so its rows would be undefined")


def _check_writable(tensor: torch.Tensor, *, field: str) -> None:
    if shares_memory_within(tensor):
        shape, strides = list(tensor.shape), list(tensor.stride())
        raise PagingError(field, f"has elements that share memory: shape {shape}, strides {strides}")


def _in_blocks(slot: torch.Tensor, full: int, blocks: torch.Tensor) -> torch.Tensor:
    """View the first `full` blocks' worth of `slot` as `[full, block_size, heads, dim]`."""
    view = slot[: full * blocks.shape[1]].view(full, blocks.shape[1], *slot.shape[1:])
    assert view.shape[1:] == blocks.shape[1:], (view.shape, blocks.shape)
    return view


def _widened(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both as the widest elements that the innermost dimension, strides and addresses of both allow."""
    dtype = next(wide for wide in _WIDE_DTYPES if _can_view(first, wide) and _can_view(second, wide))
    return first.view(dtype), second.view(dtype)


def _can_view(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    if dtype.itemsize <= tensor.itemsize:
        return dtype.itemsize == tensor.itemsize
    if tensor.stride(-1) != 1 or (dtype.is_complex and tensor.device.type == "mps"):  # MPS has no complex128.
        return False
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    offsets = (tensor.data_ptr(), *(step * tensor.itemsize for step in steps))
    return all(offset % dtype.itemsize == 0 for offset in offsets)


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.itemsize
