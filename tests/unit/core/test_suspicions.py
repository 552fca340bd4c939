"""Suspicions: what each kind of evidence says, and what no evidence may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from kvbridge.core.descriptor import Verification
from kvbridge.core.gate import Finding, Verdict
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, Outcome, PartRecord
from kvbridge.core.reasons import Reason
from kvbridge.core.suspicions import Place, Standing, Suspicion, suspicions
from kvbridge.core.tags import AlignerTag
from tests import builders, records

BAD = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)
ALIGNER = AlignerTag(
    name="small-to-large", version="3", source=builders.model_tag(), target=builders.model_tag(name="large"), digest="d"
)


def standing(record: HandoffRecord) -> dict[Place, Standing]:
    """Return how each place stands."""
    return {suspicion.place: suspicion.standing for suspicion in suspicions(record)}


def of(record: HandoffRecord, place: Place) -> Suspicion:
    """Return what is said of one place."""
    [found] = [suspicion for suspicion in suspicions(record) if suspicion.place is place]
    return found


def with_figures(part: PartRecord, reason: Reason, figures: dict[str, Any]) -> PartRecord:
    """Return a part whose check of `reason` passed and looked at `figures`."""
    finding = Finding(reason=reason, problem=None, figures=figures, seconds=0.0)
    return replace(part, verdict=part.verdict.after(Verdict(findings=(finding,))))


def well_checked(**changes: Any) -> PartRecord:
    """Return a leased part of which everything was checked that can be."""
    part = records.leased(verified_at_commit=Verification.FULL, verified_now=Verification.FULL, **changes)
    return with_figures(part, Reason.PROBE_BELOW_THRESHOLD, {"score": 0.99})


def test_text_clears_every_place_that_caches_go_through() -> None:
    """A bad answer to nothing but text is the receiver's."""
    record = records.record(records.refused(), outcome=Outcome(use=HandoffUse.TEXT, quality=HandoffQuality.BAD))
    assert standing(record) == {
        Place.RECEIVER: Standing.LIKELY,
        Place.ALIGNMENT: Standing.CLEARED,
        Place.SOURCE_CACHE: Standing.CLEARED,
        Place.TRANSFER: Standing.CLEARED,
    }
    assert "although every part was text" in of(record, Place.RECEIVER).evidence


@pytest.mark.parametrize("use", [HandoffUse.USED, HandoffUse.DISCARDED])
def test_a_cache_that_was_not_given_cannot_have_been_had(use: HandoffUse) -> None:
    """A report that contradicts the answer points at the receiver, even if its result was good."""
    record = records.record(records.refused(), outcome=Outcome(use=use, quality=HandoffQuality.GOOD))
    assert standing(record)[Place.RECEIVER] is Standing.LIKELY


@pytest.mark.parametrize("use", [HandoffUse.TEXT, HandoffUse.DISCARDED])
def test_a_bad_result_of_the_text_is_the_receivers(use: HandoffUse) -> None:
    """Who had a cache and took the text got its bad result without the cache, but by its own word alone."""
    record = records.record(outcome=Outcome(use=use, quality=HandoffQuality.BAD, detail="lease had expired"))
    found = standing(record)
    assert found[Place.RECEIVER] is Standing.LIKELY
    assert found[Place.SOURCE_CACHE] is found[Place.TRANSFER] is Standing.POSSIBLE
    assert "lease had expired" in of(record, Place.RECEIVER).evidence


def test_only_a_digest_of_this_handoff_clears_the_transfer() -> None:
    """What was checked at commit may have changed since."""
    for level, expected in (
        (Verification.NONE, Standing.POSSIBLE),
        (Verification.DIGEST, Standing.CLEARED),
        (Verification.FULL, Standing.CLEARED),
    ):
        assert standing(records.record(records.leased(verified_now=level)))[Place.TRANSFER] is expected


def test_a_download_is_out_of_the_nodes_sight() -> None:
    """Bytes that were checked and then sent elsewhere are not cleared."""
    record = records.record(records.leased(verified_now=Verification.FULL), by_value=True)
    assert standing(record)[Place.TRANSFER] is Standing.POSSIBLE
    assert "does not see what arrives" in of(record, Place.TRANSFER).evidence


@pytest.mark.parametrize("level", [None, Verification.NONE])
def test_bytes_that_were_never_checked_say_so(level: Verification | None) -> None:
    """What was checked at neither end leaves one question more open."""
    unchecked = records.record(records.leased(verified_at_commit=level), depth=0)
    assert "not digested at commit either" in of(unchecked, Place.TRANSFER).evidence
    assert "not digested at commit either" not in of(records.record(), Place.TRANSFER).evidence


def test_a_bad_result_behind_an_aligner_is_likely_its_doing() -> None:
    """An aligner is the one step that changes values; its error and the route's limit are told."""
    part = with_figures(
        records.leased(aligner=ALIGNER, aligner_applied=True),
        Reason.ALIGNMENT_ERROR_EXCEEDED,
        {"alignment_error": 0.08, "alignment_error_max": 0.1},
    )
    first = suspicions(records.record(part, outcome=BAD))[0]
    assert (first.place, first.standing) == (Place.ALIGNMENT, Standing.LIKELY)
    assert (
        "small-to-large 3, applied by the producer, with an error of 0.08 where the route allows 0.1" in first.evidence
    )


