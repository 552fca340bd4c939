"""Reserve, commit, abort: how a payload comes to be, or does not."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.core.descriptor import FallbackText, Verification
from kvbridge.core.errors import InvalidFieldError, NotYoursError, UnknownReferenceError, WrongStateError
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import (
    Committed,
    PayloadEnded,
    PayloadState,
    ReferenceKind,
    Rejected,
    SlotFreed,
    SlotGranted,
    SlotRetired,
    SlotSealed,
)
from kvbridge.core.reasons import Reason
from tests.builders import tokens
from tests.unit.core.ledger.desk import DIGESTS, HOLD_SECONDS, RESERVATION_SECONDS, Desk, text


def test_a_reservation_lends_a_slot() -> None:
    """The grant names token, payload, place and time; the effect tells the shell to write the header."""
    desk = Desk()
    grant = desk.reserve("k", pages=3)
    assert (grant.token, grant.kind, grant.ttl_seconds) == ("token-1", ReferenceKind.RESERVATION, RESERVATION_SECONDS)
    assert (grant.reference.key, grant.reference.generation) == ("k", 1)
    assert grant.slot.length_bytes == 3 * PAGE_BYTES
    assert desk.effects == [
        SlotGranted(payload_id=grant.payload_id, slot=grant.slot, slot_generation=grant.slot_generation)
    ]
    assert desk.payload().state is PayloadState.RESERVED
    assert desk.payload().ends_at == RESERVATION_SECONDS


def test_each_slot_has_a_generation_of_its_own() -> None:
    """A slot at the same place is still another slot."""
    desk = Desk()
    first = desk.reserve()
    desk.abort(first.token)
    second = desk.reserve()
    assert second.slot == first.slot
    assert second.slot_generation > first.slot_generation


def test_beginning_a_commit_seals_the_descriptor() -> None:
    """The verifier is told what was declared at reserve and at commit together."""
    desk = Desk()
    grant = desk.reserve()
    payload = desk.begin(grant.token, valid_length=7, verification=Verification.FULL)
    assert payload.state is PayloadState.VERIFYING
    assert payload.descriptor is not None
    assert payload.descriptor.reference == grant.reference
    assert payload.descriptor.valid_length == 7
    assert payload.descriptor.verified is Verification.FULL
    assert payload.tokens == tokens(7)
    assert payload.committed_at is payload.ends_at is None


def test_a_passed_check_makes_the_payload_available() -> None:
    """Commit ends the reservation and tells the shell to mark the header ready."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token)
    desk.now = 2.0
    committed = desk.finish(grant.payload_id)
    assert isinstance(committed, Committed)
    assert committed.hold is None
    assert committed.descriptor.layer_digests == DIGESTS
    assert desk.effects[-1] == SlotSealed(
        payload_id=grant.payload_id, slot=grant.slot, slot_generation=grant.slot_generation
    )
    payload = desk.payload()
    assert (payload.state, payload.committed_at) == (PayloadState.COMMITTED, 2.0)
    assert payload.descriptor == committed.descriptor
    with pytest.raises(UnknownReferenceError):
        desk.abort(grant.token)


def test_declared_digests_stay_if_the_node_made_none() -> None:
    """A commit without a check keeps what the producer declared for a later check."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token, layer_digests=DIGESTS, verification=Verification.NONE)
    committed = desk.do(
        desk.ledger.finish_commit, payload_id=grant.payload_id, layer_digests=(), failure=None, hold=False
    )
    assert isinstance(committed, Committed)
    assert committed.descriptor.layer_digests == DIGESTS


def test_a_hold_is_the_producers_own_reference() -> None:
    """It is granted at commit, counts, and keeps the payload from lingering."""
    desk = Desk()
    committed = desk.commit(desk.reserve().token, hold=True)
    assert committed.hold is not None
    assert (committed.hold.kind, committed.hold.ttl_seconds) == (ReferenceKind.HOLD, HOLD_SECONDS)
    assert (desk.ledger.usage().holds, desk.ledger.usage().reservations) == (1, 0)
    desk.wait(HOLD_SECONDS - 1)
    assert desk.renew(committed.hold.token, client="producer") == [HOLD_SECONDS]
    desk.wait(HOLD_SECONDS - 1)
    assert desk.payload().holds == 1
    assert desk.release(committed.hold.token, client="producer") == set()
    assert desk.payload().holds == 0


def test_a_failed_check_frees_the_memory_and_leaves_the_reason() -> None:
    """Consumers are told the check that failed, and get the text."""
    desk = Desk()
    grant = desk.reserve(fallback=text("take this"))
    desk.begin(grant.token)
    outcome = desk.finish(grant.payload_id, failure=(Reason.VALUES_NOT_FINITE, "layer 1 holds a NaN"))
    assert outcome == Rejected(reference=grant.reference, reason=Reason.VALUES_NOT_FINITE, detail="layer 1 holds a NaN")
    slot: dict[str, Any] = {
        "payload_id": grant.payload_id,
        "slot": grant.slot,
        "slot_generation": grant.slot_generation,
    }
    assert desk.effects[1:] == [
        PayloadEnded(reference=grant.reference, reason=Reason.VALUES_NOT_FINITE, detail="layer 1 holds a NaN"),
        SlotRetired(**slot, why=Reason.VALUES_NOT_FINITE),
        SlotFreed(**slot),
    ]
    tombstone = desk.tombstone()
    assert (tombstone.reason, tombstone.detail) == (Reason.VALUES_NOT_FINITE, "layer 1 holds a NaN")
    assert (tombstone.fallback, tombstone.tokens) == (text("take this"), tokens())
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


def test_a_bad_seal_leaves_the_payload_reserved() -> None:
    """The producer can correct its commit and try again."""
    desk = Desk()
    grant = desk.reserve()
    with pytest.raises(InvalidFieldError, match="valid_length"):
        desk.begin(grant.token, valid_length=11)
    assert desk.payload().state is PayloadState.RESERVED
    desk.commit(grant.token)


@pytest.mark.parametrize("given", [None, FallbackText()])
def test_a_commit_without_text_keeps_the_text_of_the_reservation(given: FallbackText | None) -> None:
    """Absent and empty mean the same: nothing new."""
    desk = Desk()
    payload = desk.begin(desk.reserve(fallback=text("early")).token, fallback=given)
    assert payload.fallback == text("early")


def test_a_commit_may_replace_text_and_tokens() -> None:
    """What is declared last is what consumers get, also after the tensors are gone."""
    desk = Desk()
    grant = desk.reserve(fallback=text("early"))
    desk.begin(grant.token, fallback=text("late"), tokens=tokens(5, first=50))
    desk.finish(grant.payload_id, failure=(Reason.PAYLOAD_CORRUPT, ""))
    assert (desk.tombstone().fallback, desk.tombstone().tokens) == (text("late"), tokens(5, first=50))


def test_a_second_commit_of_the_same_reservation_is_refused() -> None:
    """While it is checked that is a wrong state, afterwards the token is unknown."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token)
    with pytest.raises(WrongStateError, match="reservation_token"):
        desk.begin(grant.token)
    desk.finish(grant.payload_id)
    with pytest.raises(UnknownReferenceError, match="reservation_token"):
        desk.begin(grant.token)


