"""Padded batches: take the sequences out of one, put sequences into one, and say which tokens are real and where.

A cached value at a padded place is garbage that attention will use unless something forbids it, and no framework
raises an error. So sequences travel without padding, cut to their valid length, and whoever batches them again hands
the model a mask and positions made from the same lengths.

Positions travel too. With padding on the left, keys may have been rotated either at positions that count from the first
real token, or at positions that count from the first column; which one is the producer's choice and cannot be read from
the tensors. Hence `position_ids` asks for the first position of every sequence.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import StrEnum, unique

import torch

from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.transform.paging import address_ranges_meet, shares_memory_within

PADDING_POSITION = 1
"""The position that `position_ids` gives to padding.

It is what transformers fills in where the mask is 0, so with first positions of 0 the result is the one that
`attention_mask.cumsum(-1) - 1` leads to there. It does no harm because nothing attends to padding, and because it lies
inside every table of position embeddings, unlike the -1 that the sum alone leaves on the left.
"""

Counts = Sequence[int] | torch.Tensor
"""One whole number per sequence: any sequence of ints, or a one-dimensional integer tensor on any device."""

_BATCH_DIMENSIONS = 4
_SEQUENCE_DIMENSIONS = 3


@unique
class PaddingSide(StrEnum):
    """Where the padding of a batch lies; the value is the name that tokenizers use."""

    LEFT = "left"
    """Before the real tokens, so that all sequences end in the last column."""
    RIGHT = "right"
    """Behind the real tokens, so that all sequences start in the first column."""


class PaddingError(ValueError):
    """An argument does not fit the others; nothing was written."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the argument and say what is wrong with it."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def split_batch(
    batch: torch.Tensor, *, valid_lengths: Counts, padding_side: PaddingSide | str
) -> tuple[torch.Tensor, ...]:
    """Return the real tokens of every sequence of a padded batch, as views into it.

    Args:
        batch: `[batch, heads, tokens, head_dim]`, K or V of one layer.
        valid_lengths: Real tokens of each sequence, from 1 to `tokens`.
        padding_side: Where the padding of the batch lies.

    Returns:
        One view `[heads, valid_length, head_dim]` per sequence; no value is copied.

    Raises:
        PaddingError: An argument does not fit; its name is in `field`.
    """
    side = _side(padding_side)
    if batch.ndim != _BATCH_DIMENSIONS:
        raise PaddingError("batch", f"must be [batch, heads, tokens, head_dim], not {list(batch.shape)}")
    tokens = batch.shape[2]
    lengths = _lengths(valid_lengths, count=batch.shape[0], length_max=tokens)
    return tuple(batch[index, :, _columns(length, tokens, side)] for index, length in enumerate(lengths))


