"""Paged caches of a caller, as the paging transform wants them: K and V apart, checked errors, any device."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, ShapeMismatchError
from kvbridge.client.sources import is_tensor
from kvbridge.core.geometry import DimensionOrder

if TYPE_CHECKING:
    import torch

KvBlocks: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""The blocks of K and of V, or one tensor with an axis of two for them."""
BlockTable: TypeAlias = "Sequence[int] | torch.Tensor"
"""Block ids in token order."""

_KV = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """How tokens lie in blocks, and where in the table the stored tokens start."""

    block_table: BlockTable
    """Block ids in token order."""
    block_order: DimensionOrder | str
    """Dimension order inside a block."""
    block_axis: int
    """Which dimension counts the blocks, once K and V are apart."""
    skip_tokens: int
    """Tokens of the table before the first stored one."""

    def gather(self, blocks: torch.Tensor, out: torch.Tensor, *, tokens: int) -> None:
        """Copy `tokens` tokens from `blocks` into `out`, `[heads, tokens, dim]`.

        Raises:
            ArgumentValueError: the arguments do not fit each other.
        """
        from kvbridge.transform.paging import gather_blocks  # noqa: PLC0415 - loads torch

        with _paging_errors():
            staged = out if blocks.device == out.device else out.new_empty(out.shape, device=blocks.device)
            for piece in self._pieces(blocks, tokens):
                gather_blocks(
                    piece.blocks,
                    piece.block_table,
                    staged[:, piece.first :],
                    token_count=piece.tokens,
                    block_order=self.block_order,
                    slot_order=DimensionOrder.HND,
                    block_axis=self.block_axis,
                )
            if staged is not out:
                out.copy_(staged)

    def scatter(self, source: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy `source`, `[heads, tokens, dim]`, into `blocks`.

        Raises:
            ArgumentValueError: the arguments do not fit each other.
        """
        from kvbridge.transform.paging import scatter_blocks  # noqa: PLC0415 - loads torch

        with _paging_errors():
            staged = source.to(blocks.device)
            for piece in self._pieces(blocks, source.shape[1]):
                scatter_blocks(
                    staged[:, piece.first :],
                    piece.blocks,
                    piece.block_table,
                    token_count=piece.tokens,
                    block_order=self.block_order,
                    slot_order=DimensionOrder.HND,
                    block_axis=self.block_axis,
                )

    def _pieces(self, blocks: torch.Tensor, tokens: int) -> Iterator[_Piece]:
        """Yield whole blocks' worth, preceded by the rest of the first block if the stored tokens start inside it."""
        axis = _token_axis(self.block_order, self.block_axis, blocks)
        block_tokens = blocks.shape[axis]
        skipped_blocks, inside = divmod(_checked_skip(self.skip_tokens), max(block_tokens, 1))
        table = self.block_table[skipped_blocks:]
        first = min(block_tokens - inside, tokens) if inside else 0
        if first:
            yield _Piece(blocks=blocks.narrow(axis, inside, first), block_table=table[:1], first=0, tokens=first)
            table = table[1:]
        if tokens > first:
            yield _Piece(blocks=blocks, block_table=table, first=first, tokens=tokens - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A run of tokens that starts at the first row of its first block."""

    blocks: torch.Tensor
    """The blocks, narrowed to the rows in use."""
    block_table: BlockTable
    """The blocks in use."""
    first: int
    """Index of the first token in the slot."""
    tokens: int
    """Number of tokens."""


def separate(kv_blocks: KvBlocks, kv_axis: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of K and of V as views.

    Raises:
        ArgumentTypeError: `kv_blocks` is neither a tensor nor a pair of tensors.
        ArgumentValueError: the axis of K and V is not given, or has another length than two.
    """
    if is_tensor(kv_blocks):
        if kv_axis is None:
            raise ArgumentValueError("kv_axis", "must say which axis of a single tensor holds K and V")
        if kv_axis not in range(kv_blocks.ndim) or kv_blocks.shape[kv_axis] != _KV:
            problem = f"axis {kv_axis} of a tensor of shape {list(kv_blocks.shape)} does not hold K and V"
            raise ShapeMismatchError("kv_axis", problem)
        return kv_blocks.select(kv_axis, 0), kv_blocks.select(kv_axis, 1)
    if isinstance(kv_blocks, tuple | list) and len(kv_blocks) == _KV and all(is_tensor(each) for each in kv_blocks):
        return kv_blocks[0], kv_blocks[1]
    raise ArgumentTypeError("kv_blocks", "must be one tensor with a kv_axis, or a pair of tensors for K and V")


def check_table(block_table: object) -> None:
    """Refuse what is no block table at all; the paging transform checks what it holds.

    Raises:
        ArgumentTypeError: it is neither a sequence nor a one-dimensional tensor.
    """
    if is_tensor(block_table):
        if block_table.ndim != 1:
            raise ShapeMismatchError("block_table", f"must have one dimension, not the shape {list(block_table.shape)}")
    elif isinstance(block_table, str | bytes) or not isinstance(block_table, Sequence):
        raise ArgumentTypeError(
            "block_table", f"must be a sequence of ints or a tensor, got {type(block_table).__name__}"
        )


def _token_axis(block_order: DimensionOrder | str, block_axis: int, blocks: torch.Tensor) -> int:
    """Return which dimension of `blocks` counts the tokens of a block."""
    if blocks.ndim != 4 or block_axis not in range(4):  # noqa: PLR2004 - blocks, tokens, heads, dim
        raise ShapeMismatchError("kv_blocks", f"must have 4 dimensions for K and V each, not {list(blocks.shape)}")
    rest = [axis for axis in range(4) if axis != block_axis]
    return rest[1] if block_order == DimensionOrder.HND else rest[0]


def _checked_skip(skip_tokens: int) -> int:
    try:
        skip = operator.index(skip_tokens)
    except TypeError:
        raise ArgumentTypeError("skip_tokens", f"must be an int, got {type(skip_tokens).__name__}") from None
    if skip < 0:
        raise ArgumentValueError("skip_tokens", f"must not be negative, got {skip}")
    return skip


@contextmanager
def _paging_errors() -> Iterator[None]:
    """Raise the transform's errors as this package's own."""
    from kvbridge.transform.paging import PagingError  # noqa: PLC0415 - loads torch

    try:
        yield
    except PagingError as error:
        raise ArgumentValueError(error.field, error.problem) from error
