"""Splitting and collating padded batches, masks and positions, against loops over single tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.transform.padding import (
    PADDING_POSITION,
    PaddingError,
    PaddingSide,
    attention_mask,
    collate,
    position_ids,
    split_batch,
)

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CANARY = 7

sides = st.sampled_from(PaddingSide)
length_lists = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@st.composite
def sequence_lists(draw: st.DrawFn) -> list[torch.Tensor]:
    """Draw sequences that fit each other, some of them strided."""
    dtype, device = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DEVICES))
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    sequences = []
    for length in draw(length_lists):
        roomy = torch.randn(heads, length + draw(st.integers(0, 2)), dim, generator=generator)
        sequences.append(roomy.to(device=device, dtype=dtype)[:, :length])
    return sequences


def collated_by_loop(sequences: list[torch.Tensor], side: PaddingSide) -> torch.Tensor:
    """Return the batch, token by token into zeros: the naive model."""
    heads, _, dim = sequences[0].shape
    longest = max(sequence.shape[1] for sequence in sequences)
    batch = torch.zeros(len(sequences), heads, longest, dim, dtype=sequences[0].dtype, device=sequences[0].device)
    for index, sequence in enumerate(sequences):
        length = sequence.shape[1]
        for token in range(length):
            column = token if side is PaddingSide.RIGHT else longest - length + token
            batch[index, :, column] = sequence[:, token]
    return batch


def framed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a frame full of canaries and a strided view of `shape` inside it, two elements from each edge."""
    frame = torch.full([size + 4 for size in shape], CANARY, dtype=dtype, device=device)
    return frame, frame[tuple(slice(2, size + 2) for size in shape)]


@given(sequences=sequence_lists(), side=sides)
@settings(deadline=None)
def test_collate_equals_the_loop_over_tokens(sequences: list[torch.Tensor], side: PaddingSide) -> None:
    """Every token lands in its column, and all other columns are zero."""
    batch = collate(sequences, padding_side=side)

    assert batch.dtype == sequences[0].dtype
    assert batch.device == sequences[0].device
    assert torch.equal(batch, collated_by_loop(sequences, side))


@given(sequences=sequence_lists(), side=sides)
@settings(deadline=None)
def test_collate_writes_nothing_outside_out(sequences: list[torch.Tensor], side: PaddingSide) -> None:
    """A batch written into a view fills all of the view, zeros included, and nothing around it."""
    expected = collated_by_loop(sequences, side)
    frame, out = framed(tuple(expected.shape), expected.dtype, expected.device)

    returned = collate(sequences, padding_side=side, out=out)

    assert returned is out
    assert torch.equal(out, expected)
    out.fill_(CANARY)
    assert frame.eq(CANARY).all()


@given(sequences=sequence_lists(), side=sides)
@settings(deadline=None)
def test_split_undoes_collate(sequences: list[torch.Tensor], side: PaddingSide) -> None:
    """What was collated comes apart again into equal sequences, as views into the batch."""
    batch = collate(sequences, padding_side=side)

    parts = split_batch(batch, valid_lengths=[sequence.shape[1] for sequence in sequences], padding_side=side)

    assert all(torch.equal(part, sequence) for part, sequence in zip(parts, sequences, strict=True))
    assert {part.untyped_storage().data_ptr() for part in parts} == {batch.untyped_storage().data_ptr()}


@given(lengths=length_lists, side=sides, surplus=st.integers(0, 3))
@settings(deadline=None)
def test_split_never_returns_padding(lengths: list[int], side: PaddingSide, surplus: int) -> None:
    """Garbage in padded columns, also where the batch is longer than its longest sequence, is in no part."""
    tokens = max(lengths) + surplus
    batch = torch.full((len(lengths), 2, tokens, 3), torch.nan)
    for row, length in zip(batch, lengths, strict=True):
        row[:, tokens - length if side is PaddingSide.LEFT else 0 :][:, :length] = 1.0

    parts = split_batch(batch, valid_lengths=lengths, padding_side=side)

    assert [part.shape for part in parts] == [(2, length, 3) for length in lengths]
    assert all(part.eq(1.0).all() for part in parts)


@given(lengths=length_lists, side=sides, device=st.sampled_from(DEVICES))
@settings(deadline=None)
def test_mask_marks_the_columns_that_collate_fills(lengths: list[int], side: PaddingSide, device: str) -> None:
    """The mask is 1 exactly where collating sequences of ones leaves a one."""
    ones = collate([torch.ones(1, length, 1, device=device) for length in lengths], padding_side=side)

    mask = attention_mask(lengths, side, device=device)

    assert mask.dtype == torch.int64
    assert torch.equal(mask, ones[:, 0, :, 0].to(torch.int64))