def test_an_aligner_of_unknown_error_says_so() -> None:
    """Without figures nothing is made up."""
    found = of(records.record(records.leased(aligner=ALIGNER)), Place.ALIGNMENT)
    assert found.standing is Standing.POSSIBLE
    assert "to be applied by the consumer" in found.evidence
    assert "not known" in found.evidence


def test_one_model_version_needs_no_alignment() -> None:
    """The check of the model's version is the evidence; without it nothing is cleared."""
    part = records.leased()
    assert standing(records.record(part))[Place.ALIGNMENT] is Standing.CLEARED
    unasked = replace(part, verdict=records.refused().verdict)
    assert standing(records.record(unasked))[Place.ALIGNMENT] is Standing.POSSIBLE


def test_a_source_is_cleared_only_by_a_probe_that_ran() -> None:
    """Finite values and right digests say nothing about whether they belong to the tokens."""
    digested = records.leased(verified_at_commit=Verification.FULL, verified_now=Verification.FULL)
    assert standing(records.record(digested, depth=0))[Place.SOURCE_CACHE] is Standing.POSSIBLE
    assert standing(records.record(well_checked(), depth=0))[Place.SOURCE_CACHE] is Standing.CLEARED
    assert standing(records.record(well_checked(), depth=2))[Place.SOURCE_CACHE] is Standing.POSSIBLE


def test_what_is_left_when_all_else_is_cleared() -> None:
    """A bad result behind a well-checked cache is likely the receiver's."""
    first = suspicions(records.record(well_checked(), depth=0, outcome=BAD))[0]
    assert (first.place, first.standing) == (Place.RECEIVER, Standing.LIKELY)


def test_a_bad_trial_points_at_the_source() -> None:
    """A route that was bad before and is bad again has a cause that stays."""
    first = suspicions(records.record(records.leased(trial=True), outcome=BAD))[0]
    assert (first.place, first.standing) == (Place.SOURCE_CACHE, Standing.LIKELY)
    assert Standing.LIKELY not in standing(records.record(records.leased(trial=True))).values()


def test_unknown_tokens_leave_the_receiver_open() -> None:
    """A consumer that takes any tokens was not compared with the cache."""
    part = records.leased(verdict=records.verdict(terms={"tokens": None}))
    assert "did not say its tokens" in of(records.record(part), Place.RECEIVER).evidence
    assert "did not say its tokens" not in of(records.record(), Place.RECEIVER).evidence


def test_facts_name_the_parts_that_they_hold_for() -> None:
    """What holds for some parts only says for which."""
    record = records.record(records.leased(verified_now=Verification.DIGEST), records.refused(), records.leased())
    evidence = of(record, Place.TRANSFER).evidence
    assert "part 1: the bytes were digested again" in evidence
    assert "part 3: the bytes were not digested again" in evidence
    assert of(record, Place.TRANSFER).standing is Standing.POSSIBLE


@given(records.records)
def test_every_place_is_named_once_in_order(record: HandoffRecord) -> None:
    """All four places are told, each with evidence, the most likely first."""
    found = suspicions(record)
    assert sorted(s.place for s in found) == sorted(Place)
    assert all(s.evidence for s in found)
    order = list(Standing)
    ranks = [order.index(s.standing) for s in found]
    assert ranks == sorted(ranks)


@given(records.records)
def test_nothing_is_likely_unless_it_was_reported(record: HandoffRecord) -> None:
    """Without a report, no place is likely."""
    assert Standing.LIKELY not in standing(replace(record, outcome=None)).values()


@given(records.records)
def test_a_cache_is_cleared_only_for_what_was_seen(record: HandoffRecord) -> None:
    """Where caches were handed over and nobody reports a good result, the receiver and unchecked bytes stay open."""
    leased = [part for part in record.parts if part.leased]
    record = replace(record, outcome=None)
    found = standing(record)
    assert found[Place.RECEIVER] is not Standing.CLEARED
    if not leased:
        return
    all_digested = all(part.verified_now.includes(Verification.DIGEST) for part in leased)
    assert (found[Place.TRANSFER] is Standing.CLEARED) == (all_digested and not record.by_value)
    assert (found[Place.ALIGNMENT] is Standing.CLEARED) == all(part.aligner is None for part in leased)
    assert found[Place.SOURCE_CACHE] is not Standing.CLEARED


@given(records.records)
def test_checking_more_never_makes_a_place_worse(record: HandoffRecord) -> None:
    """More verification moves transfer and source towards cleared, or leaves them."""
    checked = tuple(replace(part, verified_now=Verification.FULL) for part in record.parts)
    before, after = standing(record), standing(replace(record, parts=checked))
    order = list(Standing)
    for place in (Place.TRANSFER, Place.SOURCE_CACHE):
        assert order.index(after[place]) >= order.index(before[place])
