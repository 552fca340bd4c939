"""Every form of a mask against the executable definition, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from kvbridge.core.attention import AttentionLayout
from kvbridge.core.geometry import TOKENS_MAX
from kvbridge.transform.masks import (
    MASK_VALUES_MAX,
    MaskError,
    MaskForm,
    build_mask,
    eager_mask,
    flex_mask,
    query_positions,
    sdpa_mask,
)
from kvbridge.transform.padding import PADDING_POSITION
from tests.layouts import layout_of, layouts

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mask to build, and the slots that it is over."""

    rows: list[AttentionLayout]
    """One layout for each row."""
    queries: int | range
    """As given to the functions."""
    asking: range
    """The slots that ask."""
    keys: range | None
    """As given to the functions."""
    window: int | None
    """Tokens of the window."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of every form."""
        return {"window_tokens": self.window, "keys": self.keys}

    def expected(self) -> torch.Tensor:
        """Return the boolean mask as the layouts define it: padded alike, and with itself for a query of padding."""
        longest = max(row.key_length for row in self.rows)
        rows = [row.padded_to(longest) for row in self.rows]
        keys = range(self.asking.stop) if self.keys is None else self.keys
        return torch.tensor(
            [[[[self._allowed(row, query, key) for key in keys] for query in self.asking]] for row in rows]
        )

    def _allowed(self, row: AttentionLayout, query: int, key: int) -> bool:
        return key == query if row.position_of(query) is None else row.sees(query, key, self.window)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw one to three layouts, new tokens or any slots as queries, and an axis that may begin late and end later."""
    rows = draw(st.lists(layouts(), min_size=1, max_size=3))
    longest = max(row.key_length for row in rows)
    if draw(st.booleans()):
        count = draw(st.integers(1, 5))
        queries: int | range = count
        asking = range(longest, longest + count)
    else:
        start = draw(st.integers(0, longest + 2))
        queries = asking = range(start, start + draw(st.integers(1, 6)))
    keys = range(draw(st.integers(0, asking.start)), asking.stop + draw(st.integers(0, 3)))
    window = draw(st.one_of(st.none(), st.integers(1, 9)))
    return Case(rows=rows, queries=queries, asking=asking, keys=draw(st.sampled_from([None, keys])), window=window)


def dense(mask: BlockMask) -> torch.Tensor:
    """Return the booleans that a block mask's rule gives for every pair."""
    batch, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, batch, heads, queries, keys, device="cpu")


@given(case=cases())
def test_sdpa_equals_the_definition(case: Case) -> None:
    """True exactly where the layout says that the query sees the key."""
    mask = sdpa_mask(case.rows, case.queries, **case.arguments)
    assert mask.dtype is torch.bool
    assert torch.equal(mask, case.expected())


@given(case=cases(), dtype=st.sampled_from(DTYPES))
def test_eager_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    """Zero where the query sees the key, the dtype's least finite value elsewhere, and no row without a key."""
    mask = eager_mask(case.rows, case.queries, dtype=dtype, **case.arguments)
    assert mask.dtype is dtype
    assert torch.equal(mask == 0, case.expected())
    assert mask[mask != 0].eq(torch.finfo(dtype).min).all()
    assert mask.eq(0).any(-1).all()


@given(case=cases())
@settings(max_examples=30)
def test_flex_equals_the_definition(case: Case) -> None:
    """The rule of the block mask says the same for every pair, and the shape is that of the other forms."""
    mask = flex_mask(case.rows, case.queries, **case.arguments)
    expected = case.expected()
    assert tuple(mask.shape) == tuple(expected.shape)
    assert torch.equal(dense(mask), expected)


@given(case=cases())
def test_positions_of_the_queries_are_those_of_the_layout(case: Case) -> None:
    """Real tokens get the layout's positions and padding a harmless one."""
    longest = max(row.key_length for row in case.rows)
    padded = [row.padded_to(longest) for row in case.rows]
    found = [[row.position_of(query) for query in case.asking] for row in padded]
    expected = [[PADDING_POSITION if position is None else position for position in row] for row in found]
    assert query_positions(case.rows, case.queries).tolist() == expected


