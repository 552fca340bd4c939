"""Each limit refuses what goes beyond it, by its name, and nothing changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvbridge.core.descriptor import DURATION_SECONDS_MAX
from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.core.ledger import LedgerLimits, PayloadState
from tests.builders import tokens
from tests.unit.core.ledger.desk import LEASE_SECONDS, LINGER_SECONDS, Desk, text


def refused(desk: Desk, limit: str, value_max: int, call: Callable[[], object]) -> None:
    """Assert that a call is refused for this limit and changes nothing."""
    before = desk.ledger.snapshot(), desk.ledger.payloads(page_size=100)
    with pytest.raises(LimitExceededError) as refusal:
        call()
    assert (refusal.value.limit, refusal.value.value_max) == (limit, value_max)
    assert (desk.ledger.snapshot(), desk.ledger.payloads(page_size=100)) == before


def test_payloads() -> None:
    """However much memory is free, the table of payloads is bounded; nobody is evicted for a place in it."""
    desk = Desk(payloads_max=2)
    desk.publish("a")
    token = desk.reserve("b").token
    refused(desk, "payloads_max", 2, lambda: desk.reserve("c"))
    assert desk.find("c") is None, "a refused limit leaves no tombstone"
    desk.abort(token)
    desk.reserve("c")


def test_references_of_all_clients() -> None:
    """Leases and reservations count alike, residues too."""
    desk = Desk(references_max=3)
    payload_id = desk.publish()
    for client in "abc":
        desk.lease(payload_id, client=client)
    refused(desk, "references_max", 3, lambda: desk.lease(payload_id, client="d"))
    refused(desk, "references_max", 3, lambda: desk.reserve("new"))
    desk.wait(LEASE_SECONDS)
    assert desk.ledger.usage().residues == 3
    refused(desk, "references_max", 3, lambda: desk.lease(payload_id, client="d"))
    desk.end("b")
    desk.lease(payload_id, client="d")


def test_references_of_one_client() -> None:
    """One client cannot take everybody's place."""
    desk = Desk(references_per_client_max=2)
    payload_id = desk.publish()
    first = desk.lease(payload_id)
    desk.lease(payload_id)
    refused(desk, "references_per_client_max", 2, lambda: desk.lease(payload_id))
    refused(desk, "references_per_client_max", 2, lambda: desk.reserve("new", client="consumer"))
    desk.lease(payload_id, client="another")
    desk.release(first)
    desk.lease(payload_id)


def test_a_hold_takes_the_place_of_its_reservation() -> None:
    """A commit never fails for want of a reference."""
    desk = Desk(references_max=1)
    assert desk.commit(desk.reserve().token, hold=True).hold


def test_text_of_living_payloads() -> None:
    """Long texts with small tensors do not fill the host's memory; the end of their payloads makes room."""
    desk = Desk(payload_text_bytes_max=1000)
    payload_id = desk.publish("a", fallback=text("x" * 500), tokens=tokens(10))
    assert desk.ledger.usage().payload_text_bytes == 500 + 32 + 40
    refused(
        desk, "payload_text_bytes_max", 1000, lambda: desk.reserve("b", fallback=text("x" * 400), tokens=tokens(10))
    )
    desk.fail(payload_id)
    grant = desk.reserve("b", fallback=text("x" * 400), tokens=tokens(10))
    long = text("x" * 1000)
    refused(desk, "payload_text_bytes_max", 1000, lambda: desk.begin(grant.token, fallback=long))
    assert desk.payload("b").state is PayloadState.RESERVED
    desk.begin(grant.token, fallback=text("x" * 900), valid_length=1)
    assert desk.ledger.usage().payload_text_bytes == 900 + 32 + 4


def test_a_payload_without_text_fits_when_the_text_is_full() -> None:
    """What asks for nothing is not refused."""
    desk = Desk(payload_text_bytes_max=50)
    desk.reserve("full", fallback=text("x" * 50), tokens=None)
    desk.reserve("empty", fallback=text(""), tokens=None)


def test_expired_tokens_that_are_remembered() -> None:
    """The oldest are forgotten: their release is then refused as unknown rather than accepted as late."""
    desk = Desk(expired_tokens_max=2)
    payload_id = desk.publish()
    leases = [desk.lease(payload_id, attached=False) for _ in range(3)]
    desk.wait(LEASE_SECONDS)
    assert desk.ledger.snapshot()["expired_tokens"] == 2
    assert desk.release(*leases[1:]) == set(leases[1:])
    assert desk.ledger.snapshot()["expired_tokens"] == 0


@pytest.mark.parametrize("field", ["linger_seconds", "ttl_seconds"])
def test_longest_linger_and_time_to_live(field: str) -> None:
    """A producer that asks for more is told so, and may ask for exactly as much."""
    limits: dict[str, Any] = {f"{field}_max": 200.0}
    desk = Desk(**limits)
    too_long: dict[str, Any] = {field: 201.0}
    long: dict[str, Any] = {field: 200.0}
    with pytest.raises(InvalidFieldError, match=f"{field}: must be at most 200, got 201"):
        desk.reserve(**too_long)
    desk.reserve(**long)


def test_payloads_that_are_due_do_not_count() -> None:
    """A ledger that is behind with its deadlines catches up before it refuses."""
    desk = Desk(payloads_max=2, events_per_call_max=1, hold_ttl_seconds=1.0)
    for key in "ab":
        desk.commit(desk.reserve(key).token, hold=True)
    desk.wait(1 + LINGER_SECONDS, processing=False)
    desk.reserve("c")
    assert desk.ledger.usage().payloads == 1


def test_references_that_are_due_do_not_count() -> None:
    """The same for references; here a payload is due before them and is not enough."""
    desk = Desk(references_max=2, events_per_call_max=1)
    desk.publish("first", linger_seconds=1.0)
    payload_id = desk.publish()
    for _ in range(2):
        desk.lease(payload_id, attached=False)
    desk.wait(LEASE_SECONDS, processing=False)
    desk.lease(payload_id)
    assert desk.ledger.usage().leases == 1


BAD: dict[str, Any] = {
    **{field.name: 0 for field in dataclasses.fields(LedgerLimits) if field.name.endswith("max")},
    "linger_seconds_max": -1.0,
    "ttl_seconds_max": -1.0,
    "linger_seconds_default": DURATION_SECONDS_MAX + 1.0,
    "ttl_seconds_default": DURATION_SECONDS_MAX + 1.0,
    "lease_ttl_seconds": 0.0,
    "hold_ttl_seconds": float("inf"),
    "reservation_ttl_seconds": float("nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_limits_that_make_no_sense_are_a_programmers_error(name: str) -> None:
    """The configuration has checked them before."""
    with pytest.raises(AssertionError):
        LedgerLimits(**{name: BAD[name]})
