"""What stands for all that a model saw before a payload."""

from __future__ import annotations

import hashlib
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.context import NO_CONTEXT, check_context, context_digest
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.media import MediaItem
from tests import builders

ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8)
pictures = st.lists(st.tuples(st.integers(0, 7), st.binary(min_size=32, max_size=32)), max_size=3)


def packed(of: list[int]) -> bytes:
    """Return ids as they travel."""
    return struct.pack(f"<{len(of)}I", *of)


def items(of: list[tuple[int, bytes]]) -> list[MediaItem]:
    """Return pictures as media."""
    return [MediaItem(token_index=at, digest=digest) for at, digest in of]


@given(ids, pictures, st.lists(st.integers(0, 32), max_size=4))
def test_the_digest_is_what_the_api_says_however_the_ids_are_cut(
    tokens: list[int], media: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    """Ids, then index and digest of each picture; pieces of any length give the same."""
    told = packed(tokens) + b"".join(struct.pack("<I", at) + digest for at, digest in media)
    edges = [0, *sorted(min(cut, 4 * len(tokens)) for cut in cuts), 4 * len(tokens)]
    pieces = [packed(tokens)[start:end] for start, end in pairwise(edges)]
    assert context_digest(pieces, items(media)) == hashlib.sha256(told).digest()


@given(ids, ids, pictures, pictures)
def test_two_contexts_have_one_digest_only_if_they_are_one(
    mine: list[int], theirs: list[int], seen: list[tuple[int, bytes]], others: list[tuple[int, bytes]]
) -> None:
    """Whatever differs among tokens and pictures makes another digest, for contexts of one length."""
    theirs = (theirs * len(mine))[: len(mine)]
    same = (mine, seen) == (theirs, others)
    assert (context_digest([packed(mine)], items(seen)) == context_digest([packed(theirs)], items(others))) == same


def test_nothing_has_an_empty_digest() -> None:
    """Without tokens there is no context, in however many pieces."""
    assert context_digest([]) == context_digest([b"", b""]) == NO_CONTEXT


@pytest.mark.parametrize(("digest", "first_position"), [(b"x", 3), (b"x" * 31, 3), (b"x" * 33, 3), (b"x" * 32, 0)])
def test_what_cannot_be_a_context_is_refused(digest: bytes, first_position: int) -> None:
    """A digest has its length, and needs positions for its tokens."""
    with pytest.raises(InvalidFieldError) as caught:
        check_context(digest, first_position=first_position)
    assert caught.value.field == "context_digest"
    with pytest.raises(InvalidFieldError):
        builders.spec(context_digest=digest, first_position=first_position)
