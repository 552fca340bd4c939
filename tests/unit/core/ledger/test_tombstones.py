"""What is remembered of the dead, and for how long."""

from __future__ import annotations

import pytest

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.ledger import LedgerLimits, Tombstone
from kvbridge.core.ledger.tombstones import DETAIL_CHARACTERS_MAX, Tombstones, text_bytes
from kvbridge.core.reasons import Reason
from tests.builders import model_tag, tokens
from tests.unit.core.ledger.desk import Desk, text


def stone(generation: int = 1, *, words: str = "", detail: str = "") -> Tombstone:
    """Return a tombstone of the key `k`, whose size is 1 byte and that of text and detail."""
    return Tombstone(
        reference=PayloadReference(key="k", generation=generation),
        model=model_tag(),
        reason=Reason.PAYLOAD_EXPIRED,
        detail=detail,
        fallback=text(words),
        tokens=None,
        ended_at=0.0,
    )


def test_the_oldest_is_forgotten_first() -> None:
    """The limit on their number keeps the newest endings."""
    desk = Desk(tombstones_max=2)
    for key in "abc":
        desk.abort(desk.reserve(key).token)
    assert desk.find("a") is None
    assert desk.has_ended("b")
    assert desk.has_ended("c")
    assert desk.ledger.usage().tombstones == 2


def test_long_texts_are_limited_by_their_bytes() -> None:
    """One long text makes as many old ones go as it needs room."""
    desk = Desk(tombstone_bytes_max=1000)
    for key in "abcd":
        desk.abort(desk.reserve(key, fallback=text("x" * 100), tokens=None).token)
    desk.abort(desk.reserve("e", fallback=text("y" * 600), tokens=None).token)
    assert [key for key in "abcde" if desk.find(key) is not None] == ["c", "d", "e"]
    assert desk.ledger.usage().tombstone_bytes <= 1000


def test_a_text_that_is_over_the_limit_alone_is_dropped_with_its_tokens() -> None:
    """The reason stays, and nobody else is forgotten for it."""
    desk = Desk(tombstone_bytes_max=1000)
    desk.abort(desk.reserve("a").token)
    desk.abort(desk.reserve("b", fallback=text("x" * 2000)).token)
    assert desk.tombstone("a").fallback == text("the text")
    tombstone = desk.tombstone("b")
    assert (tombstone.reason, tombstone.fallback, tombstone.tokens) == (Reason.PAYLOAD_EXPIRED, FallbackText(), None)


def test_a_second_ending_replaces_the_first_and_counts_as_newest() -> None:
    """What became corrupt while it drained is one tombstone, not two."""
    stones = Tombstones(LedgerLimits(tombstones_max=2))
    stones.put(stone(1, words="first"))
    stones.put(stone(2))
    stones.put(stone(1, words="1"))
    stones.put(stone(3))
    assert stones.forget_surplus() == [PayloadReference(key="k", generation=2)]
    assert len(stones) == 2
    assert stones.bytes == 3


def test_forgetting_and_discarding_give_the_bytes_back() -> None:
    """The sum is always that of what is there."""
    stones = Tombstones(LedgerLimits(tombstone_bytes_max=10))
    for generation in range(5):
        stones.put(stone(generation, words="abc"))
    assert len(stones.forget_surplus()) == 3
    assert stones.bytes == 8
    stones.discard(PayloadReference(key="k", generation=4))
    stones.discard(PayloadReference(key="k", generation=4))
    assert (len(stones), stones.bytes) == (1, 4)
    assert repr(stones) == "<Tombstones of 1 payloads in 4 bytes>"


def test_nothing_at_all_can_be_remembered_under_a_tiny_limit() -> None:
    """Then even the newest goes, and the ledger goes on."""
    desk = Desk(tombstone_bytes_max=1)
    desk.abort(desk.reserve().token)
    assert desk.find() is None
    assert desk.ledger.usage().tombstone_bytes == 0
    assert desk.reserve().reference.generation == 2


def test_a_detail_is_cut_off() -> None:
    """A finding of any length costs little memory."""
    desk = Desk()
    desk.fail(desk.publish(), detail="x" * 5000)
    assert desk.tombstone().detail == "x" * DETAIL_CHARACTERS_MAX


@pytest.mark.parametrize(
    ("fallback", "count", "expected"),
    [
        (FallbackText(), None, 0),
        (FallbackText(text="äöü"), None, 6),
        (FallbackText(text_uri="s3://a"), None, 6),
        (FallbackText(), 3, 32 + 12),
    ],
)
def test_text_is_counted_in_bytes(fallback: FallbackText, count: int | None, expected: int) -> None:
    """Characters are not bytes, and tokens are a digest and four bytes each."""
    assert text_bytes(fallback, None if count is None else tokens(count)) == expected
