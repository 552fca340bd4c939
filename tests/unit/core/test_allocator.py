"""The allocator against a naive model that looks at every block of the arena."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvbridge.core.allocator import (
    LARGE_ALIGNMENT_BYTES,
    LARGE_BYTES,
    Allocator,
    ArenaFullError,
    Extent,
    ForeignExtentError,
)

BLOCK = 4096
LARGE_BLOCKS = 4
ARENA_BLOCKS = 41  # Not a multiple of the large alignment, so that the end of the arena is an odd piece.


def small_arena() -> Allocator:
    """Return an arena of few blocks in which anything of four blocks or more counts as large."""
    return Allocator(
        ARENA_BLOCKS * BLOCK,
        small_alignment_bytes=BLOCK,
        large_alignment_bytes=LARGE_BLOCKS * BLOCK,
        large_bytes=LARGE_BLOCKS * BLOCK,
    )


class AllocatorMachine(RuleBasedStateMachine):
    """Allocates and frees at random, and keeps a list of which block is taken."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        """Start with an empty arena."""
        super().__init__()
        self.allocator = small_arena()
        self.taken = [False] * ARENA_BLOCKS
        self.live: set[Extent] = set()

    def gap_exists(self, blocks: int) -> bool:
        """Try every start that the alignment allows."""
        step = LARGE_BLOCKS if blocks >= LARGE_BLOCKS else 1
        return any(not any(self.taken[start : start + blocks]) for start in range(0, ARENA_BLOCKS - blocks + 1, step))

    def mark(self, extent: Extent, taken: bool) -> None:
        """Note the extent's blocks as taken or free, each of which must be the other before."""
        for block in range(extent.offset_bytes // BLOCK, extent.end_bytes // BLOCK):
            assert self.taken[block] is not taken
            self.taken[block] = taken

    @rule(target=extents, length_bytes=st.integers(min_value=1, max_value=ARENA_BLOCKS * BLOCK + 1))
    def allocate(self, length_bytes: int) -> object:
        """Allocate, and check both what is lent and what is refused."""
        blocks = -(-length_bytes // BLOCK)
        assert self.allocator.fits(length_bytes) is self.gap_exists(blocks)
        try:
            extent = self.allocator.allocate(length_bytes)
        except ArenaFullError:
            assert not self.gap_exists(blocks)
            return multiple()
        assert extent.length_bytes == blocks * BLOCK
        assert extent.offset_bytes % (BLOCK * (LARGE_BLOCKS if blocks >= LARGE_BLOCKS else 1)) == 0
        self.mark(extent, taken=True)
        self.live.add(extent)
        return extent

    @rule(target=extents, blocks=st.integers(min_value=1, max_value=6))
    def allocate_few_blocks(self, blocks: int) -> object:
        """Allocate around the threshold, where fragmentation matters most."""
        return self.allocate(blocks * BLOCK)

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        """Free an extent; a second time is refused and changes nothing."""
        self.allocator.free(extent)
        self.mark(extent, taken=False)
        self.live.discard(extent)
        with pytest.raises(ForeignExtentError):
            self.allocator.free(extent)

    @invariant()
    def figures_add_up(self) -> None:
        """Used and free bytes are those of the model, and no two free extents touch."""
        runs = [len(run) for run in "".join("x" if taken else "." for taken in self.taken).split("x") if run]
        snapshot = self.allocator.snapshot()
        assert snapshot.used_bytes == sum(self.taken) * BLOCK == sum(extent.length_bytes for extent in self.live)
        assert snapshot.used_bytes + snapshot.free_bytes == snapshot.size_bytes
        assert snapshot.free_extents == len(runs)
        assert snapshot.largest_free_bytes == max(runs, default=0) * BLOCK
        assert snapshot.used_extents == len(self.live)

    def teardown(self) -> None:
        """Free everything: the arena is one free extent again."""
        for extent in self.live:
            self.allocator.free(extent)
        snapshot = self.allocator.snapshot()
        assert (snapshot.free_extents, snapshot.largest_free_bytes) == (1, ARENA_BLOCKS * BLOCK)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_default_slots_of_thirty_two_mebibytes_start_on_huge_pages() -> None:
    """With the default limits a large slot starts 2-MiB aligned although a small one came first."""
    allocator = Allocator(2 * LARGE_BYTES)
    small = allocator.allocate(1)
    large = allocator.allocate(LARGE_BYTES + 1)
    assert small.length_bytes == BLOCK
    assert large.length_bytes == LARGE_BYTES + BLOCK
    assert large.offset_bytes % LARGE_ALIGNMENT_BYTES == 0


def test_slots_a_little_over_a_huge_page_lie_side_by_side() -> None:
    """Aligning them would waste nearly half of the arena."""
    allocator = Allocator(8 * LARGE_ALIGNMENT_BYTES)
    for _ in range(7):
        allocator.allocate(LARGE_ALIGNMENT_BYTES + BLOCK)
    assert allocator.largest_free_bytes == LARGE_ALIGNMENT_BYTES - 7 * BLOCK


def test_small_slots_leave_aligned_room() -> None:
    """Small slots share one large block instead of spoiling several."""
    allocator = Allocator(3 * LARGE_BYTES + LARGE_ALIGNMENT_BYTES)
    for _ in range(LARGE_ALIGNMENT_BYTES // BLOCK):
        allocator.allocate(BLOCK)
    assert allocator.fits(3 * LARGE_BYTES)


def test_the_smallest_sufficient_gap_is_taken() -> None:
    """Best fit leaves the longest piece for later."""
    allocator = Allocator(64 * BLOCK)
    pieces = [allocator.allocate(blocks * BLOCK) for blocks in (8, 1, 3, 1, 16, 1)]
    for gap in (0, 2, 4):
        allocator.free(pieces[gap])
    assert allocator.allocate(2 * BLOCK).offset_bytes in range(pieces[2].offset_bytes, pieces[2].end_bytes)


def test_a_part_of_an_extent_cannot_be_freed() -> None:
    """Only the very extent that was lent is taken back."""
    allocator = Allocator(8 * BLOCK)
    extent = allocator.allocate(4 * BLOCK)
    with pytest.raises(ForeignExtentError):
        allocator.free(Extent(offset_bytes=extent.offset_bytes, length_bytes=BLOCK))
    with pytest.raises(ForeignExtentError):
        allocator.free(Extent(offset_bytes=extent.offset_bytes + BLOCK, length_bytes=BLOCK))
    allocator.free(extent)
    assert allocator.largest_free_bytes == 8 * BLOCK


def test_a_refusal_says_what_is_free() -> None:
    """The error carries the request, all free bytes and the longest piece, so that a caller can decide to evict."""
    allocator = Allocator(8 * BLOCK)
    allocator.allocate(6 * BLOCK)
    with pytest.raises(ArenaFullError, match="no room for 12288 bytes") as refusal:
        allocator.allocate(3 * BLOCK)
    assert (refusal.value.requested_bytes, refusal.value.free_bytes, refusal.value.largest_free_bytes) == (
        3 * BLOCK,
        2 * BLOCK,
        2 * BLOCK,
    )


def test_a_hundred_thousand_random_operations_leave_one_extent() -> None:
    """A long random run at full fragmentation coalesces completely in the end."""
    random_source = random.Random(7)
    allocator = Allocator(4096 * LARGE_BYTES)
    live: list[Extent] = []
    for _ in range(100_000):
        if live and random_source.random() < 0.5:
            allocator.free(live.pop(random_source.randrange(len(live))))
        else:
            length = random_source.choice((BLOCK, 3 * BLOCK, LARGE_BYTES - 1, LARGE_BYTES, 5 * LARGE_BYTES + 1))
            if allocator.fits(length):
                live.append(allocator.allocate(length))
    for extent in live:
        allocator.free(extent)
    assert allocator.snapshot().free_extents == 1
    assert repr(allocator) == f"<Allocator 0 of {4096 * LARGE_BYTES} bytes used in 0 extents, free in 1>"