@given(lengths=length_lists, side=sides, device=st.sampled_from(DEVICES), data=st.data())
@settings(deadline=None)
def test_positions_count_from_the_first(
    lengths: list[int], side: PaddingSide, device: str, data: st.DataObject
) -> None:
    """Real tokens carry consecutive positions from their sequence's first, padding the one harmless position."""
    positions = st.integers(0, TOKENS_MAX)
    firsts = data.draw(st.lists(positions, min_size=len(lengths), max_size=len(lengths)))

    ids = position_ids(lengths, firsts, side, device=device)

    real = attention_mask(lengths, side, device=device).bool()
    assert ids.dtype == torch.int64
    for row, where, first, length in zip(ids, real, firsts, lengths, strict=True):
        assert row[where].tolist() == list(range(first, first + length))
        assert row[~where].eq(PADDING_POSITION).all()


@given(lengths=length_lists, side=sides)
@settings(deadline=None)
def test_positions_from_zero_follow_from_the_mask(lengths: list[int], side: PaddingSide) -> None:
    """With first positions of 0 the positions are the mask's running sum less one, with 1 where it is masked."""
    mask = attention_mask(lengths, side)

    ids = position_ids(lengths, [0] * len(lengths), side)

    assert torch.equal(ids, (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1))


def test_left_padding_by_hand() -> None:
    """A small batch with padding on the left, written out."""
    assert attention_mask([1, 3], "left").tolist() == [[0, 0, 1], [1, 1, 1]]
    assert position_ids([1, 3], [9, 4], "left").tolist() == [[1, 1, 9], [4, 5, 6]]


def test_right_padding_by_hand() -> None:
    """A small batch with padding on the right, written out."""
    assert attention_mask([1, 3], "right").tolist() == [[1, 0, 0], [1, 1, 1]]
    assert position_ids([1, 3], [9, 4], "right").tolist() == [[9, 1, 1], [4, 5, 6]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_counts_may_be_tensors(dtype: torch.dtype) -> None:
    """Lengths and first positions as tensors do what lists of the same numbers do."""
    lengths, firsts = torch.tensor([2, 3], dtype=dtype), torch.tensor([5, 0], dtype=dtype)
    batch = torch.randn(2, 1, 3, 4)

    parts = split_batch(batch, valid_lengths=lengths, padding_side="left")

    assert torch.equal(parts[0], batch[0, :, 1:])
    assert torch.equal(attention_mask(lengths, "left"), attention_mask([2, 3], "left"))
    assert torch.equal(position_ids(lengths, firsts, "left"), position_ids([2, 3], [5, 0], "left"))


def test_collate_works_in_and_out_of_inference_mode() -> None:
    """Sequences of an inference run, an `out` of one and sequences that require gradients can all be collated."""
    sequence = torch.randn(1, 2, 3, requires_grad=True)
    with torch.inference_mode():
        out = torch.empty(1, 1, 2, 3)
        inside = collate([sequence], padding_side="left")

    outside = collate([sequence], padding_side="left")
    collate([inside[0]], padding_side="left", out=out)

    assert torch.equal(outside, out)
    assert not outside.requires_grad
    assert not outside.is_inference()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"batch": torch.zeros(2, 3, 4)}, "batch"),
        ({"batch": torch.zeros(0, 1, 3, 4), "valid_lengths": []}, "valid_lengths"),
        ({"valid_lengths": [2]}, "valid_lengths"),
        ({"valid_lengths": [2, 3, 1]}, "valid_lengths"),
        ({"valid_lengths": [0, 3]}, "valid_lengths"),
        ({"valid_lengths": [2, -1]}, "valid_lengths"),
        ({"valid_lengths": [2, 4]}, "valid_lengths"),
        ({"valid_lengths": [2.0, 3.0]}, "valid_lengths"),
        ({"valid_lengths": torch.tensor([2.0, 3.0])}, "valid_lengths"),
        ({"valid_lengths": torch.tensor([[2, 3]])}, "valid_lengths"),
        ({"valid_lengths": torch.tensor(2)}, "valid_lengths"),
        ({"padding_side": "middle"}, "padding_side"),
    ],
)
def test_split_refuses_what_does_not_fit(changed: dict[str, Any], field: str) -> None:
    """A shape, length, count or side that does not fit is refused by name."""
    fitting: dict[str, Any] = {"batch": torch.zeros(2, 1, 3, 4), "valid_lengths": [2, 3], "padding_side": "right"}

    with pytest.raises(PaddingError) as refusal:
        split_batch(**fitting | changed)

    assert refusal.value.field == field
    assert str(refusal.value) == f"{field}: {refusal.value.problem}"


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"sequences": []}, "sequences"),
        ({"sequences": [torch.ones(3, 4)]}, "sequences"),
        ({"sequences": [torch.ones(1, 0, 4)]}, "sequences"),
        ({"sequences": [torch.ones(1, 2, 4), torch.ones(2, 3, 4)]}, "sequences"),
        ({"sequences": [torch.ones(1, 2, 4), torch.ones(1, 3, 5)]}, "sequences"),
        ({"sequences": [torch.ones(1, 2, 4), torch.ones(1, 3, 4, dtype=torch.float16)]}, "sequences"),
        ({"sequences": [torch.ones(1, 2, 4), torch.ones(1, 3, 4, device="meta")]}, "sequences"),
        ({"sequences": [torch.ones(1, 2, 4), torch.ones(1, 4, 4)]}, "out"),
        ({"sequences": [torch.ones(1, 3, 4)]}, "out"),
        ({"sequences": [torch.ones(1, 2, 4).half(), torch.ones(1, 3, 4).half()]}, "out"),
        ({"padding_side": "top"}, "padding_side"),
    ],
)
def test_collate_refuses_what_does_not_fit(changed: dict[str, Any], field: str) -> None:
    """Sequences, sides and destinations that do not fit are refused by name, and nothing is written."""
    frame, out = framed((2, 1, 3, 4), torch.float32, torch.device("cpu"))
    arguments = {"sequences": [torch.ones(1, 2, 4), torch.ones(1, 3, 4)], "padding_side": "left", "out": out} | changed

    with pytest.raises(PaddingError) as refusal:
        collate(**arguments)

    assert refusal.value.field == field
    assert frame.eq(CANARY).all()


