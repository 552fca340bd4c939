"""The ring of records: bounds, finding, reports and listeners."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome
from kvbridge.core.reasons import Reason
from kvbridge.node.journal import OUTCOME_DETAIL_CHARACTERS_MAX, PARTS_PER_RECORD_MEAN_MAX, Journal
from tests import records

USED = Outcome(use=HandoffUse.USED, quality=HandoffQuality.GOOD)
BAD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)


def journal_of(*names: str, records_max: int = 8) -> Journal:
    """Return a journal that has seen handoffs of these names."""
    journal = Journal(records_max)
    for name in names:
        journal.add(records.record(handoff_id=name))
    return journal


def test_the_oldest_are_forgotten() -> None:
    """A full ring keeps the newest."""
    journal = journal_of("a", "b", "c", records_max=2)
    assert journal.find("a") is None
    assert journal.find("b") is not None
    assert len(journal) == 2
    assert journal.snapshot().parts == 2


def test_no_tenant_makes_another_forgotten() -> None:
    """Neither by many handoffs nor by large ones; each has an even share of the records."""
    journal = Journal(4, tenants=2)
    for name in "abc":
        journal.add(records.record(handoff_id=name, tenant="mine"))
    for number in range(20):
        plan = [records.leased()] * (number * PARTS_PER_RECORD_MEAN_MAX)
        journal.add(records.record(*plan, handoff_id=str(number), tenant="theirs"))
    assert [name for name in "abc" if journal.find(name)] == ["b", "c"]
    assert journal.newest("mine") is journal.find("c")
    assert journal.newest("theirs") is journal.find("19")
    assert len(journal) == 3, "the newest plan alone is larger than all that one tenant may have"


def test_large_plans_leave_room_for_fewer() -> None:
    """The number of parts is bounded, too; the newest record is kept however many it has."""
    journal = Journal(2)
    many = records.record(*[records.leased()] * (3 * PARTS_PER_RECORD_MEAN_MAX), handoff_id="many")
    journal.add(many)
    assert journal.find("many") is many
    journal.add(records.record(handoff_id="one"))
    assert journal.find("many") is None
    assert journal.snapshot().parts == 1


def test_a_report_is_attached_and_replaced() -> None:
    """What a consumer says is kept; what it says later takes its place."""
    journal = journal_of("a")
    assert journal.report("a", records.CLIENT, USED).outcome == USED
    journal.report("a", records.CLIENT, BAD)
    found = journal.find("a")
    assert found is not None
    assert found.outcome == BAD
    assert journal.snapshot().reported == 1


def test_anothers_handoff_looks_like_an_unknown_one() -> None:
    """Nobody learns by reporting whether a handoff exists."""
    journal = journal_of("a")
    told = []
    for name, client in (("a", "somebody-else"), ("b", records.CLIENT)):
        with pytest.raises(UnknownReferenceError) as caught:
            journal.report(name, client, USED)
        told.append((str(caught.value), caught.value.field))
    assert told[0] == told[1]
    assert told[0][1] == "handoff_id"


def test_a_long_detail_is_cut() -> None:
    """One report takes bounded memory."""
    outcome = journal_of("a").report("a", records.CLIENT, replace(USED, detail="x" * 5000)).outcome
    assert outcome is not None
    assert len(outcome.detail) == OUTCOME_DETAIL_CHARACTERS_MAX


def test_listeners_hear_of_records_and_of_changed_outcomes() -> None:
    """Each record is told once without an outcome, and once for each outcome that says something new."""
    journal, told = Journal(8), []
    journal.add_listener(lambda record: told.append(record.outcome))
    journal.add(records.record(handoff_id="a"))
    for outcome in (USED, USED, BAD):
        journal.report("a", records.CLIENT, outcome)
    assert told == [None, USED, BAD]


def test_a_listener_that_fails_takes_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """The handoff goes on, the other listeners are told, and the fault is in the log."""
    journal = Journal(8)
    told: list[HandoffRecord] = []

    def fail(_: HandoffRecord) -> None:
        raise ValueError("cannot listen")

    journal.add_listener(fail)
    journal.add_listener(told.append)
    journal.add(records.record())
    assert len(told) == len(journal) == 1
    assert "cannot listen" in caplog.text


def test_a_handoff_with_a_lease_is_not_found_by_a_reason() -> None:
    """Checks that failed on the way, as those of a route that shadows, count only where the text was taken."""
    journal = Journal(8)
    journal.add(records.record(records.leased(verdict=records.refused().verdict)))
    assert journal.newest("default", Reason.PAYLOAD_EXPIRED) is None


handoffs = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([None, *records.ENDING_REASONS])), max_size=40)


@given(handoffs, st.integers(1, 6))
def test_the_index_agrees_with_a_search(kinds: list[tuple[str, Reason | None]], records_max: int) -> None:
    """At every moment the newest record of each tenant and reason is the one that a search through all would find."""
    journal = Journal(2 * records_max, tenants=2)
    kept = {tenant: deque[HandoffRecord](maxlen=records_max) for tenant in "ab"}
    for number, (tenant, reason) in enumerate(kinds):
        part = records.leased() if reason is None else records.refused(reason)
        record = records.record(part, handoff_id=str(number), tenant=tenant)
        journal.add(record)
        kept[tenant].append(record)
        for wanted in (None, *records.ENDING_REASONS):
            for asker in "ab":
                fitting = [r for r in kept[asker] if wanted in {None, *(p.reason for p in r.parts)}]
                assert journal.newest(asker, wanted) is (fitting[-1] if fitting else None)
