"""Memory that somebody may still be touching is not lent again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.ledger import PayloadState, SlotFreed, SlotRetired
from tests.unit.core.ledger.desk import (
    HOLD_SECONDS,
    LEASE_SECONDS,
    LINGER_SECONDS,
    LONG_SECONDS,
    RESERVATION_SECONDS,
    Desk,
)

ACKNOWLEDGEMENTS: dict[str, Callable[[Desk, str], object]] = {
    "release": lambda desk, token: desk.release(token, client="mapper"),
    "death": lambda desk, _: desk.end("mapper"),
}
PAGES = 4


def full_desk_with_expired_lease() -> tuple[Desk, str]:
    """Return an arena that is full of one payload, whose lease expired and whose linger then ended."""
    desk = Desk(pages=PAGES)
    lease = desk.lease(desk.publish(pages=PAGES), client="mapper")
    desk.wait(LEASE_SECONDS + LINGER_SECONDS)
    return desk, lease


def quarantined(desk: Desk) -> bool:
    """Tell whether the arena's one payload is quarantined, and nothing of it free."""
    occupant, usage = desk.occupant(), desk.ledger.usage()
    isolated = occupant is not None and occupant.state is PayloadState.QUARANTINED
    assert usage.quarantined_bytes == (usage.arena_bytes if isolated else 0)
    return isolated


@pytest.mark.parametrize("acknowledge", ACKNOWLEDGEMENTS.values(), ids=ACKNOWLEDGEMENTS)
def test_an_expired_lease_of_a_mapping_client_isolates_the_slot(acknowledge: Callable[[Desk, str], object]) -> None:
    """The payload is over, but its bytes wait until the late reader has spoken or died."""
    desk, lease = full_desk_with_expired_lease()
    assert quarantined(desk)
    assert desk.has_ended()
    assert len(desk.effects_of(SlotRetired)) == 1
    with pytest.raises(MemoryExhaustedError):
        desk.reserve("next")
    desk.wait(LONG_SECONDS)
    assert quarantined(desk)
    acknowledge(desk, lease)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes
    assert isinstance(desk.effects[-1], SlotFreed)
    assert len(desk.effects_of(SlotRetired)) == 1


@pytest.mark.parametrize("acknowledge", [*ACKNOWLEDGEMENTS, "abort"])
def test_an_expired_reservation_of_a_mapping_client_isolates_the_slot(acknowledge: str) -> None:
    """A writer that is late may still be writing."""
    desk = Desk(pages=PAGES)
    token = desk.reserve(pages=PAGES, client="mapper").token
    desk.wait(RESERVATION_SECONDS)
    assert quarantined(desk)
    if acknowledge == "abort":
        desk.abort(token, client="mapper")
    else:
        ACKNOWLEDGEMENTS[acknowledge](desk, token)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


def test_a_client_without_a_mapping_isolates_nothing() -> None:
    """It cannot touch the bytes, so that its expiry frees them."""
    desk = Desk(pages=PAGES)
    desk.lease(desk.publish(pages=2), attached=False)
    desk.reserve("other", pages=2, attached=False)
    desk.wait(LEASE_SECONDS + LINGER_SECONDS)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


def test_an_expired_hold_isolates_nothing() -> None:
    """A producer gave up its right to touch the bytes at commit."""
    desk = Desk()
    assert desk.commit(desk.reserve(attached=True).token, hold=True).hold
    desk.wait(HOLD_SECONDS + LINGER_SECONDS)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


def test_a_released_lease_isolates_nothing() -> None:
    """Who says in time that it is done needs no acknowledgement."""
    desk = Desk()
    desk.release(desk.lease(desk.publish()))
    desk.wait(LINGER_SECONDS)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


def test_every_late_client_must_acknowledge() -> None:
    """One of two late readers is not enough, nor is one of two tokens of the same reader."""
    desk = Desk()
    payload_id = desk.publish()
    first, second = desk.lease(payload_id, client="mapper"), desk.lease(payload_id, client="mapper")
    third = desk.lease(payload_id, client="other")
    desk.wait(LEASE_SECONDS + LINGER_SECONDS)
    assert desk.ledger.usage().residues == 3
    desk.release(first, client="mapper")
    desk.release(third, client="other")
    assert desk.ledger.usage().quarantined_bytes > 0
    desk.release(second, client="mapper")
    assert desk.ledger.usage().quarantined_bytes == 0


def test_a_residue_does_not_end_a_payload_that_others_use() -> None:
    """The payload goes on for its live references, and the residue may be acknowledged before or after its end."""
    desk = Desk()
    payload_id = desk.publish()
    late = desk.lease(payload_id)
    desk.wait(LEASE_SECONDS - 1)
    good = desk.lease(payload_id, client="another")
    desk.wait(1)
    assert (desk.payload().leases, desk.payload().residues) == (1, 1)
    assert desk.release(late) == {late}
    assert (desk.payload().leases, desk.payload().residues) == (1, 0)
    desk.release(good, client="another")
    desk.wait(LINGER_SECONDS)
    assert desk.ledger.usage().payloads == 0


def test_a_residue_keeps_a_payload_from_being_evicted() -> None:
    """Evicting it would give no memory, so that somebody else goes or nobody."""
    desk = Desk(pages=PAGES)
    late = desk.lease(desk.publish("late", pages=2, linger_seconds=LONG_SECONDS / 2))
    desk.publish("newer", pages=2)
    desk.wait(LEASE_SECONDS)
    desk.publish("newest", pages=2)
    assert desk.is_there("late")
    with pytest.raises(MemoryExhaustedError):
        desk.reserve("too much", pages=3)
    assert desk.is_there("newest")
    desk.release(late)
    desk.reserve("too much", pages=3)
    assert desk.has_ended("late")


def test_the_death_of_another_client_frees_nothing() -> None:
    """Acknowledgement is personal."""
    desk, _ = full_desk_with_expired_lease()
    desk.end("producer")
    desk.end("consumer")
    assert quarantined(desk)


def test_a_late_renewal_does_not_free_what_its_client_may_still_touch() -> None:
    """Clients renew in the background, beside the thread that reads or writes, so a renewal proves nothing."""
    desk, lease = full_desk_with_expired_lease()
    desk.renew(lease, client="mapper")
    desk.renew(lease, client="mapper")
    assert quarantined(desk)
    writing = Desk(pages=PAGES)
    token = writing.reserve(pages=PAGES, client="mapper").token
    writing.wait(RESERVATION_SECONDS)
    writing.renew(token, client="mapper")
    assert quarantined(writing)
