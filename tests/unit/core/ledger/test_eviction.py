"""Who has to go when a reservation does not fit."""

from __future__ import annotations

from itertools import permutations

import pytest

from kvbridge.core.allocator import LARGE_ALIGNMENT_BYTES, LARGE_BYTES
from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import PayloadEnded, SlotFreed, SlotGranted, SlotRetired, Tombstone
from kvbridge.core.reasons import Reason
from tests.builders import spec
from tests.unit.core.ledger.desk import LEASE_SECONDS, LINGER_SECONDS, LONG_SECONDS, Desk, text

LARGE_PAGES = LARGE_BYTES // PAGE_BYTES
ALIGNMENT_PAGES = LARGE_ALIGNMENT_BYTES // PAGE_BYTES


def gone(desk: Desk, keys: str) -> str:
    """Return which of these one-letter keys have ended."""
    return "".join(key for key in keys if isinstance(desk.find(key), Tombstone))


def at(desk: Desk, key: str) -> int:
    """Return the first page of a payload."""
    return desk.payload(key).slot.offset_bytes // PAGE_BYTES


def filled(*lengths: int) -> Desk:
    """Return a full arena of payloads a, b, c ... of these many pages, which lie in this order from the end down."""
    desk = Desk(pages=sum(lengths))
    for key, pages in zip("abcdefgh", lengths, strict=False):
        desk.publish(key, pages=pages)
    places = [at(desk, key) for key in "abcdefgh"[: len(lengths)]]
    assert places == sorted(places, reverse=True)
    return desk


def test_only_as_many_as_needed_go_and_their_text_stays() -> None:
    """The least recently used one goes, and its consumers are told that memory was short."""
    desk = filled(2, 2, 2)
    desk.publish("n", pages=2, fallback=text("new"))
    assert gone(desk, "abc") == "a"
    tombstone = desk.tombstone("a")
    assert (tombstone.reason, tombstone.fallback) == (Reason.MEMORY_EXHAUSTED, text("the text"))


def test_nobody_goes_if_it_fits() -> None:
    """Free memory is taken first."""
    desk = Desk(pages=3)
    desk.publish("a")
    desk.publish("b")
    desk.publish("c")
    assert gone(desk, "abc") == ""


def test_a_release_is_a_use() -> None:
    """What was given back last goes last, whichever was leased first."""
    desk = filled(1, 1, 1)
    first, second = desk.lease(desk.payload("a").payload_id), desk.lease(desk.payload("b").payload_id)
    desk.release(second)
    desk.release(first)
    desk.publish("n")
    assert gone(desk, "abc") == "c"
    desk.publish("m")
    assert gone(desk, "abc") == "bc"


def test_a_lease_is_a_use_but_neither_its_expiry_nor_the_death_of_its_client() -> None:
    """A lease that was forgotten an hour ago does not make a payload recent."""
    desk = Desk(pages=3)
    for key in "abc":
        desk.publish(key, linger_seconds=LONG_SECONDS / 2)
    expired = desk.lease(desk.payload("c").payload_id, attached=False)
    dead = desk.lease(desk.payload("a").payload_id, client="short")
    desk.release(desk.lease(desk.payload("b").payload_id))
    desk.end("short")
    desk.wait(LEASE_SECONDS)
    assert desk.renew(dead, expired) == [None, None]
    desk.publish("x", linger_seconds=LONG_SECONDS / 2)
    assert gone(desk, "abc") == "c"
    desk.publish("y", linger_seconds=LONG_SECONDS / 2)
    assert gone(desk, "abc") == "ac"


def test_a_commit_is_a_use() -> None:
    """Who was reserved first but committed last is the most recent."""
    desk = Desk(pages=2)
    slow = desk.reserve("a")
    desk.publish("b")
    desk.commit(slow.token)
    desk.publish("c")
    assert gone(desk, "ab") == "b"


def test_nobody_who_is_referenced_or_not_committed_goes() -> None:
    """Leases, holds, writers and verifications keep their memory."""
    desk = Desk(pages=5)
    desk.lease(desk.publish("a"))
    desk.commit(desk.reserve("b").token, hold=True)
    desk.reserve("c")
    desk.begin(desk.reserve("d").token)
    desk.publish("e")
    with pytest.raises(MemoryExhaustedError):
        desk.reserve("n", pages=2)
    desk.reserve("n")
    assert gone(desk, "abcde") == "e"


def test_nobody_goes_if_all_together_would_not_help() -> None:
    """Neither for want of bytes, nor because what is kept lies in between."""
    desk = filled(2, 1, 2)
    lease = desk.lease(desk.payload("b").payload_id)
    for pages in (3, 5, 6):
        with pytest.raises(MemoryExhaustedError) as refusal:
            desk.reserve("n", pages=pages)
        assert refusal.value.available_bytes < pages * PAGE_BYTES
    assert gone(desk, "abc") == ""
    desk.release(lease)
    desk.reserve("n", pages=3)
    assert gone(desk, "abc") == "ab"


