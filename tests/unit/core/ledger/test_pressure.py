"""What goes before the arena is full, and what a producer is told once it is."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger.pressure import RETRY_SECONDS_MAX, RETRY_SECONDS_MIN
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.desk import LEASE_SECONDS, LINGER_SECONDS, LONG_SECONDS, Desk


def relieve(desk: Desk) -> None:
    """Keep some memory free, two payloads at a time."""
    while desk.do(desk.ledger.relieve, events_max=2):
        pass


def gone(desk: Desk, keys: str) -> str:
    """Return which of these one-letter keys have ended."""
    return "".join(key for key in keys if desk.has_ended(key))


def test_above_the_soft_watermark_the_least_recently_used_go() -> None:
    """As many as it takes and no more; consumers are told that memory was short."""
    desk = Desk(pages=10, memory_soft_watermark=0.5)
    for key in "abcdefgh":
        desk.publish(key)
    desk.release(desk.lease(desk.payload("a").payload_id))
    assert desk.ledger.pressed
    relieve(desk)
    assert gone(desk, "abcdefgh") == "bcd"
    assert desk.tombstone("b").reason is Reason.MEMORY_EXHAUSTED
    assert not desk.ledger.pressed


def test_below_the_soft_watermark_nobody_goes() -> None:
    """Exactly at it is below."""
    desk = Desk(pages=10, memory_soft_watermark=0.5)
    for key in "abcde":
        desk.publish(key)
    relieve(desk)
    assert gone(desk, "abcde") == ""


def test_what_is_referenced_or_not_committed_is_no_victim() -> None:
    """However far above the watermark the arena is."""
    desk = Desk(pages=5, memory_soft_watermark=0.1)
    desk.lease(desk.publish("a"))
    desk.commit(desk.reserve("b").token, hold=True)
    desk.reserve("c")
    desk.begin(desk.reserve("d").token)
    desk.publish("e")
    relieve(desk)
    assert gone(desk, "abcde") == ""


def test_the_most_recently_used_payload_stays_whatever_its_size() -> None:
    """An arena that one payload fills is of use to whoever asks for that."""
    desk = Desk(pages=4, memory_soft_watermark=0.5)
    desk.publish("a", pages=4)
    relieve(desk)
    assert desk.is_there("a")
    desk.publish("b", pages=4)
    relieve(desk)
    assert gone(desk, "ab") == "a"


def test_what_is_due_goes_before_anybody_is_evicted() -> None:
    """A ledger that is behind with its deadlines frees what has expired first."""
    desk = Desk(pages=4, memory_soft_watermark=0.5, events_per_call_max=1)
    for key in "abc":
        desk.publish(key)
    desk.wait(LINGER_SECONDS / 2)
    desk.publish("d")
    desk.wait(LINGER_SECONDS / 2, processing=False)
    relieve(desk)
    assert {desk.tombstone(key).reason for key in "abc"} == {Reason.PAYLOAD_EXPIRED}
    assert desk.is_there("d")


def test_above_the_hard_watermark_nothing_more_is_lent() -> None:
    """What is referenced counts, what can be evicted does not."""
    desk = Desk(pages=10, memory_hard_watermark=0.5)
    desk.publish("b", pages=5)
    lease = desk.lease(desk.publish("a", pages=3))
    with pytest.raises(MemoryExhaustedError) as refusal:
        desk.reserve("n", pages=3)
    assert refusal.value.available_bytes == 2 * PAGE_BYTES
    assert gone(desk, "ab") == ""
    desk.release(lease)
    desk.reserve("n", pages=5)
    assert gone(desk, "ab") == "b"


def test_what_has_expired_does_not_count_against_the_hard_watermark() -> None:
    """Nothing is refused for the sake of a lease that has run out."""
    desk = Desk(pages=10, memory_hard_watermark=0.5, events_per_call_max=1)
    for key in "abcd":
        desk.lease(desk.publish(key, linger_seconds=LONG_SECONDS / 2), attached=False)
    desk.wait(LEASE_SECONDS, processing=False)
    desk.reserve("n", pages=5)


def refusal_of(desk: Desk) -> MemoryExhaustedError:
    """Return how a reservation is refused that is as long as the arena."""
    with pytest.raises(MemoryExhaustedError) as refusal:
        desk.reserve("n", pages=4)
    return refusal.value


def test_a_refusal_says_when_the_next_reference_runs_out() -> None:
    """That is when memory may be free, if nobody renews."""
    desk = Desk(pages=4)
    desk.lease(desk.publish("a", linger_seconds=LONG_SECONDS / 2))
    desk.wait(LEASE_SECONDS / 2)
    assert refusal_of(desk).retry_after_seconds == LEASE_SECONDS / 2


def test_the_time_to_wait_is_bounded() -> None:
    """Neither is a bridge asked all the time, nor is a reference waited for that may well come back early."""
    desk = Desk(pages=4, lease_ttl_seconds=10 * RETRY_SECONDS_MAX, ttl_seconds_default=LONG_SECONDS / 2)
    desk.lease(desk.publish("a"))
    assert refusal_of(desk).retry_after_seconds == RETRY_SECONDS_MAX
    desk.wait(10 * RETRY_SECONDS_MAX - RETRY_SECONDS_MIN / 2)
    assert refusal_of(desk).retry_after_seconds == RETRY_SECONDS_MIN
