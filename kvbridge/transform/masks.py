"""Attention masks for plans of several parts, in the forms that attention implementations take.

All forms come from one rule, `AttentionLayout.sees`, written once more over tensors of positions (`_mask_mod`):

1. Every slot of the axis of keys gets its token's position, and padding gets -1.
2. A query sees a key if the key is real and its position is not greater than the query's, nor outside the window.
3. A query that is padding itself sees its own slot and nothing else. The rule says that it sees nothing, but a row
   without any key is NaN in some implementations and the mean of all keys in others. Nobody reads what it computes.

The queries are either the consumer's new tokens, given by their number, or any slots in a row, such as those of a text
part that is prefilled in between. The axis of keys runs from slot 0 to the last query unless `keys` says otherwise:
layers with a sliding window have forgotten the first slots. Several layouts make a batch. The shorter ones are padded
behind their parts, so that new tokens have the same slots in all rows, as they have in a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum, unique
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvbridge.core.attention import AttentionLayout, check_slots, check_window
from kvbridge.core.errors import InvalidFieldError
from kvbridge.transform.padding import PADDING_POSITION

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MASK_VALUES_MAX = 1 << 32
"""Most pairs of query and key in one mask. Longer texts are to be prefilled in several ranges of queries."""

Layouts: TypeAlias = AttentionLayout | Sequence[AttentionLayout]
"""One layout, or one for each row of a batch."""
Queries: TypeAlias = int | range
"""How many new tokens stand behind the longest layout, or which slots ask."""
MaskMod: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Tells of batch row, head, query and key, each an index tensor, whether the query sees the key."""

_PADDING = -1


@unique
class MaskForm(StrEnum):
    """What a mask looks like; the value is the attention implementation of transformers that takes it."""

    EAGER = "eager"
    """Floats that are added to the scores."""
    SDPA = "sdpa"
    """Booleans, True where a query may attend."""
    FLEX = "flex_attention"
    """A `BlockMask`."""


class MaskError(ValueError):
    """An argument does not fit the others; no mask was built."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the argument and say what is wrong with it."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


def build_mask(
    form: MaskForm,
    layouts: Layouts,
    queries: Queries,
    *,
    window_tokens: int | None = None,
    keys: range | None = None,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> torch.Tensor | BlockMask:
    """Return the mask in one of its forms; arguments and errors are those of the functions below."""
    if form is MaskForm.EAGER:
        return eager_mask(layouts, queries, window_tokens=window_tokens, keys=keys, dtype=dtype, device=device)
    build = sdpa_mask if form is MaskForm.SDPA else flex_mask
    return build(layouts, queries, window_tokens=window_tokens, keys=keys, device=device)


def sdpa_mask(
    layouts: Layouts,
    queries: Queries,
    *,
    window_tokens: int | None = None,
    keys: range | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the boolean mask `[batch, 1, queries, keys]`, True where a query may attend.

    Args:
        layouts: One layout, or one for each row.
        queries: How many new tokens stand behind the longest layout, or which slots ask.
        window_tokens: Tokens that a query sees, itself included; None for full attention.
        keys: Slots of the axis of keys, which hold those of the queries; all up to the last query by default.
        device: Where to build the mask; the CPU by default.

    Raises:
        MaskError: An argument does not fit; its name is in `field`.
    """
    shape, mod = _prepared(layouts, queries, window_tokens, keys, device)
    batch, query_count, key_count = shape
    return mod(
        torch.arange(batch, device=device).view(-1, 1, 1, 1),
        torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device),
        torch.arange(query_count, device=device).view(1, 1, -1, 1),
        torch.arange(key_count, device=device).view(1, 1, 1, -1),
    )