def test_collate_refuses_an_out_on_another_device() -> None:
    """An `out` that is not where the sequences are is refused."""
    with pytest.raises(PaddingError) as refusal:
        collate([torch.ones(1, 3, 4)], padding_side="left", out=torch.zeros(1, 1, 3, 4, device="meta"))

    assert refusal.value.field == "out"


def test_collate_refuses_an_out_that_overlaps_itself() -> None:
    """An `out` whose rows share memory, as after `expand`, is refused and left alone."""
    row = torch.zeros(1, 1, 3, 4)

    with pytest.raises(PaddingError, match="share memory") as refusal:
        collate([torch.ones(1, 3, 4), torch.ones(1, 3, 4)], padding_side="left", out=row.expand(2, 1, 3, 4))

    assert refusal.value.field == "out"
    assert not row.any()


def test_collate_refuses_to_write_over_its_sequences() -> None:
    """An `out` in which a sequence lies is refused, since padding would be written over what is still to be read."""
    batch = torch.randn(2, 1, 3, 4)
    before = batch.clone()
    parts = split_batch(batch, valid_lengths=[2, 3], padding_side="right")

    with pytest.raises(PaddingError, match="sequence 0") as refusal:
        collate(parts, padding_side="left", out=batch)

    assert refusal.value.field == "out"
    assert torch.equal(batch, before)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"valid_lengths": []}, "valid_lengths"),
        ({"valid_lengths": [0, 3]}, "valid_lengths"),
        ({"valid_lengths": [TOKENS_MAX + 1, 3]}, "valid_lengths"),
        ({"first_positions": []}, "first_positions"),
        ({"first_positions": [0]}, "first_positions"),
        ({"first_positions": [0, -1]}, "first_positions"),
        ({"first_positions": [0, TOKENS_MAX + 1]}, "first_positions"),
        ({"first_positions": [0, 1.5]}, "first_positions"),
        ({"first_positions": None}, "first_positions"),
        ({"padding_side": "LEFT"}, "padding_side"),
    ],
)
def test_positions_refuse_what_does_not_fit(changed: dict[str, Any], field: str) -> None:
    """Lengths, first positions and sides out of range are refused by name."""
    arguments = {"valid_lengths": [2, 3], "first_positions": [0, 7], "padding_side": "left"} | changed

    with pytest.raises(PaddingError) as refusal:
        position_ids(**arguments)

    assert refusal.value.field == field
