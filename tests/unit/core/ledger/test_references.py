"""Leases and holds: how they keep a payload, and how it goes when they do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbridge.core.errors import NotYoursError, UnknownReferenceError, WrongStateError
from kvbridge.core.ledger import PayloadState, SlotFreed, SlotRetired
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.desk import (
    LEASE_SECONDS,
    LINGER_SECONDS,
    LONG_SECONDS,
    TTL_SECONDS,
    Desk,
    text,
)


def test_a_lease_names_the_slot() -> None:
    """The consumer is told where the bytes are and for how long they are its."""
    desk = Desk()
    reservation = desk.reserve()
    payload_id = desk.commit(reservation.token).payload_id
    grant = desk.do(desk.ledger.lease, client_id="consumer", attached=True, payload_id=payload_id)
    assert (grant.slot, grant.slot_generation) == (reservation.slot, reservation.slot_generation)
    assert (grant.reference, grant.ttl_seconds) == (reservation.reference, LEASE_SECONDS)


def test_an_unreferenced_payload_lingers_and_goes() -> None:
    """The linger runs from commit if nobody comes."""
    desk = Desk()
    desk.publish(fallback=text("it was here"))
    desk.wait(LINGER_SECONDS - 0.001)
    assert desk.payload().ends_at == LINGER_SECONDS
    desk.wait(0.001)
    tombstone = desk.tombstone()
    assert (tombstone.reason, tombstone.fallback) == (Reason.PAYLOAD_EXPIRED, text("it was here"))
    assert "nobody referenced it for 10 s" in tombstone.detail
    assert desk.ledger.usage().payloads == 0


def test_a_reference_stops_the_linger_and_its_end_starts_it_anew() -> None:
    """The linger counts from the moment at which the last reference goes, and in full."""
    desk = Desk()
    payload_id = desk.publish()
    desk.wait(LINGER_SECONDS - 1)
    one, two = desk.lease(payload_id), desk.lease(payload_id)
    desk.wait(5)
    desk.release(one)
    desk.wait(LINGER_SECONDS + 1)
    assert desk.payload().leases == 1
    desk.release(two)
    assert desk.payload().ends_at == desk.now + LINGER_SECONDS
    desk.wait(LINGER_SECONDS - 1)
    assert desk.is_there()
    desk.wait(1)
    assert desk.has_ended()


def test_a_producer_chooses_linger_and_time_to_live() -> None:
    """What the spec says replaces the ledger's default."""
    desk = Desk()
    desk.publish("short", linger_seconds=2.0)
    desk.lease(desk.publish("long", ttl_seconds=7.0))
    assert (desk.payload("short").ends_at, desk.payload("long").ends_at) == (2.0, 7.0)


def test_without_linger_a_payload_goes_with_its_last_reference() -> None:
    """A linger of 0 means until nobody holds it."""
    desk = Desk()
    committed = desk.commit(desk.reserve(linger_seconds=0.0).token, hold=True)
    assert committed.hold is not None
    desk.wait(1)
    desk.release(committed.hold.token, client="producer")
    assert desk.tombstone().reason is Reason.PAYLOAD_EXPIRED


def test_the_time_to_live_ends_new_leases_but_not_old_ones() -> None:
    """A payload that is too old drains: its leases go on, may be renewed, and the last one frees it."""
    desk = Desk()
    payload_id = desk.publish()
    lease = desk.lease(payload_id)
    while desk.now < TTL_SECONDS:
        desk.wait(10)
        assert desk.renew(lease) == [LEASE_SECONDS]
    assert desk.tombstone().reason is Reason.PAYLOAD_EXPIRED
    assert "time to live of 100 s" in desk.tombstone().detail
    with pytest.raises(WrongStateError, match="DRAINING"):
        desk.lease(payload_id)
    payload = desk.do(desk.ledger.payload_of, client_id="consumer", token=lease)
    assert (payload.state, payload.ends_at) == (PayloadState.DRAINING, None)
    assert not desk.effects_of(SlotRetired)
    assert desk.release(lease) == set()
    assert [type(effect) for effect in desk.effects[-2:]] == [SlotRetired, SlotFreed]


