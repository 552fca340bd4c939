"""Places of the parts of a plan, against the prompt that they make up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.context import context_digest
from kvbridge.core.descriptor import FallbackText, PayloadReference, Verification, seal
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import AcquireTerms, Candidate, Conditions, Question, decide
from kvbridge.core.ledger import Tombstone
from kvbridge.core.plan import PLAN_PARTS_MAX, check_plan, placed, places
from kvbridge.core.reasons import Reason
from kvbridge.core.tokens import TokenSequence
from tests import builders

TERMS = AcquireTerms(
    reference=PayloadReference(key="k", generation=0), model=builders.model_tag(), tokens=builders.tokens(12)
)
UNPLACED = {Reason.TOKENS_MISMATCH, Reason.POSITION_ENCODING_MISMATCH}


def ended(count: int | None) -> Tombstone | None:
    """Return what the ledger remembers of a payload of so many tokens; None stands for nothing."""
    if count is None:
        return None
    return Tombstone(
        reference=PayloadReference(key="k", generation=1),
        reason=Reason.PAYLOAD_EXPIRED,
        detail="",
        model=builders.model_tag(),
        fallback=FallbackText(),
        ended_at=0.0,
        tokens=builders.tokens(count),
    )


def _with_tokens(tokens: TokenSequence) -> Tombstone:
    known = ended(1)
    assert known is not None
    return replace(known, tokens=tokens)


lengths = st.lists(st.one_of(st.none(), st.integers(1, 50)), max_size=10)


@given(lengths)
def test_parts_stand_one_after_another_as_far_as_lengths_are_known(counts: list[int | None]) -> None:
    """Each part begins where the one before it ends, and nothing behind an unknown length has a place."""
    found = places([ended(count) for count in counts])
    assert [place.length for place in found] == counts
    for index, place in enumerate(found):
        before = counts[:index]
        expected = None if None in before else sum(count for count in before if count is not None)
        assert place.token_offset == expected


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 100), st.integers(0, 5))
def test_the_pieces_of_a_prompt_pass_where_they_stand_and_nowhere_else(
    counts: list[int], first_position: int, shift: int
) -> None:
    """Cut a prompt into payloads: each passes the gate at its place, and at any other place its position is refused."""
    whole = replace(TERMS, tokens=builders.tokens(sum(counts)), first_position=first_position)
    for count, place in zip(counts, places([ended(count) for count in counts]), strict=True):
        assert place.token_offset is not None
        assert whole.tokens is not None
        spec = builders.spec(
            tokens=builders.tokens(count, first=place.token_offset),
            capacity_tokens=count,
            first_position=first_position + place.token_offset,
            context_digest=context_digest([(whole.tokens.packed_ids or b"")[: 4 * place.token_offset]]),
        )
        descriptor = seal(
            spec, generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.NONE
        )
        candidate = Candidate(known=True, descriptor=descriptor)
        here = placed(whole, replace(place, token_offset=place.token_offset + shift), cached_segments_nearer=0)
        verdict = decide(Question(terms=here, candidate=candidate, conditions=Conditions()))
        reasons = {failure.reason for failure in verdict.failures} - {Reason.VALID_LENGTH_INVALID}
        assert reasons == (UNPLACED if shift else set())


def test_a_part_behind_an_unknown_length_is_refused() -> None:
    """Its tokens and its position cannot be compared, so both checks fail closed."""
    _, behind = places([None, ended(10)])
    descriptor = seal(
        builders.spec(), generation=1, valid_length=None, tokens=None, layer_digests=(), verification=Verification.NONE
    )
    question = Question(
        terms=placed(TERMS, behind, cached_segments_nearer=0),
        candidate=Candidate(known=True, descriptor=descriptor),
        conditions=Conditions(),
    )
    assert {failure.reason for failure in decide(question).failures} == UNPLACED


def test_the_tokens_of_earlier_parts_are_known_as_far_as_they_are_known_by_id() -> None:
    """Who takes any tokens has the earlier parts' before a part; who knows the prompt compares with that."""
    by_digest = replace(builders.tokens(3), packed_ids=None)
    first, second, third, fourth = places([ended(2), ended(3), _with_tokens(by_digest), ended(1)])
    ids = [builders.tokens(count).packed_ids for count in (2, 3)]
    assert [place.earlier_ids for place in (first, second, third)] == [(), (ids[0],), (ids[0], ids[1])]
    assert fourth.earlier_ids is None
    taker = replace(TERMS, tokens=None)
    assert placed(taker, third, cached_segments_nearer=0).earlier_ids == (ids[0], ids[1])
    assert placed(TERMS, third, cached_segments_nearer=0).earlier_ids == ()


def test_placing_keeps_everything_else() -> None:
    """Only the place and the number of cached parts nearer to the new tokens change."""
    [place] = places([ended(3)])
    assert placed(TERMS, place, cached_segments_nearer=2) == replace(TERMS, cached_segments_nearer=2)


@pytest.mark.parametrize(
    "keys", [[], [str(number) for number in range(PLAN_PARTS_MAX + 1)], ["a", "b", "a"]], ids=["none", "many", "twice"]
)
def test_plans_that_cannot_be_are_refused(keys: list[str]) -> None:
    """A plan names something, not too much, and nothing twice."""
    parts = [replace(TERMS, reference=PayloadReference(key=key, generation=0)) for key in keys]
    with pytest.raises(InvalidFieldError) as caught:
        check_plan(parts)
    assert caught.value.field == "payloads"


def test_the_largest_plan_is_allowed() -> None:
    """The limit itself may be reached."""
    check_plan([replace(TERMS, reference=PayloadReference(key=str(n), generation=0)) for n in range(PLAN_PARTS_MAX)])