def collate(
    sequences: Sequence[torch.Tensor], *, padding_side: PaddingSide | str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy sequences of different lengths into one batch, with zeros where they are shorter than the longest.

    Args:
        sequences: At least one `[heads, length, head_dim]`; all of the same heads, head dimension, dtype and device.
        padding_side: Where the padding goes.
        out: Where to write, `[batch, heads, longest, head_dim]` of the sequences' dtype and device; its memory must not
            be that of a sequence. A new tensor by default.

    Returns:
        The batch `[batch, heads, longest, head_dim]`; `out` if that was given. Gradients do not flow through it.

    Raises:
        PaddingError: An argument does not fit; its name is in `field`, and `out` is untouched.
    """
    side = _side(padding_side)
    longest = _checked_longest(sequences)
    heads, _, head_dim = sequences[0].shape
    shape = (len(sequences), heads, longest, head_dim)
    if out is not None:
        _check_out(out, shape, sequences)
    batch = sequences[0].new_empty(shape) if out is None else out
    with torch.inference_mode():
        for row, sequence in zip(batch, sequences, strict=True):
            _fill(row, sequence, side)
    return batch


def attention_mask(
    valid_lengths: Counts, padding_side: PaddingSide | str, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return the int64 mask `[batch, longest]` of a padded batch: 1 for a real token, 0 for padding.

    Args:
        valid_lengths: Real tokens of each sequence, at least 1; at least one sequence.
        padding_side: Where the padding lies.
        device: Where to build the mask; torch's default device if None.

    Raises:
        PaddingError: An argument does not fit; its name is in `field`.
    """
    side = _side(padding_side)
    offsets = _offsets(_lengths(valid_lengths), side, device)
    return offsets.ge(0).to(torch.int64)


def position_ids(
    valid_lengths: Counts,
    first_positions: Counts,
    padding_side: PaddingSide | str,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the int64 positions `[batch, longest]` of a padded batch.

    The real tokens of sequence `i` get `first_positions[i]`, `first_positions[i] + 1` and so on; padding gets
    `PADDING_POSITION`.

    Args:
        valid_lengths: Real tokens of each sequence, at least 1; at least one sequence.
        first_positions: The position of the first real token of each sequence, at least 0.
        padding_side: Where the padding lies.
        device: Where to build the positions; torch's default device if None.

    Raises:
        PaddingError: An argument does not fit; its name is in `field`.
    """
    side = _side(padding_side)
    lengths = _lengths(valid_lengths)
    firsts = _counts(first_positions, field="first_positions", count=len(lengths), least=0, greatest=TOKENS_MAX)
    offsets = _offsets(lengths, side, device)
    positions = offsets + torch.tensor(firsts, dtype=torch.int64, device=device).unsqueeze(1)
    return positions.masked_fill(offsets.lt(0), PADDING_POSITION)


def _side(padding_side: PaddingSide | str) -> PaddingSide:
    try:
        return PaddingSide(padding_side)
    except ValueError:
        raise PaddingError("padding_side", f"must be one of {', '.join(PaddingSide)}, not {padding_side!r}") from None


def _columns(length: int, tokens: int, side: PaddingSide) -> slice:
    """Return which of `tokens` columns hold the real tokens."""
    return slice(tokens - length, tokens) if side is PaddingSide.LEFT else slice(0, length)


def _offsets(lengths: list[int], side: PaddingSide, device: torch.device | str | None) -> torch.Tensor:
    """Return `[batch, longest]`: how many real tokens come before each real token, and -1 for padding."""
    longest = max(lengths)
    columns = torch.arange(longest, dtype=torch.int64, device=device)
    counts = torch.tensor(lengths, dtype=torch.int64, device=device).unsqueeze(1)
    offsets = columns - (longest - counts) if side is PaddingSide.LEFT else columns.expand(len(lengths), longest)
    return offsets.masked_fill(offsets.lt(0) | offsets.ge(counts), -1)


def _fill(row: torch.Tensor, sequence: torch.Tensor, side: PaddingSide) -> None:
    """Write one sequence and its padding; each element of `row` is written once."""
    length, tokens = sequence.shape[1], row.shape[1]
    row[:, _columns(length, tokens, side)].copy_(sequence)
    other = PaddingSide.RIGHT if side is PaddingSide.LEFT else PaddingSide.LEFT
    row[:, _columns(tokens - length, tokens, other)].zero_()


def _lengths(valid_lengths: Counts, *, count: int | None = None, length_max: int = TOKENS_MAX) -> list[int]:
    return _counts(valid_lengths, field="valid_lengths", count=count, least=1, greatest=length_max)


def _counts(values: Counts, *, field: str, count: int | None, least: int, greatest: int) -> list[int]:
    """Return checked whole numbers; `count` of them, or any number but none if that is None."""
    numbers = _whole_numbers(values, field=field)
    if count is not None and len(numbers) != count:
        raise PaddingError(field, f"has {len(numbers)} values for {count} sequences")
    if not numbers:
        raise PaddingError(field, "is empty")
    for index, number in enumerate(numbers):
        if not least <= number <= greatest:
            raise PaddingError(field, f"must be from {least} to {greatest}, not {number} (sequence {index})")
    return numbers


def _whole_numbers(values: Counts, *, field: str) -> list[int]:
    listed = values.tolist() if isinstance(values, torch.Tensor) else values
    try:
        return [operator.index(value) for value in listed]
    except TypeError:
        raise PaddingError(field, "must hold one int per sequence") from None


def _checked_longest(sequences: Sequence[torch.Tensor]) -> int:
    """Check that the sequences fit each other and return the length of the longest."""
    if not sequences:
        raise PaddingError("sequences", "is empty")
    first = sequences[0]
    for index, sequence in enumerate(sequences):
        if sequence.ndim != _SEQUENCE_DIMENSIONS or not 1 <= sequence.shape[1] <= TOKENS_MAX:
            shape = list(sequence.shape)
            raise PaddingError("sequences", f"must be [heads, length, head_dim] with tokens, not {shape} ({index})")
        if _kind(sequence) != _kind(first):
            raise PaddingError("sequences", f"differ: {_kind(sequence)} ({index}) and {_kind(first)} (0)")
    return max(sequence.shape[1] for sequence in sequences)


def _kind(sequence: torch.Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """Return all that sequences of one batch have in common."""
    return sequence.shape[0], sequence.shape[2], sequence.dtype, sequence.device


def _check_out(out: torch.Tensor, shape: tuple[int, ...], sequences: Sequence[torch.Tensor]) -> None:
    if out.shape != shape:
        raise PaddingError("out", f"must have the shape {list(shape)}, not {list(out.shape)}")
    if (out.dtype, out.device) != (sequences[0].dtype, sequences[0].device):
        problem = f"is {out.dtype} on {out.device}, the sequences are {sequences[0].dtype} on {sequences[0].device}"
        raise PaddingError("out", problem)
    if shares_memory_within(out):
        raise PaddingError("out", f"has elements that share memory: shape {list(shape)}, strides {list(out.stride())}")
    for index, sequence in enumerate(sequences):
        if address_ranges_meet(out, sequence):
            raise PaddingError("out", f"lies in the address range of sequence {index}")