def test_the_error_says_what_could_have_been_had_in_one_piece() -> None:
    """With free memory that is cut up, that is less than the sum."""
    desk = filled(2, 1, 3)
    desk.lease(desk.payload("b").payload_id)
    with pytest.raises(MemoryExhaustedError) as refusal:
        desk.reserve("n", pages=4)
    assert refusal.value.available_bytes == 3 * PAGE_BYTES
    assert (refusal.value.requested_bytes, refusal.value.arena_bytes) == (4 * PAGE_BYTES, 6 * PAGE_BYTES)


def test_who_does_not_help_is_spared() -> None:
    """An older payload apart from the gap that the slot needs stays, although plain order would have taken it too."""
    desk = filled(1, 1, 1, 1)
    desk.lease(desk.payload("b").payload_id)
    desk.publish("n", pages=2)
    assert gone(desk, "abcd") == "cd"


def test_a_gap_takes_no_more_of_its_ends_than_it_needs() -> None:
    """Of payloads side by side only those go that the slot needs, the most recently used end being spared first."""
    desk = filled(1, 1, 3)
    desk.publish("n", pages=3)
    assert gone(desk, "abc") == "c"
    desk = filled(1, 2, 1)
    desk.publish("n", pages=3)
    assert gone(desk, "abc") == "ab"


def test_imagined_gaps_grow_at_both_ends() -> None:
    """In whatever order of addresses the payloads were last used."""
    for order in permutations("abc"):
        desk = filled(1, 1, 1)
        for key in order:
            desk.release(desk.lease(desk.payload(key).payload_id))
        desk.reserve("n", pages=3)
        assert gone(desk, "abc") == "abc"


def desk_with_a_pin_on_the_boundary(*, behind: int) -> Desk:
    """Return an arena with a at its start, a pin of one page on a boundary, and b behind a gap.

    The pages between the pin and b are free, so that any gap around b starts off the boundary.
    """
    desk = Desk(pages=2 * LARGE_PAGES + behind)
    desk.publish("a", pages=LARGE_PAGES)
    middle = desk.publish("m", pages=LARGE_PAGES)
    desk.publish("b", pages=behind)
    desk.fail(middle)
    rest = desk.reserve("rest", pages=LARGE_PAGES - 1)
    pin = desk.reserve("pin")
    desk.abort(rest.token)
    assert (at(desk, "a"), pin.slot.offset_bytes, at(desk, "b")) == (0, LARGE_BYTES, 2 * LARGE_PAGES)
    return desk


def test_large_slots_are_judged_by_the_large_alignment() -> None:
    """A gap that is long enough but for the alignment does not count."""
    desk = desk_with_a_pin_on_the_boundary(behind=LARGE_PAGES)
    with pytest.raises(MemoryExhaustedError):
        desk.reserve("n", pages=2 * LARGE_PAGES - ALIGNMENT_PAGES + 1)
    assert gone(desk, "ab") == ""
    desk.lease(desk.payload("a").payload_id)
    granted = desk.reserve("n", pages=2 * LARGE_PAGES - ALIGNMENT_PAGES)
    assert granted.slot.offset_bytes == LARGE_BYTES + LARGE_ALIGNMENT_BYTES
    assert gone(desk, "ab") == "b"


def test_a_slot_that_becomes_large_by_rounding_is_judged_as_large() -> None:
    """One byte less than large is large, because slots are whole pages."""
    desk = desk_with_a_pin_on_the_boundary(behind=100)
    lease = desk.lease(desk.payload("a").payload_id)
    almost = {"client_id": "producer", "attached": True, "spec": spec(key="n"), "slot_bytes": LARGE_BYTES - 1}
    with pytest.raises(MemoryExhaustedError):
        desk.do(desk.ledger.reserve, **almost)
    assert gone(desk, "ab") == ""
    desk.release(lease)
    assert desk.do(desk.ledger.reserve, **almost).slot.offset_bytes == 0
    assert gone(desk, "ab") == "a"


def test_the_slot_is_retired_and_freed_before_it_is_granted_again() -> None:
    """The shell can carry the effects out one by one."""
    desk = filled(2)
    del desk.effects[:]
    desk.reserve("n", pages=2)
    assert [type(effect) for effect in desk.effects] == [PayloadEnded, SlotRetired, SlotFreed, SlotGranted]


def test_what_is_due_goes_before_anybody_is_evicted() -> None:
    """A ledger that is behind with its deadlines catches up before it takes memory from the living."""
    desk = Desk(pages=4, events_per_call_max=1)
    for key in "abc":
        desk.publish(key)
    desk.wait(LINGER_SECONDS / 2)
    desk.publish("d")
    desk.wait(LINGER_SECONDS / 2, processing=False)
    desk.publish("n", pages=3)
    assert desk.is_there("d")
    assert {desk.tombstone(key).reason for key in "abc"} == {Reason.PAYLOAD_EXPIRED}
