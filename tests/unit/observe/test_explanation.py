"""A handoff on a terminal: the decision first, everything that was checked, nothing that a terminal obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome, PartRecord, Pull
from kvbridge.core.reasons import Reason
from kvbridge.core.suspicions import Place
from kvbridge.observe.explanation import FAILED, PASSED, WIDTH, explanation
from kvbridge.v1.inspect_service_pb2 import HandoffRecord as Message
from kvbridge.wire.journal import RecordEncoder, parse_record
from tests import builders, records

ENCODER = RecordEncoder("node-1")
OUTCOME = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD, detail="worse", tokens_saved=7)


def lines(record: HandoffRecord) -> list[str]:
    """Return what is shown of a record."""
    return list(explanation(parse_record(ENCODER.record(record))))


def text(record: HandoffRecord) -> str:
    """Return the same without its line breaks."""
    return " ".join(" ".join(lines(record)).split())


def mismatch() -> PartRecord:
    """Return a part whose tokens are others."""
    return records.leased(leased=False, verdict=records.verdict(terms={"tokens": builders.tokens(12, first=5)}))


@pytest.mark.parametrize(
    ("parts", "decision"),
    [
        ([records.leased()], "The cache was handed over. "),
        ([records.leased(), records.leased()], "All 2 parts were handed over as caches. "),
        ([records.refused()], "The text was to be taken, because of PAYLOAD_EXPIRED: ended: PAYLOAD_EXPIRED. "),
        ([records.leased(), records.refused()], "A cache was handed over for 1 of 2 parts; part 2 is text because of "),
        ([records.refused(), records.refused()], "All 2 parts are text; part 1 is text because of PAYLOAD_EXPIRED: "),
    ],
)
def test_the_decision_comes_first(parts: list[PartRecord], decision: str) -> None:
    """One sentence says what was decided and why."""
    assert text(records.record(*parts)).startswith(decision)


def test_every_check_is_shown_with_mark_figures_and_time() -> None:
    """What failed comes first, with its problem; nothing that was asked is left out."""
    part = mismatch()
    shown = lines(records.record(part))
    for finding in part.verdict.findings:
        mark = PASSED if finding.problem is None else FAILED
        assert any(f"{mark} {finding.reason} " in line for line in shown), finding.reason
    marks = [line.strip()[0] for line in shown if line.strip()[:1] in {PASSED, FAILED}]
    assert marks == sorted(marks, key=[FAILED, PASSED].index)
    assert "the 10 cached tokens are not a prefix of the consumer's 12" in text(records.record(part))
    assert "cached_tokens 10, prompt_tokens 12" in text(records.record(part))


def test_report_and_suspicions_are_shown() -> None:
    """What the consumer said, and each place with its evidence."""
    shown = text(records.record(outcome=OUTCOME))
    assert "Reported: used, quality bad, 7 tokens saved, worse" in shown
    assert all(place in shown for place in Place)
    assert "Reported: nothing yet" in text(records.record())


def test_a_report_alone_is_shown() -> None:
    """A journal whose record was rotated away has still the report."""
    message = parse_record(ENCODER.outcome(records.record(outcome=OUTCOME)))
    shown = " ".join(explanation(message))
    assert shown.startswith("Only the report of handoff handoff-1 is left")
    assert "quality bad" in shown


def test_a_reason_of_a_newer_release_is_shown_by_its_number() -> None:
    """An old tool explains what it can."""
    message = Message()
    message.parts.add(reason=999)
    assert "reason 999" in " ".join(explanation(message))


def test_a_part_that_only_its_route_refused_says_so() -> None:
    """What would have been a cache is told where shadows and canaries are watched."""
    finding = (
        records.leased().verdict.findings[0]._replace(reason=Reason.ROUTE_OFF, problem="only shadows", is_roll_out=True)
    )
    part = records.leased(leased=False, verdict=replace(records.leased().verdict, findings=(finding,)))
    assert "would have been a cache" in text(records.record(part))


def test_what_was_pulled_is_shown() -> None:
    """How much came from where, which way and how fast."""
    pull = Pull(node_id="host-b", by="tcp", nbytes=4 << 20, seconds=0.012)
    shown = " ".join(text(records.record(records.leased(pull=pull))).split())
    assert "4.0 MiB pulled from node host-b in 12.0 ms by tcp" in shown
    relayed = text(records.record(records.leased(pull=replace(pull, from_replica=True))))
    assert "pulled from a replica on node host-b in" in " ".join(relayed.split())
    assert "pulled" not in text(records.record())


@pytest.mark.parametrize(
    ("key", "generation", "title"),
    [("notes/7", 2, "notes/7@2"), ("notes/7", 0, "notes/7"), ("kvb://host-b/notes/7@3", 1, "kvb://host-b/notes/7@3")],
)
def test_a_part_is_called_by_its_key_and_the_generation_that_was_meant(key: str, generation: int, title: str) -> None:
    """Nobody asks for generation 0, which stands for the newest one; and a handoff reference names its own."""
    part = replace(records.refused(), reference=PayloadReference(key=key, generation=generation))
    assert f"Part 1: {title}: text, " in text(records.record(part))


@given(records.records, st.text(min_size=1, max_size=300))
def test_it_fits_a_terminal_and_commands_none(record: HandoffRecord, written: str) -> None:
    """Whatever keys and reports hold: no line is too long, none breaks, none reaches the terminal as a command."""
    parts = tuple(replace(part, reference=PayloadReference(key=written, generation=1)) for part in record.parts)
    outcome = Outcome(use=HandoffUse.USED, detail=written.encode("utf-8", "replace").decode())
    clean = replace(record, parts=tuple(parts), outcome=outcome)
    for line in lines(clean):
        assert len(line) <= WIDTH
        assert line.isprintable() or line == ""