@pytest.mark.parametrize("window", [None, 130])
def test_the_blocks_of_a_flex_mask_leave_out_what_is_hidden(window: int | None) -> None:
    """Over several blocks the mask is not dense, and where it skips a whole block no query sees anything in it."""
    layout = layout_of((100, 400), (200, 210))
    mask = flex_mask(layout, 300, window_tokens=window)
    blocks = mask.to_dense()[0, 0].bool()
    seen = sdpa_mask(layout, 300, window_tokens=window)[0, 0]
    edge = 128
    for row, column in torch.cartesian_prod(torch.arange(blocks.shape[0]), torch.arange(blocks.shape[1])).tolist():
        block = seen[row * edge : (row + 1) * edge, column * edge : (column + 1) * edge]
        assert bool(blocks[row, column]) == bool(block.any())
    assert not blocks.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_itself_follows_the_mask() -> None:
    """Uncompiled on the CPU, it computes what scaled dot-product attention computes with the boolean mask."""
    rows = [layout_of((3, 5), (2, 4)), layout_of((4, 4), first_position=7)]
    shape = {"q": 4, "kv": 9 + 4}
    query, key, value = (torch.randn(2, 2, shape[axis], 16) for axis in ("q", "kv", "kv"))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=sdpa_mask(rows, 4))
    found = flex_attention(query, key, value, block_mask=flex_mask(rows, 4))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("form", MaskForm)
def test_a_form_can_be_chosen_by_name(form: MaskForm) -> None:
    """`build_mask` gives what the function of that form gives."""
    layout = layout_of((2, 4), (2, 3))
    built: Any = build_mask(form, layout, 2, window_tokens=3, keys=range(1, 9), dtype=torch.float16)
    direct: dict[MaskForm, Any] = {
        MaskForm.EAGER: eager_mask(layout, 2, window_tokens=3, keys=range(1, 9), dtype=torch.float16),
        MaskForm.SDPA: sdpa_mask(layout, 2, window_tokens=3, keys=range(1, 9)),
        MaskForm.FLEX: flex_mask(layout, 2, window_tokens=3, keys=range(1, 9)),
    }
    if form is MaskForm.FLEX:
        built, direct[form] = dense(built), dense(direct[form])
    assert torch.equal(built, direct[form])


def test_one_layout_is_a_batch_of_one() -> None:
    """A layout by itself and a list of it give the same mask."""
    layout = layout_of((2, 3))
    assert torch.equal(sdpa_mask(layout, 2), sdpa_mask([layout], 2))
    assert sdpa_mask(layout, 2).shape == (1, 1, 2, 5)


def test_rows_of_padding_give_no_nan() -> None:
    """A text part that is prefilled with its padding computes finite numbers in every row."""
    mask = sdpa_mask([layout_of((2, 5)), layout_of((5, 5))], range(5))
    query = torch.randn(2, 1, 5, 8)
    assert torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask).isfinite().all()


BAD: list[tuple[Sequence[AttentionLayout], Any, dict[str, Any], str]] = [
    ([], 1, {}, "layouts"),
    ([layout_of((2, 4))], 0, {}, "queries"),
    ([layout_of((2, 4))], -1, {}, "queries"),
    ([layout_of((2, 4))], range(3, 3), {}, "queries"),
    ([layout_of((2, 4))], range(0, 4, 2), {}, "queries"),
    ([layout_of((2, 4))], range(-1, 2), {}, "queries"),
    ([layout_of((2, 4))], TOKENS_MAX, {}, "queries"),
    ([layout_of((2, 4))], range(4, 6), {"keys": range(5, 6)}, "keys"),
    ([layout_of((2, 4))], 1, {"keys": range(4)}, "keys"),
    ([layout_of((2, 4))], 1, {"keys": range(0, 6, 2)}, "keys"),
    ([layout_of((2, 4))], 1, {"window_tokens": 0}, "window_tokens"),
]


@pytest.mark.parametrize(("rows", "queries", "changes", "field"), BAD)
def test_what_does_not_fit_is_refused_by_name(
    rows: Sequence[AttentionLayout], queries: Any, changes: dict[str, Any], field: str
) -> None:
    """The error names the argument, whatever the form."""
    for build in (sdpa_mask, flex_mask):
        with pytest.raises(MaskError) as refused:
            build(rows, queries, **changes)
        assert refused.value.field == field


def test_the_size_of_a_mask_is_limited() -> None:
    """Queries times keys times rows have a limit, and what is below it is built; nothing is allocated here."""
    layout = layout_of((2, TOKENS_MAX >> 1))
    assert sdpa_mask(layout, 1 << 10, device="meta").numel() < MASK_VALUES_MAX
    for rows, queries in ([layout], 1 << 11), ([layout, layout], 1 << 10):
        with pytest.raises(MaskError) as refused:
            sdpa_mask(rows, queries, device="meta")
        assert refused.value.field == "queries"


def test_integers_are_not_added_to_scores() -> None:
    """An eager mask has a floating-point dtype."""
    with pytest.raises(MaskError) as refused:
        eager_mask(layout_of((2, 4)), 1, dtype=torch.int64)
    assert refused.value.field == "dtype"
