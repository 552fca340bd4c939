"""Deadlines that are processed late, and calls that come first."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import UnknownReferenceError, WrongStateError
from kvbridge.core.ledger import PayloadEnded, Tombstone
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.desk import LEASE_SECONDS, LINGER_SECONDS, RESERVATION_SECONDS, TTL_SECONDS, Desk

CROWD = 20


def late_desk() -> Desk:
    """Return a ledger that processes one deadline in each call, with a crowd of deadlines at linger's end."""
    desk = Desk(events_per_call_max=1)
    for number in range(CROWD):
        desk.publish(f"crowd {number}")
    return desk


def fall_behind(desk: Desk) -> None:
    """Let all that happened so far become due without processing any of it."""
    desk.wait(TTL_SECONDS, processing=False)


def backlog(desk: Desk) -> int:
    """Return how many of the crowd are still there."""
    return len(desk.ledger.payloads(key_prefix="crowd", page_size=100).payloads)


def test_advance_does_a_bounded_amount_of_work() -> None:
    """It tells whether more is due, so that the shell can breathe in between."""
    desk = late_desk()
    assert not desk.ledger.advance(now=0.0, events_max=5)
    desk.wait(LINGER_SECONDS, processing=False)
    for left in (15, 10, 5):
        assert desk.ledger.advance(now=desk.now, events_max=5)
        assert backlog(desk) == left
    assert not desk.ledger.advance(now=desk.now, events_max=5)
    assert backlog(desk) == 0


def test_every_call_processes_a_few_deadlines_on_the_side() -> None:
    """Without `advance` the ledger still comes to an end with what is due."""
    desk = late_desk()
    fall_behind(desk)
    for left in range(CROWD - 1, -1, -1):
        desk.find("nothing")
        assert backlog(desk) == left


def test_an_expired_reference_is_never_live_however_late_the_processing() -> None:
    """The clock decides, not the progress of the ledger."""
    desk = late_desk()
    payload_id = desk.publish()
    lease = desk.lease(payload_id)
    reservation = desk.reserve("r").token
    fall_behind(desk)
    with pytest.raises(UnknownReferenceError):
        desk.do(desk.ledger.payload_of, client_id="consumer", token=lease)
    with pytest.raises(UnknownReferenceError):
        desk.begin(reservation)
    assert desk.renew(lease) == [None]
    assert desk.renew(reservation, client="producer") == [None]
    assert backlog(desk) > 0


def test_a_reference_expires_at_its_deadline_exactly() -> None:
    """The last moment at which it is live is the one before, also for a ledger that is behind."""
    desk = late_desk()
    payload_id = desk.publish(linger_seconds=1000.0)
    early, late = desk.lease(payload_id), desk.lease(payload_id)
    desk.wait(LEASE_SECONDS - 0.001, processing=False)
    assert desk.do(desk.ledger.payload_of, client_id="consumer", token=early).payload_id == payload_id
    desk.wait(0.001, processing=False)
    with pytest.raises(UnknownReferenceError):
        desk.do(desk.ledger.payload_of, client_id="consumer", token=late)
    assert backlog(desk) > 0


def test_a_late_release_is_told_so_however_late_the_processing() -> None:
    """The bytes may have been reused in the meantime for all that the ledger promises."""
    desk = late_desk()
    lease, other = desk.lease(desk.publish()), desk.lease(desk.publish("o"), attached=False)
    fall_behind(desk)
    assert desk.release(lease, other) == {lease, other}
    assert backlog(desk) > 0


def test_a_payload_whose_time_has_come_is_not_leased_however_late_the_processing() -> None:
    """Asking for it, or naming it, ends it first."""
    desk = late_desk()
    first, _ = desk.publish("a"), desk.publish("b")
    desk.reserve("c")
    fall_behind(desk)
    with pytest.raises(WrongStateError):
        desk.lease(first)
    assert desk.tombstone("b").ended_at == LINGER_SECONDS
    assert desk.tombstone("c").ended_at == RESERVATION_SECONDS
    assert backlog(desk) > 0


def test_what_ends_uncovers_nothing_that_has_ended_too() -> None:
    """Asking goes on until it meets something whose time has not come."""
    desk = late_desk()
    for _ in range(5):
        desk.reserve()
    fall_behind(desk)
    assert desk.tombstone().reference.generation == 5
    assert backlog(desk) > 0


def test_the_death_of_a_client_that_is_late_is_processed_late() -> None:
    """Its expired references count among those that it had; what they kept lingers from their expiry on."""
    desk = late_desk()
    desk.lease(desk.publish(linger_seconds=1000.0), client="both", attached=False)
    desk.lease(desk.payload().payload_id, client="both")
    desk.reserve("r", client="both")
    fall_behind(desk)
    assert desk.end("both") == 3
    assert backlog(desk) > 0
    desk.wait(0)
    assert desk.ledger.usage().residues == 0


def test_deadlines_act_as_of_their_own_time() -> None:
    """Processing everything hours later ends the same payloads at the same times for the same reasons."""
    endings = []
    for punctual in (True, False):
        desk = Desk()
        desk.lease(desk.publish("leased"))
        desk.publish("lingering")
        desk.reserve("reserved")
        desk.lease(desk.publish("short", ttl_seconds=7.0))
        for _ in range(100 if punctual else 1):
            desk.wait(1 if punctual else 100)
        found = {key: desk.find(key) for key in ("leased", "lingering", "reserved", "short")}
        assert all(isinstance(tombstone, Tombstone) for tombstone in found.values())
        order = [effect.reference.key for effect in desk.effects if isinstance(effect, PayloadEnded)]
        endings.append((found, order))
    assert endings[0] == endings[1]
    assert endings[0][0]["leased"] is not None
    assert endings[0][1] == ["reserved", "short", "lingering", "leased"]
    tombstone = endings[0][0]["leased"]
    assert isinstance(tombstone, Tombstone)
    assert (tombstone.ended_at, tombstone.reason) == (LEASE_SECONDS + LINGER_SECONDS, Reason.PAYLOAD_EXPIRED)


def test_the_next_deadline_is_the_earliest() -> None:
    """It follows grants, renewals and ends."""
    desk = Desk()
    assert desk.ledger.next_deadline() is None
    grant = desk.reserve()
    assert desk.ledger.next_deadline() == RESERVATION_SECONDS
    desk.wait(2)
    desk.renew(grant.token, client="producer")
    assert desk.ledger.next_deadline() == 2 + RESERVATION_SECONDS
    desk.begin(grant.token)
    assert desk.ledger.next_deadline() is None
    desk.finish(grant.payload_id)
    assert desk.ledger.next_deadline() == 2 + LINGER_SECONDS
    lease = desk.lease(grant.payload_id)
    assert desk.ledger.next_deadline() == 2 + LEASE_SECONDS
    desk.release(lease)
    assert desk.ledger.next_deadline() == 2 + LINGER_SECONDS
    desk.fail(grant.payload_id)
    assert desk.ledger.next_deadline() is None


def test_time_does_not_go_back() -> None:
    """A shell whose clock does is broken."""
    desk = Desk()
    desk.wait(1)
    desk.now = 0.5
    with pytest.raises(AssertionError, match="went back"):
        desk.find()
