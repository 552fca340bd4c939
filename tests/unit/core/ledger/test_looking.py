"""Listing, usage, snapshot: what people see of a ledger."""

from __future__ import annotations

import json

import pytest

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import PayloadState
from kvbridge.core.ledger import ledger as ledger_module
from tests.builders import spec
from tests.unit.core.ledger.desk import LEASE_SECONDS, LINGER_SECONDS, Desk, text


def listing(desk: Desk, *, prefix: str = "", page_size: int = 2) -> list[list[str]]:
    """Return the keys of all pages."""
    pages, cursor = [], None
    while True:
        page = desk.ledger.payloads(key_prefix=prefix, page_size=page_size, cursor=cursor)
        pages.append([payload.reference.key for payload in page.payloads])
        cursor = page.next_cursor
        if cursor is None:
            return pages


def test_payloads_are_listed_newest_first() -> None:
    """Page by page, each once."""
    desk = Desk()
    for key in "abcde":
        desk.reserve(key)
    assert listing(desk) == [["e", "d"], ["c", "b"], ["a"]]
    assert listing(desk, page_size=5) == [["e", "d", "c", "b", "a"]]


def test_an_empty_ledger_lists_one_empty_page() -> None:
    """That is not an error."""
    assert listing(Desk()) == [[]]


def test_a_prefix_selects_keys() -> None:
    """Others do not count for the page's size."""
    desk = Desk()
    for key in ("x/1", "y/1", "x/2", "y/2", "x/3"):
        desk.reserve(key)
    assert listing(desk, prefix="x/") == [["x/3", "x/2"], ["x/1"]]
    assert listing(desk, prefix="z") == [[]]


def test_a_cursor_stays_good_while_payloads_come_and_go() -> None:
    """Even if the payload that it points behind is gone, nothing repeats and nothing is skipped."""
    desk = Desk()
    grants = {key: desk.reserve(key) for key in "abcde"}
    page = desk.ledger.payloads(page_size=2)
    desk.abort(grants["d"].token)
    desk.abort(grants["c"].token)
    desk.reserve("f")
    rest = desk.ledger.payloads(page_size=2, cursor=page.next_cursor)
    assert [payload.reference.key for payload in rest.payloads] == ["b", "a"]
    assert rest.next_cursor is None


