"""Which generation of a key a consumer finds, and that none comes twice."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.ledger import Payload, PayloadState, Tombstone
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.desk import LINGER_SECONDS, RESERVATION_SECONDS, Desk, text


def generations(desk: Desk, key: str = "k", count: int = 3) -> list[int]:
    """Publish a key several times and return the generations."""
    return [desk.commit(desk.reserve(key).token).descriptor.reference.generation for _ in range(count)]


def test_generations_count_from_one_for_each_key() -> None:
    """Keys do not share generations while nothing has been forgotten."""
    desk = Desk()
    assert generations(desk, "a") == generations(desk, "b") == [1, 2, 3]


def test_nothing_is_found_under_a_key_that_nobody_published() -> None:
    """Neither with nor without a generation."""
    desk = Desk()
    desk.publish("a")
    assert desk.find("b") is desk.find("b", 1) is desk.find("a", 2) is None
    assert desk.occupant("b") is desk.occupant("a", 2) is None


def test_the_newest_committed_generation_is_found() -> None:
    """A newer one that is not committed yet hides nothing."""
    desk = Desk()
    generations(desk, count=2)
    grant = desk.reserve()
    assert desk.payload().reference.generation == 2
    desk.begin(grant.token)
    assert desk.payload().reference.generation == 2
    desk.finish(grant.payload_id)
    assert desk.payload().reference.generation == 3


def test_the_newest_pending_generation_is_found_if_none_is_committed() -> None:
    """So that the consumer is told to ask again, rather than to take the text of something older."""
    desk = Desk()
    desk.abort(desk.reserve().token)
    desk.begin(desk.reserve().token)
    assert (desk.payload().reference.generation, desk.payload().state) == (2, PayloadState.VERIFYING)
    desk.reserve()
    assert (desk.payload().reference.generation, desk.payload().state) == (3, PayloadState.RESERVED)


def test_the_newest_tombstone_is_found_if_nothing_else_is_left() -> None:
    """Newest by generation, whichever ended last."""
    desk = Desk()
    first, second = desk.reserve(fallback=text("old")), desk.reserve(fallback=text("new"))
    desk.abort(second.token)
    assert desk.payload().reference.generation == 1
    desk.abort(first.token)
    assert desk.tombstone().fallback == text("new")
    assert desk.tombstone(generation=1).fallback == text("old")


def test_a_superseded_generation_is_found_by_number_alone() -> None:
    """It may still be leased until its linger ends."""
    desk = Desk()
    generations(desk, count=2)
    older = desk.payload(generation=1)
    assert (older.superseded, desk.payload().superseded) == (True, False)
    lease = desk.lease(older.payload_id)
    desk.wait(LINGER_SECONDS)
    assert desk.payload(generation=1).leases == 1
    assert desk.tombstone().reference.generation == 2
    desk.release(lease)
    desk.wait(LINGER_SECONDS)
    assert desk.tombstone(generation=1).reason is Reason.PAYLOAD_EXPIRED


def test_a_generation_that_is_committed_late_is_superseded_from_the_start() -> None:
    """The order of reservation decides, and nobody is told to wait for what is out of date."""
    desk = Desk()
    older, newer = desk.reserve(), desk.reserve()
    desk.commit(newer.token)
    desk.fail(newer.payload_id)
    assert desk.tombstone().reference.generation == 2
    desk.commit(older.token)
    assert desk.payload(generation=1).superseded
    assert desk.tombstone().reference.generation == 2


def test_a_draining_payload_is_found_as_what_it_will_be() -> None:
    """Nobody can lease it any more, so that asking for it by number gives the reason too; people still see it."""
    desk = Desk()
    payload_id = desk.publish()
    desk.lease(payload_id)
    desk.fail(payload_id)
    assert desk.tombstone(generation=1) == desk.tombstone()
    for occupant in (desk.occupant(), desk.occupant(generation=1)):
        assert occupant is not None
        assert occupant.state is PayloadState.DRAINING


def test_a_refused_reservation_has_a_generation_and_a_tombstone_of_its_own() -> None:
    """Consumers get the text at once, unless an older generation can be had."""
    desk = Desk(pages=4)
    with pytest.raises(MemoryExhaustedError):
        desk.reserve(pages=5, fallback=text("too long"))
    tombstone = desk.tombstone()
    assert (tombstone.reference.generation, tombstone.reason) == (1, Reason.MEMORY_EXHAUSTED)
    assert tombstone.fallback == text("too long")
    desk.publish()
    with pytest.raises(MemoryExhaustedError):
        desk.reserve(pages=5)
    assert desk.payload().reference.generation == 2
    assert desk.tombstone(generation=3).reason is Reason.MEMORY_EXHAUSTED


def test_looking_is_not_using() -> None:
    """A consumer that only asks does not keep a payload from being evicted first."""
    desk = Desk(pages=2)
    desk.publish("a")
    desk.publish("b")
    desk.payload("a")
    desk.publish("c")
    assert isinstance(desk.find("a"), Tombstone)
    assert isinstance(desk.find("b"), Payload)


@pytest.mark.parametrize("kept", [1, 3])
def test_no_generation_repeats_although_keys_are_forgotten(kept: int) -> None:
    """With few tombstones every key is soon forgotten, and comes back with a greater generation."""
    desk = Desk(tombstones_max=kept)
    last: dict[str, int] = {}
    for turn in range(60):
        key = f"key {turn * turn % 7}"
        grant = desk.reserve(key)
        assert grant.reference.generation > last.get(key, 0)
        last[key] = grant.reference.generation
        desk.abort(grant.token)
    assert len(last) > kept
    assert desk.ledger.snapshot()["keys"] == kept


def test_a_key_is_not_forgotten_while_it_has_a_payload() -> None:
    """Forgetting the tombstones of other generations does not restart the count."""
    desk = Desk(tombstones_max=1)
    generations(desk, count=2)
    desk.abort(desk.reserve().token)
    desk.abort(desk.reserve("other").token)
    assert desk.find(generation=3) is None
    assert desk.reserve().reference.generation == 4
    assert desk.payload().reference.generation == 2


def test_an_expired_reservation_uncovers_what_was_there_before() -> None:
    """The tombstone of the newer generation does not hide the committed older one."""
    desk = Desk()
    desk.publish()
    desk.reserve()
    desk.wait(RESERVATION_SECONDS)
    assert desk.payload().reference.generation == 1
    assert desk.has_ended(generation=2)


def test_generations_go_on_above_those_of_an_earlier_life() -> None:
    """For keys that were known then and for those that were not; nothing is found under what came before."""
    desk = Desk()
    desk.ledger.number_above(1000)
    desk.ledger.number_above(10)  # Never back.
    assert generations(desk, "a") == generations(desk, "b") == [1001, 1002, 1003]
    assert desk.find("a", 1) is desk.find("a", 1000) is None
    assert desk.payload("a").reference.generation == 1003


def test_nothing_is_numbered_anew_once_there_is_something() -> None:
    """That would be two orders under one key."""
    desk = Desk()
    desk.reserve()
    with pytest.raises(AssertionError):
        desk.ledger.number_above(5)
