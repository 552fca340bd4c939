"""Gathering from and scattering into paged caches, against a loop over single tokens."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from kvbridge.core.geometry import DimensionOrder
from kvbridge.transform.paging import gather_blocks, scatter_blocks

DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
ORDERS = tuple(DimensionOrder)
ORDER_PAIRS = tuple(itertools.product(ORDERS, ORDERS))
CANARY_ELEMENTS = 16
SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """A view with gaps inside a buffer of random bits, which is compared as a whole so that any stray write shows."""

    memory: torch.Tensor
    """All bytes, one-dimensional uint8, canaries on both sides included."""
    view: torch.Tensor
    """The tensor under test, somewhere inside `memory`."""

    @classmethod
    def paint(
        cls, shape: tuple[int, ...], *, dtype: torch.dtype, gaps: tuple[int, ...], shift: int = 0, device: str = "cpu"
    ) -> Self:
        """Build a view whose dimension `k` leaves `gaps[k]` elements unused between its steps."""
        strides, step = [], 1
        for size, gap in zip(reversed(shape), reversed(gaps), strict=True):
            strides.append(step + gap)
            step = size * (step + gap)
        elements = step + shift + 2 * CANARY_ELEMENTS
        generator = torch.Generator().manual_seed(SEED + elements)
        memory = torch.randint(256, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator).to(device)
        view = memory.view(dtype).as_strided(shape, strides[::-1], CANARY_ELEMENTS + shift)
        return cls(memory=memory, view=view)

    def copy(self) -> Canvas:
        """Return a canvas of equal memory and strides."""
        memory = self.memory.clone()
        typed = memory.view(self.view.dtype)
        return Canvas(
            memory=memory, view=typed.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        )

    def is_like(self, other: Canvas) -> bool:
        """Return whether both hold the same bits, inside and outside of the view."""
        return torch.equal(self.memory, other.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One paged tensor, one slot, one table; `gather` and `scatter` run the code under test on them."""

    blocks: Canvas
    slot: Canvas
    table: list[int]
    token_count: int
    block_order: DimensionOrder
    slot_order: DimensionOrder
    block_axis: int = 0

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that both directions take, by name."""
        return {
            "kv_blocks": self.blocks.view.movedim(0, self.block_axis),
            "block_table": self.table,
            "token_count": self.token_count,
            "block_order": self.block_order,
            "slot_order": self.slot_order,
            "block_axis": self.block_axis,
        }

    def gather(self, **changed: Any) -> None:
        """Gather into the slot, with some arguments changed."""
        gather_blocks(**{"out": self.slot.view} | self.arguments | changed)

    def scatter(self, **changed: Any) -> None:
        """Scatter from the slot, with some arguments changed."""
        scatter_blocks(**{"source": self.slot.view} | self.arguments | changed)

    def rows(self, blocks: torch.Tensor, slot: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return for each token its `[heads, dim]` row in the blocks and in the slot: the naive model."""
        nhd = self.block_order is DimensionOrder.NHD
        block_size = blocks.shape[1] if nhd else blocks.shape[2]
        pairs = []
        for token in range(self.token_count):
            block, row = blocks[self.table[token // block_size]], token % block_size
            in_slot = slot[token] if self.slot_order is DimensionOrder.NHD else slot[:, token]
            pairs.append((block[row] if nhd else block[:, row], in_slot))
        return pairs

    def expected_slot(self) -> Canvas:
        """Return what the slot's memory must be after a gather."""
        expected = self.slot.copy()
        for in_blocks, in_slot in self.rows(self.blocks.view, expected.view):
            in_slot.copy_(in_blocks)
        return expected

    def expected_blocks(self) -> Canvas:
        """Return what the blocks' memory must be after a scatter."""
        expected = self.blocks.copy()
        for in_blocks, in_slot in self.rows(expected.view, self.slot.view):
            in_blocks.copy_(in_slot)
        return expected


def block_shape(order: DimensionOrder, *, num_blocks: int, block_size: int, heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of a paged tensor."""
    inner = (block_size, heads) if order is DimensionOrder.NHD else (heads, block_size)
    return (num_blocks, *inner, dim)


def slot_shape(order: DimensionOrder, *, capacity: int, heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of a slot view."""
    return (capacity, heads, dim) if order is DimensionOrder.NHD else (heads, capacity, dim)


def gaps(dimensions: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw unused elements per dimension: mostly multiples that keep wide copies possible, sometimes odd ones."""
    return st.one_of(
        st.just((0,) * dimensions),
        st.tuples(*[st.sampled_from((0, 16, 48))] * (dimensions - 1), st.just(0)),
        st.tuples(*[st.integers(0, 3)] * dimensions),
    )


@st.composite
def cases(draw: st.DrawFn, *, repeats: bool) -> Case:
    """Draw a fitting case; the table may name a block twice only with `repeats`."""
    block_order, slot_order = draw(st.sampled_from(ORDERS)), draw(st.sampled_from(ORDERS))
    dtype, device = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DEVICES))
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    block_size, num_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    ids = st.integers(0, num_blocks - 1)
    table = draw(st.lists(ids, min_size=1, max_size=8 if repeats else num_blocks, unique=not repeats))
    token_count = draw(st.integers(1, len(table) * block_size))
    capacity = token_count + draw(st.integers(0, 4))
    shape = block_shape(block_order, num_blocks=num_blocks, block_size=block_size, heads=heads, dim=dim)
    shifts = st.sampled_from((0, 0, 1, 4))
    return Case(
        blocks=Canvas.paint(shape, dtype=dtype, gaps=draw(gaps(4)), shift=draw(shifts), device=device),
        slot=Canvas.paint(
            slot_shape(slot_order, capacity=capacity, heads=heads, dim=dim),
            dtype=dtype,
            gaps=draw(gaps(3)),
            shift=draw(shifts),
            device=device,
        ),
        table=table,
        token_count=token_count,
        block_order=block_order,
        slot_order=slot_order,
        block_axis=draw(st.integers(0, 3)),
    )


def plain_case(
    block_order: DimensionOrder = DimensionOrder.NHD,
    slot_order: DimensionOrder = DimensionOrder.HND,
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """Return 4 blocks of 4 rows, 2 heads of 8 elements and a page-padded slot for 11 tokens, of which 10 are used."""
    return Case(
        blocks=Canvas.paint(
            block_shape(block_order, num_blocks=4, block_size=4, heads=2, dim=8), dtype=dtype, gaps=(64, 0, 0, 0)
        ),
        slot=Canvas.paint(slot_shape(slot_order, capacity=11, heads=2, dim=8), dtype=dtype, gaps=(40, 0, 0)),
        table=[2, 0, 3],
        token_count=10,
        block_order=block_order,
        slot_order=slot_order,
    )


@given(case=cases(repeats=True))
@settings(deadline=None, max_examples=300)
def test_gather_equals_the_loop_over_tokens(case: Case) -> None:
    """A gather leaves exactly the bits that copying token by token leaves, in and around the slot."""
    expected, blocks_before = case.expected_slot(), case.blocks.copy()

    case.gather()

    assert case.slot.is_like(expected)
    assert case.blocks.is_like(blocks_before)


@given(case=cases(repeats=False))
@settings(deadline=None, max_examples=300)
def test_scatter_equals_the_loop_over_tokens(case: Case) -> None:
    """A scatter leaves exactly the bits that copying token by token leaves, in and around the blocks."""
    expected, slot_before = case.expected_blocks(), case.slot.copy()

    case.scatter()

    assert case.blocks.is_like(expected)
    assert case.slot.is_like(slot_before)


@given(case=cases(repeats=False))
@settings(deadline=None, max_examples=50)
def test_gather_undoes_scatter(case: Case) -> None:
    """What was scattered into blocks comes back bit for bit from the same table."""
    case.scatter()
    before = case.slot.copy()
    for _, in_slot in case.rows(case.blocks.view, case.slot.view):
        in_slot.zero_()

    case.gather()

    assert case.slot.is_like(before)


@pytest.mark.parametrize(("block_order", "slot_order"), ORDER_PAIRS)
@pytest.mark.parametrize(
    ("dtype", "bits", "signalling"),
    [
        (torch.float32, torch.int32, 0x7F800001),
        (torch.float16, torch.int16, 0x7C01),
        (torch.bfloat16, torch.int16, 0x7F81),
    ],
)
def test_signalling_nans_survive(
    block_order: DimensionOrder, slot_order: DimensionOrder, dtype: torch.dtype, bits: torch.dtype, signalling: int
) -> None:
    """A NaN that arithmetic would quieten arrives with all its bits, in both directions."""
    case = plain_case(block_order, slot_order, dtype)
    case.blocks.memory.view(bits).fill_(signalling)

    case.gather()
    slot = case.slot.view.view(bits)
    gathered = slot[:10] if slot_order is DimensionOrder.NHD else slot[:, :10]
    assert gathered.eq(signalling).all()

    case.scatter()
    assert case.blocks.memory.view(bits).eq(signalling).all()


@pytest.mark.parametrize(
    "table",
    [
        (2, 0, 3),
        range(3),
        torch.tensor([2, 0, 3], dtype=torch.int32),
        torch.tensor([2, 0, 3], dtype=torch.int64),
        torch.tensor([2, 9, 0, 9, 3, 9])[::2],
        torch.tensor([2, 0, 3]).numpy(),
    ],
    ids=["tuple", "range", "int32", "int64", "strided", "array"],
)
def test_tables_may_be_sequences_or_tensors(table: Any) -> None:
    """A table of any accepted kind selects the same blocks as the list of its ids."""
    case, twin = plain_case(), plain_case()

    case.gather(block_table=table)
    twin.gather(block_table=[int(block) for block in table])

    assert case.slot.is_like(twin.slot)


@pytest.mark.parametrize("surplus", [[-1], [99], [2, 2], [2**40]])
def test_surplus_table_entries_are_ignored(surplus: list[int]) -> None:
    """Entries behind the needed ones are not read, so padded tables of a batch do."""
    case, twin = plain_case(), plain_case()

    case.gather(block_table=[*case.table, *surplus])
    twin.gather()
    assert case.slot.is_like(twin.slot)

    case.scatter(block_table=torch.tensor([*case.table, *surplus]))
    twin.scatter()
    assert case.blocks.is_like(twin.blocks)


def test_orders_may_be_given_by_value() -> None:
    """The plain strings HND and NHD do as dimension orders."""
    case = plain_case()
    expected = case.expected_slot()

    case.gather(block_order="NHD", slot_order="HND")

    assert case.slot.is_like(expected)


@pytest.mark.parametrize("skew_bytes", [4, 8])
def test_memory_that_starts_between_wide_elements(skew_bytes: int) -> None:
    """Foreign memory that is aligned for its own dtype only is copied as well, in both directions."""
    memory = bytearray(skew_bytes + 4 * 6 * 4)
    slot = torch.frombuffer(memory, dtype=torch.float32, offset=skew_bytes).view(6, 1, 4)
    cache = torch.randn(3, 2, 1, 4)

    gather_blocks(cache, [1, 2, 0], slot, token_count=6, block_order="NHD", slot_order="NHD")
    assert torch.equal(slot, cache[[1, 2, 0]].view(6, 1, 4))

    scatter_blocks(slot, cache, [0, 1, 2], token_count=6, block_order="NHD", slot_order="NHD")
    assert torch.equal(cache.view(6, 1, 4), slot)


@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("stack_axis", [0, 1])
def test_one_of_two_stacked_tensors(role: int, stack_axis: int) -> None:
    """K and V stacked before or behind the block dimension are reached by an index; the other one is left alone."""
    shape = [4, 4, 2, 8]
    shape.insert(stack_axis, 2)
    cache = torch.randn(shape)
    before = cache.clone()
    source = torch.randn(2, 11, 8)

    scatter_blocks(
        source, cache.select(stack_axis, role), [1, 2, 3], token_count=11, block_order="NHD", slot_order="HND"
    )
    out = torch.empty_like(source)
    gather_blocks(cache.select(stack_axis, role), [1, 2, 3], out, token_count=11, block_order="NHD", slot_order="HND")

    assert torch.equal(out, source)
    assert torch.equal(cache.select(stack_axis, 1 - role), before.select(stack_axis, 1 - role))


def test_tensors_that_require_gradients() -> None:
    """Parameters are read from and written to as plain memory, and gradients stay enabled."""
    cache = torch.nn.Parameter(torch.zeros(3, 2, 2, 4))
    source, out = torch.nn.Parameter(torch.randn(2, 5, 4)), torch.nn.Parameter(torch.zeros(2, 5, 4))

    scatter_blocks(source, cache, [2, 0, 1], token_count=5, block_order="NHD", slot_order="HND")
    gather_blocks(cache, [2, 0, 1], out, token_count=5, block_order="NHD", slot_order="HND")

    assert torch.equal(out, source)
    assert out.is_leaf
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("dtype", "dim"), [(torch.bfloat16, 8), (torch.uint8, 3)])
def test_tensors_of_an_inference_run(dtype: torch.dtype, dim: int) -> None:
    """Tensors made in inference mode are written outside of it as well, and the mode stays off."""
    with torch.inference_mode():
        cache, out = torch.zeros(3, 2, 2, dim, dtype=dtype), torch.zeros(2, 5, dim, dtype=dtype)
    source = torch.arange(10 * dim).view(2, 5, dim).to(dtype)

    scatter_blocks(source, cache, [2, 0, 1], token_count=5, block_order="NHD", slot_order="HND")
    gather_blocks(cache, [2, 0, 1], out, token_count=5, block_order="NHD", slot_order="HND")

    assert torch.equal(out, source)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(("block_order", "slot_order"), ORDER_PAIRS)
@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_no_bounce_buffer(block_order: DimensionOrder, slot_order: DimensionOrder, direction: str) -> None:
    """Neither direction allocates more than a sixteenth of the payload, whatever the orders."""
    block_size, heads, dim, token_count = 16, 4, 64, 40 * 16 + 5
    shape = block_shape(block_order, num_blocks=64, block_size=block_size, heads=heads, dim=dim)
    case = Case(
        blocks=Canvas.paint(shape, dtype=torch.bfloat16, gaps=(block_size * heads * dim, 0, 0, 0)),
        slot=Canvas.paint(
            slot_shape(slot_order, capacity=token_count, heads=heads, dim=dim),
            dtype=torch.bfloat16,
            gaps=(2048 if slot_order is DimensionOrder.HND else 0, 0, 0),
        ),
        table=list(range(63, 0, -1)),
        token_count=token_count,
        block_order=block_order,
        slot_order=slot_order,
    )

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        getattr(case, direction)()

    events = recorded.events()
    assert events
    largest = max(event.cpu_memory_usage for event in events)
    assert largest < token_count * heads * dim * torch.bfloat16.itemsize / 16


def test_sources_may_overlap_themselves() -> None:
    """What is only read may repeat: one block expanded to many, one head expanded to many."""
    row = torch.randn(1, 1, 4)
    cache = torch.zeros(2, 2, 3, 4)
    out = torch.zeros(4, 3, 4)

    scatter_blocks(row.expand(4, 3, 4), cache, [1, 0], token_count=4, block_order="NHD", slot_order="NHD")
    gather_blocks(cache[:1].expand(9, 2, 3, 4), [8, 3], out, token_count=4, block_order="NHD", slot_order="NHD")

    assert torch.equal(out, row.expand(4, 3, 4))
