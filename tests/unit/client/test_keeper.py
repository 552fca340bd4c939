"""The thread that renews and returns references."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from kvbridge.client.connector import Connector
from kvbridge.client.failures import TOO_MANY_REQUESTS, CallFailedError
from kvbridge.client.keeper import QUESTIONS_MAX, TOKENS_PER_CALL_MAX, Keeper
from kvbridge.client.references import Unanswered
from kvbridge.core.references import ReferenceKind
from tests.harness import wait_for
from tests.unit.client.doubles import RecordingSession, reference


class RecordingConnector:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def connector() -> RecordingConnector:
    return RecordingConnector()


@pytest.fixture
def keeper(connector: RecordingConnector) -> Iterator[Keeper]:
    keeper = Keeper()
    keeper.start(cast("Connector", connector))
    yield keeper
    keeper.stop()
    assert keeper.join(10)


@pytest.fixture
def session() -> RecordingSession:
    return RecordingSession()


def _failure(code: grpc.StatusCode) -> CallFailedError:
    return CallFailedError(code, "told to fail")


def test_what_is_ended_is_returned(keeper: Keeper, session: RecordingSession) -> None:
    """A lease that is garbage is released by the thread."""
    lease = reference(session, keeper.ended, "a")
    keeper.track(lease)
    del lease
    gc.collect()
    wait_for(lambda: session.released() == ["a"])


def test_a_reservation_is_aborted(keeper: Keeper, session: RecordingSession) -> None:
    """Reservations have a call of their own."""
    reference(session, keeper.ended, "r", kind=ReferenceKind.RESERVATION).end()
    wait_for(lambda: session.names() == ["Abort"])
    assert session.requests[0][1].reservation_token == "r"


def test_many_are_returned_together(keeper: Keeper, session: RecordingSession) -> None:
    """Leases and holds of one session share messages, each of limited size."""
    held = [reference(session, keeper.ended, str(index)) for index in range(TOKENS_PER_CALL_MAX + 5)]
    for lease in held:
        lease.end()
    wait_for(lambda: len(session.released()) == len(held))
    assert len(session.requests) < 100
    assert max(len(request.tokens) for _, request in session.requests) <= TOKENS_PER_CALL_MAX


def test_everything_in_use_is_renewed_together(keeper: Keeper, session: RecordingSession) -> None:
    """One message renews all, well before the shortest time to live is over."""
    session.ttl_seconds = 1.5
    held = [reference(session, keeper.ended, str(index), ttl_seconds=1.5) for index in range(3)]
    for lease in held:
        keeper.track(lease)
    wait_for(lambda: session.names().count("Renew") >= 4)
    assert all(lease.live for lease in held)
    assert sorted(session.requests[-1][1].tokens) == ["0", "1", "2"]


def test_a_reference_that_the_bridge_does_not_know_is_lost(keeper: Keeper, session: RecordingSession) -> None:
    """Its owner is told, it is renewed no more, and it is still returned when nobody uses it."""
    session.ttl_seconds = None
    lease = reference(session, keeper.ended, "a", ttl_seconds=0.3)
    keeper.track(lease)
    wait_for(lambda: lease._lost)
    wait_for(lambda: keeper.snapshot().tracked <= 1)
    lease.end()
    wait_for(lambda: session.released() == ["a"])


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_silent_bridge_is_asked_again(keeper: Keeper, session: RecordingSession, code: grpc.StatusCode) -> None:
    """A release that got no answer is repeated with the same request id."""
    session.failures = [_failure(code), _failure(code)]
    reference(session, keeper.ended, "a").end()
    wait_for(lambda: len(session.requests) == 3)
    assert len({request.request_id for _, request in session.requests}) == 1


@pytest.mark.parametrize("about", ["", TOO_MANY_REQUESTS])
def test_a_bridge_with_too_many_calls_is_asked_again(keeper: Keeper, session: RecordingSession, about: str) -> None:
    """What it did not look at is not done with: a release that is given up would keep memory until the lease ends."""
    session.failures = [CallFailedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", about=about)]
    reference(session, keeper.ended, "a").end()
    wait_for(lambda: session.released() == ["a", "a"])


def test_one_refused_token_does_not_keep_the_others(keeper: Keeper, session: RecordingSession) -> None:
    """A batch that is refused is taken apart; a token that is refused alone is given up."""
    session.failures = [_failure(grpc.StatusCode.NOT_FOUND), _failure(grpc.StatusCode.NOT_FOUND)]
    held = [reference(session, keeper.ended, str(index)) for index in range(3)]
    with session.called:  # The thread cannot send until all are ended.
        for lease in held:
            lease.end()
    wait_for(lambda: {"0", "1", "2"} <= {tokens for tokens, *rest in _single_releases(session) if not rest})
    wait_for(lambda: keeper.snapshot().unsent == 0)


def test_a_session_that_the_bridge_does_not_know_is_closed(keeper: Keeper, session: RecordingSession) -> None:
    """Renewing in a dead session ends it, and so loses what it had."""
    session.failures = [_failure(grpc.StatusCode.UNAUTHENTICATED)]
    lease = reference(session, keeper.ended, ttl_seconds=0.3)
    keeper.track(lease)
    wait_for(lambda: not session.alive)
    assert lease.lost


@pytest.mark.parametrize("shares_memory", [False, True])
def test_after_an_outage_few_calls_by_value_are_made_again(
    keeper: Keeper, session: RecordingSession, *, shares_memory: bool
) -> None:
    """What the others may have granted ends by itself, while a local client's memory waits until all are heard of."""
    session.shares_memory = shares_memory
    *most, last = (
        Unanswered(session=session.as_session(), method=_method, request=number, granted=lambda *_: ())
        for number in range(QUESTIONS_MAX + 10)
    )
    keeper._notes.extend(most)
    keeper.ended(last)
    wait_for(lambda: keeper.snapshot().unsent == 0)
    asked = [request for _, request in session.requests]
    assert asked[-1] == QUESTIONS_MAX + 9
    assert len(set(asked)) == QUESTIONS_MAX + (10 if shares_memory else 0)