def test_the_time_to_live_ends_an_unreferenced_payload_too() -> None:
    """A linger does not outlast it."""
    desk = Desk()
    desk.publish(ttl_seconds=3.0)
    assert desk.payload().ends_at == 3
    desk.wait(3)
    assert "time to live of 3 s" in desk.tombstone().detail
    assert desk.ledger.usage().payloads == 0


def test_the_time_to_live_counts_from_commit() -> None:
    """A slow producer does not shorten the life of what it publishes."""
    desk = Desk()
    grant = desk.reserve()
    desk.wait(4)
    desk.commit(grant.token)
    desk.lease(grant.payload_id)
    assert desk.payload().ends_at == 4 + TTL_SECONDS


def test_an_expired_lease_is_gone() -> None:
    """Without renewal it lasts its time, and what it was good for is refused from then on."""
    desk = Desk()
    lease = desk.lease(desk.publish(), attached=False)
    desk.wait(LEASE_SECONDS - 1)
    assert desk.renew(lease) == [LEASE_SECONDS]
    desk.wait(LEASE_SECONDS)
    with pytest.raises(UnknownReferenceError, match="lease_token"):
        desk.do(desk.ledger.payload_of, client_id="consumer", token=lease)
    assert desk.payload().leases == 0
    assert desk.renew(lease) == [None]
    assert desk.release(lease) == {lease}
    with pytest.raises(UnknownReferenceError):
        desk.release(lease)


def test_only_a_live_lease_of_ones_own_opens_a_payload() -> None:
    """Other kinds, other clients and made-up tokens do not."""
    desk = Desk()
    committed = desk.commit(desk.reserve().token, hold=True)
    assert committed.hold is not None
    lease = desk.lease(committed.payload_id)
    assert desk.do(desk.ledger.payload_of, client_id="consumer", token=lease) == desk.payload()
    with pytest.raises(NotYoursError, match="lease_token"):
        desk.do(desk.ledger.payload_of, client_id="thief", token=lease)
    for client, token in (("producer", committed.hold.token), ("consumer", "unheard of")):
        with pytest.raises(UnknownReferenceError, match="lease_token"):
            desk.do(desk.ledger.payload_of, client_id=client, token=token)


@pytest.mark.parametrize("reason", [Reason.PAYLOAD_CORRUPT, Reason.VALUES_NOT_FINITE, Reason.QUARANTINED])
def test_a_lease_on_what_was_found_bad_opens_nothing(reason: Reason) -> None:
    """Who is sent the bytes does not see the header, so whoever sends them learns here; the lease itself goes on."""
    desk = Desk()
    payload_id = desk.publish()
    lease = desk.lease(payload_id, attached=False)
    assert desk.do(desk.ledger.fail, payload_id=payload_id, reason=reason, detail="a finding")
    with pytest.raises(UnknownReferenceError, match=reason):
        desk.do(desk.ledger.payload_of, client_id="consumer", token=lease)
    assert desk.renew(lease) == [LEASE_SECONDS]
    assert desk.release(lease) == set()


def bad_tokens(desk: Desk) -> dict[str, tuple[str, type[Exception]]]:
    """Return tokens that spoil a release, with the error that each of them causes."""
    desk.release(released := desk.lease(desk.publish("a")))
    return {
        "released": (released, UnknownReferenceError),
        "unheard of": ("unheard of", UnknownReferenceError),
        "another's": (desk.lease(desk.publish("b"), client="another"), NotYoursError),
        "reservation": (desk.reserve("c", client="consumer").token, UnknownReferenceError),
    }


@pytest.mark.parametrize("kind", ["released", "unheard of", "another's", "reservation"])
def test_a_release_is_all_or_nothing(kind: str) -> None:
    """One token that is refused keeps all others, and the error says which it is."""
    desk = Desk()
    good = desk.lease(desk.publish())
    bad, error = bad_tokens(desk)[kind]
    with pytest.raises(error, match=r"tokens\[1\]"):
        desk.release(good, bad)
    assert desk.payload().leases == 1
    assert desk.release(good, good) == set()