def eager_mask(
    layouts: Layouts,
    queries: Queries,
    *,
    dtype: torch.dtype,
    window_tokens: int | None = None,
    keys: range | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the mask `[batch, 1, queries, keys]` to add to the scores: 0 where a query may attend, else the minimum.

    Args:
        layouts: As for `sdpa_mask`.
        queries: As for `sdpa_mask`.
        dtype: The dtype that the model computes in, and whose least finite value hides a key.
        window_tokens: As for `sdpa_mask`.
        keys: As for `sdpa_mask`.
        device: As for `sdpa_mask`.

    Raises:
        MaskError: An argument does not fit; its name is in `field`.
    """
    if not dtype.is_floating_point:
        raise MaskError("dtype", f"must be one that scores can have, not {dtype}")
    allowed = sdpa_mask(layouts, queries, window_tokens=window_tokens, keys=keys, device=device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(allowed.logical_not_(), torch.finfo(dtype).min)


def flex_mask(
    layouts: Layouts,
    queries: Queries,
    *,
    window_tokens: int | None = None,
    keys: range | None = None,
    device: torch.device | str | None = None,
) -> BlockMask:
    """Return the mask as a `BlockMask` of shape `(batch, 1, queries, keys)`; nothing is compiled for it.

    Arguments and errors are those of `sdpa_mask`.
    """
    # It imports the compiler, which takes seconds and is of use to this form alone.
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    (batch, query_count, key_count), mod = _prepared(layouts, queries, window_tokens, keys, device)
    # Left to torch, None means an accelerator if there is one: not where the positions are.
    where = str(torch.device("cpu") if device is None else torch.device(device))
    return create_block_mask(mod, B=batch, H=None, Q_LEN=query_count, KV_LEN=key_count, device=where)


def query_positions(layouts: Layouts, queries: Queries, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the int64 positions `[batch, queries]` to give to the model; padding gets `PADDING_POSITION`.

    Args:
        layouts: As for `sdpa_mask`.
        queries: As for `sdpa_mask`.
        device: As for `sdpa_mask`.

    Raises:
        MaskError: An argument does not fit; its name is in `field`.
    """
    rows = padded_alike(layouts)
    slots = query_slots(rows, queries)
    positions = _slot_positions(rows, slots.stop, device)[:, slots.start :]
    return positions.masked_fill(positions.eq(_PADDING), PADDING_POSITION)


def padded_alike(layouts: Layouts) -> tuple[AttentionLayout, ...]:
    """Return one layout for each row, the shorter ones padded behind their parts to the longest.

    Raises:
        MaskError: there is no layout.
    """
    rows = (layouts,) if isinstance(layouts, AttentionLayout) else tuple(layouts)
    if not rows:
        raise MaskError("layouts", "is empty")
    longest = max(row.key_length for row in rows)
    return tuple(row.padded_to(longest) for row in rows)


def query_slots(rows: Sequence[AttentionLayout], queries: Queries) -> range:
    """Return which slots of `padded_alike` layouts ask.

    Raises:
        MaskError: `queries` names no slot, or one beyond the longest axis.
    """
    start = rows[0].key_length
    slots = queries if isinstance(queries, range) else range(start, start + queries)
    _checked(check_slots, "queries", slots)
    return slots


def _prepared(
    layouts: Layouts,
    queries: Queries,
    window_tokens: int | None,
    keys: range | None,
    device: torch.device | str | None,
) -> tuple[tuple[int, int, int], MaskMod]:
    """Check all arguments and return the numbers of rows, queries and keys, and the rule."""
    _checked(check_window, window_tokens)
    rows = padded_alike(layouts)
    asking = query_slots(rows, queries)
    shown = range(asking.stop) if keys is None else keys
    _checked(check_slots, "keys", shown)
    if not (shown.start <= asking.start and asking.stop <= shown.stop):
        raise MaskError("keys", f"must hold the slots of the queries, {asking}, got {shown}")
    shape = (len(rows), len(asking), len(shown))
    if shape[0] * shape[1] * shape[2] > MASK_VALUES_MAX:
        raise MaskError("queries", f"a mask of {list(shape)} is larger than {MASK_VALUES_MAX} values")
    return shape, _mask_mod(_slot_positions(rows, shown.stop, device), asking.start, shown.start, window_tokens)


def _mask_mod(positions: torch.Tensor, first_query: int, first_key: int, window_tokens: int | None) -> MaskMod:
    """Return the rule over `positions` `[batch, slots]`, for queries and keys that count from their first slots."""

    def mask_mod(batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seeing = positions[batch, query + first_query]
        seen = positions[batch, key + first_key]
        shown = (seen >= 0) & (seen <= seeing)
        if window_tokens is not None:
            shown = shown & (seen > seeing - window_tokens)
        return shown | (query + first_query == key + first_key)

    return mask_mod


def _slot_positions(rows: Sequence[AttentionLayout], slots: int, device: torch.device | str | None) -> torch.Tensor:
    """Return the int64 positions `[batch, slots]` of the first slots, -1 for padding."""
    positions = torch.full((len(rows), slots), _PADDING, dtype=torch.int64, device="cpu")
    for row, layout in zip(positions, rows, strict=True):
        for start, span in layout.placed():
            _count_up(row[start : start + span.length], span.first_position)
        _count_up(row[layout.key_length :], layout.positions().stop)
    return positions.to("cpu" if device is None else device)


def _count_up(target: torch.Tensor, first: int) -> None:
    target.copy_(torch.arange(first, first + len(target), device="cpu"))


def _checked(check: Callable[..., None], *arguments: object) -> None:
    """Raise what the core finds wrong as an error of this module."""
    try:
        check(*arguments)
    except InvalidFieldError as error:
        raise MaskError(error.field, error.problem) from None