def test_nothing_is_sent_to_a_dead_session(keeper: Keeper, session: RecordingSession) -> None:
    """What the bridge has forgotten need not be returned."""
    session.alive = False
    reference(session, keeper.ended, "a").end()
    wait_for(lambda: keeper.snapshot().unsent == 0)
    assert not session.requests


def test_stopping_returns_everything(keeper: Keeper, session: RecordingSession, connector: RecordingConnector) -> None:
    """What is still in use is returned, its owners are told, and the connection is closed last."""
    held = [reference(session, keeper.ended, str(index)) for index in range(3)]
    for lease in held:
        keeper.track(lease)
    keeper.stop()
    assert keeper.join(10)
    assert sorted(session.released()) == ["0", "1", "2"]
    assert all(lease.ended for lease in held)
    assert connector.closed


def test_a_turn_that_fails_is_not_the_last(
    keeper: Keeper, session: RecordingSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong is logged, and the next reference is returned as ever."""

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(keeper, "_send_batches", fail)
    reference(session, keeper.ended, "a").end()
    wait_for(lambda: "a turn of the keeper failed" in caplog.text)
    monkeypatch.undo()
    reference(session, keeper.ended, "b").end()
    wait_for(lambda: sorted(session.released()) == ["a", "b"])


def test_ending_from_within_the_collector_is_safe(keeper: Keeper, session: RecordingSession) -> None:
    """References in cycles, whose finalizers interrupt arbitrary code, are all returned."""

    class Cycle:
        def __init__(self, token: str) -> None:
            self.lease = reference(session, keeper.ended, token)
            self.me = self

    for index in range(500):
        keeper.track(Cycle(str(index)).lease)
    gc.collect()
    wait_for(lambda: len(set(session.released())) == 500)


def _single_releases(session: RecordingSession) -> list[list[str]]:
    return [list(request.tokens) for name, request in session.requests if name == "Release"]


def _method(rpc: Any) -> Any:
    return rpc.handoff.Release