def test_a_rare_prefix_gives_short_pages_rather_than_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page looks at a bounded number of payloads."""
    monkeypatch.setattr(ledger_module, "LISTING_SCAN_MAX", 3)
    desk = Desk()
    for key in ("rare", "b1", "b2", "b3", "b4"):
        desk.reserve(key)
    assert listing(desk, prefix="rare") == [[], ["rare"]]


def test_a_listing_shows_payloads_in_every_state() -> None:
    """Also those that no consumer can find any more."""
    desk = Desk()
    late = desk.publish("quarantined")
    desk.lease(late)
    desk.wait(LEASE_SECONDS + LINGER_SECONDS)
    desk.reserve("reserved")
    desk.begin(desk.reserve("verifying").token)
    desk.publish("committed")
    desk.lease(draining := desk.publish("draining"))
    desk.fail(draining)
    states = {payload.reference.key: payload.state.lower() for payload in desk.ledger.payloads(page_size=10).payloads}
    assert len(states) == 5
    assert all(key == state for key, state in states.items())


def test_usage_adds_up() -> None:
    """Each byte is counted in one state, and each reference in one kind."""
    desk = Desk(pages=20)
    desk.lease(desk.publish("quarantined", pages=1))
    desk.wait(LEASE_SECONDS + LINGER_SECONDS)
    desk.reserve("reserved", pages=2)
    desk.begin(desk.reserve("verifying", pages=3).token)
    desk.commit(desk.reserve("held", pages=4).token, hold=True)
    desk.publish("evictable", pages=1)
    desk.lease(draining := desk.publish("draining", pages=5))
    desk.fail(draining)
    usage = desk.ledger.usage()
    pages = {
        "quarantined": usage.quarantined_bytes,
        "reserved": usage.reserved_bytes,
        "committed": usage.committed_bytes,
        "draining": usage.draining_bytes,
        "free": usage.free_bytes,
    }
    assert {name: size // PAGE_BYTES for name, size in pages.items()} == {
        "quarantined": 1,
        "reserved": 5,
        "committed": 5,
        "draining": 5,
        "free": 4,
    }
    assert sum(pages.values()) == usage.arena_bytes
    assert usage.evictable_bytes == PAGE_BYTES
    assert usage.largest_free_bytes <= usage.free_bytes
    assert (usage.payloads, usage.reservations, usage.holds, usage.leases, usage.residues) == (6, 2, 1, 1, 1)
    assert usage.tombstones == 2


def test_a_snapshot_can_be_printed() -> None:
    """It consists of what JSON knows."""
    desk = Desk()
    desk.lease(desk.publish())
    snapshot = json.loads(json.dumps(desk.ledger.snapshot()))
    assert snapshot["usage"]["leases"] == 1
    assert snapshot["limits"]["lease_ttl_seconds"] == LEASE_SECONDS
    assert (snapshot["clients"], snapshot["keys"], snapshot["deadlines"]) == (1, 1, 2)


def test_effects_are_taken_once() -> None:
    """And a ledger says how many wait."""
    desk = Desk()
    desk.ledger.reserve(now=0.0, client_id="c", attached=True, spec=spec(), slot_bytes=1)
    assert desk.ledger.snapshot()["effects_waiting"] == 1
    assert len(desk.ledger.take_effects()) == 1
    assert desk.ledger.take_effects() == ()


def test_every_part_describes_itself() -> None:
    """In a debugger or a log line one sees what there is."""
    desk = Desk(pages=2)
    desk.lease(desk.publish())
    assert repr(desk.ledger) == (
        "<Ledger 4096 of 8192 bytes free, 1 payloads, 0 reservations, 0 holds, 1 leases, 0 residues>"
    )
    life = desk.ledger._life
    for part, expected in {
        life: "1 payloads",
        life.references: "1 references of 1 clients",
        life.keys: "1 keys, 0 tombstones",
        life.slots: "1 slots, 0 evictable",
        life.deadlines: "2 keys in",
        desk.ledger._claims: "1 references",
        desk.ledger._admission: "1 payloads",
    }.items():
        assert expected in repr(part)


def test_a_payload_ends_when_its_reservation_does() -> None:
    """People see how long it lasts in any state that has a deadline."""
    desk = Desk()
    desk.reserve()
    occupant = desk.occupant()
    assert occupant is not None
    assert (occupant.state, occupant.ends_at) == (PayloadState.RESERVED, 5.0)


def test_a_look_at_a_lease_tells_how_long_it_lasts() -> None:
    """To its own client alone, and without making it last longer."""
    desk = Desk()
    lease = desk.lease(desk.publish())

    def left(client: str = "consumer", token: str = lease) -> float | None:
        return desk.ledger.lease_seconds_left(now=desk.now, client_id=client, token=token)

    assert left() == LEASE_SECONDS
    desk.wait(LEASE_SECONDS - 1, processing=False)
    assert left() == 1
    assert left("somebody else") is left(token="unknown") is None
    desk.wait(1, processing=False)
    assert left() is None
    assert left(token=desk.reserve("other", client="consumer").token) is None


def test_a_tombstone_is_looked_at_without_a_time() -> None:
    """Exactly this one, while it is remembered; what has not ended has none."""
    desk = Desk()
    desk.publish("a", fallback=text("words"))
    reference = PayloadReference(key="a", generation=1)
    assert desk.ledger.tombstone(reference) is None
    desk.wait(LINGER_SECONDS)
    assert desk.ledger.tombstone(reference) == desk.tombstone("a")
    assert desk.ledger.tombstone(PayloadReference(key="a", generation=2)) is None
