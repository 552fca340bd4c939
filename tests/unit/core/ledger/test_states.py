"""The table of a payload's life, and what each public method makes of each state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from kvbridge.core.errors import BridgeError, UnknownReferenceError, WrongStateError
from kvbridge.core.ledger import PayloadEvent, PayloadState
from kvbridge.core.ledger.states import PENDING_STATES, TRANSITIONS, next_state
from kvbridge.core.reasons import Reason
from tests.unit.core.ledger.desk import LEASE_SECONDS, TTL_SECONDS, Desk

S, E = PayloadState, PayloadEvent
PAIRS = tuple(product(PayloadState, PayloadEvent))
ALLOWED = {
    S.RESERVED: {E.BEGIN_COMMIT: S.VERIFYING, E.ABORT: S.ABORTED, E.EXPIRE: S.ABORTED},
    S.VERIFYING: {E.PASS: S.COMMITTED, E.REJECT: S.CORRUPT},
    S.COMMITTED: {E.EXPIRE: S.DRAINING, E.EVICT: S.DRAINING, E.FAIL: S.DRAINING},
    S.DRAINING: {E.FAIL: S.DRAINING, E.QUARANTINE: S.QUARANTINED, E.FREE: S.FREED},
    S.ABORTED: {E.QUARANTINE: S.QUARANTINED, E.FREE: S.FREED},
    S.CORRUPT: {E.FREE: S.FREED},
    S.QUARANTINED: {E.FREE: S.FREED},
    S.FREED: {},
}


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_each_pair_leads_where_it_should_or_nowhere(state: PayloadState, event: PayloadEvent) -> None:
    """A pair that is absent from the table is a programmer's error."""
    expected = ALLOWED[state].get(event)
    if expected is None:
        with pytest.raises(AssertionError):
            next_state(state, event)
    else:
        assert next_state(state, event) is expected


def test_every_state_can_be_reached_and_every_life_can_end() -> None:
    """No state is dead wood, and from each of them there is a way to FREED."""
    reached = {S.RESERVED}
    for _ in PayloadState:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    ending = {S.FREED}
    for _ in PayloadState:
        ending |= {before for (before, _), after in TRANSITIONS.items() if after in ending}
    assert reached == ending == set(PayloadState)


def test_nothing_that_has_ended_comes_back() -> None:
    """Out of a state that cannot be leased any more there is no way to one that can."""
    alive = {*PENDING_STATES, S.COMMITTED}
    assert not [pair for pair, after in TRANSITIONS.items() if pair[0] not in alive and after in alive]


class Case:
    """A payload in a given state, with whatever tokens there are to it."""

    def __init__(self, state: PayloadState) -> None:
        """Bring a payload into `state`."""
        self.desk = Desk()
        reservation = self.desk.reserve()
        self.reservation, self.payload_id = reservation.token, reservation.payload_id
        if state in {S.VERIFYING, S.COMMITTED, S.DRAINING, S.QUARANTINED, S.FREED}:
            self.desk.begin(self.reservation)
        if state in {S.COMMITTED, S.DRAINING, S.QUARANTINED, S.FREED}:
            self.desk.finish(self.payload_id)
            self.lease = self.desk.lease(self.payload_id)
        if state in {S.DRAINING, S.FREED}:
            self.desk.fail(self.payload_id)
        if state is S.FREED:
            self.desk.release(self.lease)
        if state is S.QUARANTINED:
            self.desk.wait(LEASE_SECONDS + TTL_SECONDS)
        occupant = self.desk.occupant()
        assert (S.FREED if occupant is None else occupant.state) is state


CALLS: dict[str, Callable[[Case], object]] = {
    "begin_commit": lambda case: case.desk.begin(case.reservation),
    "finish_commit": lambda case: case.desk.finish(case.payload_id),
    "abort": lambda case: case.desk.abort(case.reservation),
    "lease": lambda case: case.desk.lease(case.payload_id),
    "fail": lambda case: case.desk.fail(case.payload_id),
}
GONE, WRONG = UnknownReferenceError, WrongStateError
REFUSALS: dict[str, dict[PayloadState, type[BaseException]]] = {
    "begin_commit": {S.VERIFYING: WRONG, S.COMMITTED: GONE, S.DRAINING: GONE, S.QUARANTINED: GONE, S.FREED: GONE},
    "finish_commit": {
        S.RESERVED: AssertionError,
        S.COMMITTED: AssertionError,
        S.DRAINING: AssertionError,
        S.QUARANTINED: AssertionError,
        S.FREED: KeyError,
    },
    "abort": {S.VERIFYING: WRONG, S.COMMITTED: GONE, S.DRAINING: GONE, S.QUARANTINED: GONE, S.FREED: GONE},
    "lease": {S.RESERVED: WRONG, S.VERIFYING: WRONG, S.DRAINING: WRONG, S.QUARANTINED: WRONG, S.FREED: WRONG},
    "fail": {S.RESERVED: WRONG, S.VERIFYING: WRONG},
}
OCCUPYING = (S.RESERVED, S.VERIFYING, S.COMMITTED, S.DRAINING, S.QUARANTINED, S.FREED)


@pytest.mark.parametrize(("call", "state"), tuple(product(CALLS, OCCUPYING)))
def test_each_method_in_each_state(call: str, state: PayloadState) -> None:
    """A method does its work in the states that allow it, and elsewhere raises and changes nothing."""
    case = Case(state)
    refusal = REFUSALS[call].get(state)
    if refusal is None:
        CALLS[call](case)
        return
    before = case.desk.occupant(), case.desk.ledger.usage(), case.desk.effects[:]
    with pytest.raises(refusal):
        CALLS[call](case)
    if issubclass(refusal, BridgeError):
        assert (case.desk.occupant(), case.desk.ledger.usage(), case.desk.effects) == before


@pytest.mark.parametrize("state", [S.QUARANTINED, S.FREED])
def test_failing_what_is_gone_says_so(state: PayloadState) -> None:
    """A check that ends after its payload changes nothing, not even the reason."""
    case = Case(state)
    before = case.desk.tombstone()
    assert not case.desk.fail(case.payload_id, Reason.VALUES_NOT_FINITE)
    assert case.desk.tombstone() == before