@pytest.mark.parametrize("attached", [True, False])
def test_a_release_tells_what_had_expired(attached: bool) -> None:
    """What was read after the expiry must be discarded, so that the client is told, not scolded."""
    desk = Desk()
    payload_id = desk.publish()
    late = desk.lease(payload_id, attached=attached)
    desk.wait(LEASE_SECONDS / 2)
    good = desk.lease(payload_id)
    desk.wait(LEASE_SECONDS / 2)
    assert desk.release(late, good) == {late}


def test_a_renewal_answers_for_each_token() -> None:
    """Live ones get their time, everything else None; another client's token spoils it all."""
    desk = Desk()
    payload_id = desk.publish()
    late = desk.lease(payload_id)
    desk.wait(LEASE_SECONDS / 2)
    good = desk.lease(payload_id)
    desk.wait(LEASE_SECONDS / 2)
    own = desk.lease(payload_id, client="another")
    with pytest.raises(NotYoursError, match=r"tokens\[1\]"):
        desk.renew(own, good, client="another")
    assert desk.renew(late, good, "unheard of", good, late) == [None, LEASE_SECONDS, None, LEASE_SECONDS, None]
    assert desk.release(late) == {late}, "a client that heard of the expiry by renewal may still release"


def test_a_client_that_dies_returns_everything() -> None:
    """Holds and leases go at once, and the linger starts."""
    desk = Desk()
    committed = desk.commit(desk.reserve(client="both").token, client="both", hold=True)
    desk.lease(committed.payload_id, client="both")
    desk.wait(3)
    assert desk.end("both") == 2
    payload = desk.payload()
    assert (payload.holds, payload.leases, payload.ends_at) == (0, 0, 3 + LINGER_SECONDS)


def test_a_corrupt_payload_is_told_to_its_readers_at_once() -> None:
    """The header is retired while leases live; nobody gets a new one; the memory waits for the last."""
    desk = Desk()
    payload_id = desk.publish()
    lease = desk.lease(payload_id)
    assert desk.fail(payload_id, Reason.PAYLOAD_CORRUPT, "layer 0 differs")
    [retired] = desk.effects_of(SlotRetired)
    assert isinstance(retired, SlotRetired)
    assert retired.why is Reason.PAYLOAD_CORRUPT
    assert (desk.tombstone().reason, desk.tombstone().detail) == (Reason.PAYLOAD_CORRUPT, "layer 0 differs")
    with pytest.raises(WrongStateError):
        desk.lease(payload_id)
    assert desk.ledger.usage().draining_bytes > 0
    desk.release(lease)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes
    assert desk.effects_of(SlotRetired) == [retired]


def test_corruption_is_the_last_word() -> None:
    """A payload that drains for another reason is called corrupt as soon as that is known."""
    desk = Desk()
    payload_id = desk.publish(ttl_seconds=5.0)
    desk.lease(payload_id)
    desk.wait(5)
    assert desk.tombstone().reason is Reason.PAYLOAD_EXPIRED
    assert desk.fail(payload_id)
    assert desk.tombstone().reason is Reason.PAYLOAD_CORRUPT
    assert desk.ledger.usage().tombstones == 1


def test_a_newer_generation_is_not_replaced_by_an_older_one_when_it_fails() -> None:
    """What a newer commit superseded is never served without being named."""
    desk = Desk()
    desk.publish(ttl_seconds=LONG_SECONDS / 2, linger_seconds=50.0)
    newer = desk.publish()
    desk.fail(newer)
    assert desk.tombstone().reference.generation == 2
    assert desk.payload(generation=1).superseded


ENDINGS: dict[str, Callable[[Desk, int], object]] = {
    "linger": lambda desk, _: desk.wait(LINGER_SECONDS),
    "failure": lambda desk, payload_id: desk.fail(payload_id),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_payload_that_is_gone_cannot_be_leased(ending: str) -> None:
    """An id that outlived its payload is a wrong state, never another payload."""
    desk = Desk()
    payload_id = desk.publish()
    ENDINGS[ending](desk, payload_id)
    desk.publish()
    with pytest.raises(WrongStateError, match="payload_id"):
        desk.lease(payload_id)