def test_a_verification_has_no_deadline() -> None:
    """However long the check takes, the payload and the token stay; renewing the token is harmless."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token)
    assert desk.ledger.next_deadline() is None
    desk.wait(10 * RESERVATION_SECONDS)
    assert desk.renew(grant.token, client="producer") == [RESERVATION_SECONDS]
    assert desk.ledger.next_deadline() is None
    desk.wait(10 * RESERVATION_SECONDS)
    assert isinstance(desk.finish(grant.payload_id), Committed)


@pytest.mark.parametrize("attached", [True, False])
def test_a_reservation_that_is_not_renewed_expires(attached: bool) -> None:
    """Consumers are told that the producer did not commit in time, and get the text."""
    desk = Desk()
    grant = desk.reserve(attached=attached)
    desk.wait(RESERVATION_SECONDS - 1)
    assert desk.renew(grant.token, client="producer") == [RESERVATION_SECONDS]
    desk.wait(RESERVATION_SECONDS)
    tombstone = desk.tombstone()
    assert (tombstone.reason, tombstone.ended_at) == (Reason.PAYLOAD_EXPIRED, 2 * RESERVATION_SECONDS - 1)
    assert "in time" in tombstone.detail
    assert tombstone.fallback == text("the text")
    with pytest.raises(UnknownReferenceError, match="reservation_token"):
        desk.begin(grant.token)


def test_an_aborted_reservation_is_free_at_once() -> None:
    """The producer says itself that it no longer writes, so nothing is isolated."""
    desk = Desk()
    grant = desk.reserve()
    desk.abort(grant.token)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes
    assert desk.tombstone().reason is Reason.PAYLOAD_EXPIRED
    assert [type(effect) for effect in desk.effects] == [SlotGranted, PayloadEnded, SlotRetired, SlotFreed]
    with pytest.raises(UnknownReferenceError):
        desk.abort(grant.token)


def test_a_commit_under_way_cannot_be_aborted() -> None:
    """The node itself is reading the bytes."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token)
    with pytest.raises(WrongStateError, match="reservation_token"):
        desk.abort(grant.token)


def test_an_expired_reservation_can_be_aborted_once() -> None:
    """That is how its client says that it no longer writes; a client that cannot write is not scolded either."""
    desk = Desk()
    for attached in (True, False):
        grant = desk.reserve(attached=attached)
        desk.wait(RESERVATION_SECONDS)
        desk.abort(grant.token)
        with pytest.raises(UnknownReferenceError):
            desk.abort(grant.token)
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes


@pytest.mark.parametrize("call", ["begin", "abort"])
def test_tokens_of_others_and_of_other_kinds_are_refused(call: str) -> None:
    """Nobody commits or aborts what is not their own reservation."""
    desk = Desk()
    do: Any = getattr(desk, call)
    grant = desk.reserve()
    with pytest.raises(NotYoursError, match="reservation_token"):
        do(grant.token, client="thief")
    lease = desk.lease(desk.publish("other"), client="producer")
    for token in (lease, "unheard of"):
        with pytest.raises(UnknownReferenceError, match="reservation_token"):
            do(token)
    assert desk.payload().state is PayloadState.RESERVED


def test_a_producer_that_dies_takes_its_reservations_along() -> None:
    """A dead client writes nothing, so that the memory is free at once."""
    desk = Desk()
    desk.reserve("a")
    desk.reserve("b")
    assert desk.end("producer") == 2
    assert desk.end("producer") == 0
    assert desk.ledger.usage().free_bytes == desk.ledger.usage().arena_bytes
    assert "left" in desk.tombstone("a").detail


def test_a_producer_that_dies_during_the_check_does_not_stop_it() -> None:
    """The payload is committed, without the hold that nobody could release."""
    desk = Desk()
    grant = desk.reserve()
    desk.begin(grant.token)
    desk.end("producer")
    assert desk.payload().state is PayloadState.VERIFYING
    committed = desk.finish(grant.payload_id, hold=True)
    assert isinstance(committed, Committed)
    assert committed.hold is None
    assert desk.payload().state is PayloadState.COMMITTED
