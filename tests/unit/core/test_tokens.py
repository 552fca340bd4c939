"""Token sequences by id and by digest."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.tokens import TokenSequence

ids = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def sequence(of: list[int]) -> TokenSequence:
    """Return ids as a sequence."""
    return TokenSequence.from_packed(struct.pack(f"<{len(of)}I", *of))


@given(ids, ids, st.integers(0, 45))
def test_the_first_difference_is_that_of_the_lists(mine: list[int], theirs: list[int], offset: int) -> None:
    """The search finds what going through both lists finds, and nothing where one ends first."""
    pairs = zip(range(offset, len(mine)), mine[offset:], theirs, strict=False)
    expected = next(((at, own, other) for at, own, other in pairs if own != other), None)
    assert sequence(mine).first_difference(sequence(theirs), offset) == expected


@given(ids, ids, st.integers(0, 45))
def test_a_sequence_continues_with_a_slice_of_itself_alone(mine: list[int], theirs: list[int], offset: int) -> None:
    """By id this is a comparison of lists; by digest it is only ever proved for the whole."""
    whole, part = sequence(mine), sequence(theirs)
    assert whole.continues_with(part, offset) == (mine[offset : offset + len(theirs)] == theirs)
    bare = TokenSequence(count=whole.count, digest=whole.digest)
    assert bare.continues_with(part, offset) == (offset == 0 and mine == theirs)
    assert bare.first_difference(part, offset) is None
