"""Where a bad answer may come from, as far as the record of its handoff tells.

1. For each of the four places every fact of the record that bears on it is put in words and weighed: it speaks against
   the place, clears it, or leaves the question open.
2. One fact against makes a place likely; else one open question makes it possible; only a place of which all that is
   known clears it is cleared. So nothing is cleared for want of evidence.
3. A place is only likely where a consumer has reported something that cannot be, or a bad result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import TypeAlias

from kvbridge.core.descriptor import Verification
from kvbridge.core.gate import Finding
from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse, PartRecord
from kvbridge.core.reasons import Reason


@unique
class Place(StrEnum):
    """Where something can go wrong."""

    ALIGNMENT = "alignment"
    """The map from one model's cache to another's."""
    SOURCE_CACHE = "source_cache"
    """What the producer computed and wrote."""
    TRANSFER = "transfer"
    """The way of the bytes from the producer's commit to the consumer's eyes."""
    RECEIVER = "receiver"
    """What the consumer did with what it was handed."""


@unique
class Standing(StrEnum):
    """How the evidence stands."""

    LIKELY = "likely"
    """Something speaks against it."""
    POSSIBLE = "possible"
    """Nothing speaks against it, and not everything is known."""
    CLEARED = "cleared"
    """All that is known speaks for it."""


_STANDINGS = list(Standing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """One place and how the evidence on it stands."""

    place: Place
    """Where."""
    standing: Standing
    """How the evidence stands."""
    evidence: str
    """The evidence, for people; never empty."""


@dataclass(frozen=True, slots=True)
class _Fact:
    """One thing that is known and bears on a place."""

    weight: Standing
    """What the place would be if this were all that is known."""
    words: str
    """The fact."""


_Facts: TypeAlias = Iterator[_Fact]
_PartFacts: TypeAlias = Callable[[HandoffRecord, PartRecord], _Facts]


def suspicions(record: HandoffRecord) -> tuple[Suspicion, ...]:
    """Return all four places, the most likely first; among equals the one with the most evidence against it."""
    facts = {
        Place.ALIGNMENT: list(_of_parts(record, _alignment)),
        Place.SOURCE_CACHE: list(_of_parts(record, _source)),
        Place.TRANSFER: list(_of_parts(record, _transfer)),
    }
    alone = _was_bad(record) and all(_standing(found) is Standing.CLEARED for found in facts.values())
    facts[Place.RECEIVER] = list(_receiver(record, alone=alone))
    if _was_good(record):
        good = _clears("the consumer used the cache and reports a result as good as the text's")
        facts = {place: [good] for place in facts}
    ranked = sorted(facts.items(), key=lambda item: _rank(item[1]))
    return tuple(
        Suspicion(place=place, standing=_standing(found), evidence="; ".join(fact.words for fact in found))
        for place, found in ranked
    )


# Weighing


def _against(words: str) -> _Fact:
    return _Fact(Standing.LIKELY, words)


def _open(words: str) -> _Fact:
    return _Fact(Standing.POSSIBLE, words)


def _clears(words: str) -> _Fact:
    return _Fact(Standing.CLEARED, words)


def _standing(facts: list[_Fact]) -> Standing:
    weights = [fact.weight for fact in facts]
    return next(standing for standing in _STANDINGS if standing in weights)


def _rank(facts: list[_Fact]) -> tuple[int, int, int]:
    weights = [fact.weight for fact in facts]
    rank = _STANDINGS.index(_standing(facts))
    return rank, -weights.count(Standing.LIKELY), -weights.count(Standing.POSSIBLE)


# What was reported


def _was_bad(record: HandoffRecord) -> bool:
    return record.outcome is not None and record.outcome.quality is HandoffQuality.BAD


def _was_used(record: HandoffRecord) -> bool:
    return record.outcome is not None and record.outcome.use is HandoffUse.USED


def _was_good(record: HandoffRecord) -> bool:
    good = record.outcome is not None and record.outcome.quality is HandoffQuality.GOOD
    return good and _was_used(record) and any(part.leased for part in record.parts)


# The places that caches go through


def _of_parts(record: HandoffRecord, facts_of: _PartFacts) -> _Facts:
    """Yield the facts of all parts that were leased."""
    leased = [(number, part) for number, part in enumerate(record.parts, 1) if part.leased]
    if not leased:
        yield _clears("no part was handed over as a cache")
        return
    if len(leased) == 1:
        yield from facts_of(record, leased[0][1])
    else:
        yield from _merged({number: list(facts_of(record, part)) for number, part in leased})
    if record.outcome is not None and record.outcome.use is not HandoffUse.USED:
        yield _open("by its report the consumer took the text, and the cache had no part in the answer")


def _merged(facts_of_parts: dict[int, list[_Fact]]) -> _Facts:
    """Yield each fact once, with the parts that it holds for unless it holds for all."""
    holds_for: dict[_Fact, list[int]] = {}
    for number, facts in facts_of_parts.items():
        for fact in facts:
            holds_for.setdefault(fact, []).append(number)
    for fact, numbers in holds_for.items():
        where = "" if len(numbers) == len(facts_of_parts) else f"part {', '.join(map(str, numbers))}: "
        yield _Fact(fact.weight, where + fact.words)


def _alignment(record: HandoffRecord, part: PartRecord) -> _Facts:
    if part.aligner is None:
        same = _passed(part, Reason.MODEL_VERSION_MISMATCH) is not None
        yield (
            _clears("producer and consumer are of one model version, and nothing was aligned")
            if same
            else _open("whether the models are of one version was not asked")
        )
        return
    where = "applied by the producer" if part.aligner_applied else "to be applied by the consumer, unseen by the node"
    words = f"aligner {part.aligner.name} {part.aligner.version}, {where}{_alignment_error(part)}"
    suspected = _was_bad(record) and _was_used(record)
    yield _against(f"the result was bad after {words}") if suspected else _open(words)


def _alignment_error(part: PartRecord) -> str:
    finding = _passed(part, Reason.ALIGNMENT_ERROR_EXCEEDED)
    figures = {} if finding is None else finding.figures
    error, most = figures.get("alignment_error"), figures.get("alignment_error_max")
    if not isinstance(error, int | float) or not isinstance(most, int | float):
        return "; how far it errs is not known"
    return f", with an error of {error:g} where the route allows {most:g}"


def _source(record: HandoffRecord, part: PartRecord) -> _Facts:
    if part.trial and part.aligner is None and _was_bad(record) and _was_used(record):
        yield _against("the result was bad in a trial of a route whose breaker had tripped over earlier ones")
    probe = _passed(part, Reason.PROBE_BELOW_THRESHOLD)
    if probe is not None and probe.figures:
        yield _clears("at commit a probe found nothing that contradicts the declared tokens and model")
    else:
        yield _open("no probe compared the values with the declared tokens and model")
    if _verified(part, Verification.FULL):
        yield _clears("every value was found to be finite")
    else:
        yield _open("whether all values are finite was not checked")
    if record.depth:
        yield _open(f"handoffs that the context had been through before: {record.depth}")


def _transfer(record: HandoffRecord, part: PartRecord) -> _Facts:
    if part.verified_now.includes(Verification.DIGEST):
        yield _clears("the bytes were digested again for this handoff and are those that were sealed")
    else:
        yield _open("the bytes were not digested again for this handoff")
        if not _verified(part, Verification.DIGEST):
            yield _open("they were not digested at commit either")
    if record.by_value:
        yield _open("the consumer downloads what it leases, and the node does not see what arrives")


def _verified(part: PartRecord, level: Verification) -> bool:
    levels = (part.verified_at_commit, part.verified_now)
    return any(reached is not None and reached.includes(level) for reached in levels)


def _passed(part: PartRecord, reason: Reason) -> Finding | None:
    """Return what the check of `reason` looked at, if it was asked and passed."""
    findings = (finding for finding in part.verdict.findings if finding.reason is reason)
    return next((finding for finding in findings if finding.problem is None), None)


# The receiver


def _receiver(record: HandoffRecord, *, alone: bool) -> _Facts:
    leased = [part for part in record.parts if part.leased]
    yield from _contradictions(record, has_cache=bool(leased))
    if alone and leased:
        yield _against("the result was bad, and everything before the receiver is cleared")
    yield _open("the node does not see how the consumer uses what it is handed")
    if leased and len(record.parts) > 1:
        yield _open(f"it has to lay out {len(record.parts)} parts, with their positions and masks")
    if any(_tokens_unknown(part) for part in leased):
        yield _open("it did not say its tokens, so they were not compared with the cached ones")
    if record.outcome is None:
        yield _open("it has reported nothing")
    elif record.outcome.detail:
        yield _open(f"it says: {record.outcome.detail}")


def _contradictions(record: HandoffRecord, *, has_cache: bool) -> _Facts:
    """Yield what in a consumer's report cannot be the fault of a cache."""
    outcome = record.outcome
    if outcome is None:
        return
    if not has_cache and outcome.use is not HandoffUse.TEXT:
        yield _against("it reports to have had a cache, and was given none")
    if not has_cache and _was_bad(record):
        yield _against("the result was bad although every part was text")
    if has_cache and _was_bad(record) and outcome.use is not HandoffUse.USED:
        yield _against("the result was bad although, by its own report, it took the text")


def _tokens_unknown(part: PartRecord) -> bool:
    finding = _passed(part, Reason.TOKENS_MISMATCH)
    return finding is None or finding.figures.get("prompt_tokens") is None
