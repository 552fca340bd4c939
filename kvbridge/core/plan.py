"""A plan of several parts: where each part must stand in the consumer's context.

Parts stand one after another in the order that was asked for. A part's place follows from the lengths of the parts
before it, whether they are caches or text; where one of those lengths is not known, nothing behind it has a place, and
the checks of tokens and positions then refuse it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.tokens import TokenSequence

PLAN_PARTS_MAX = 64
"""Most payloads in one plan."""


class Found(Protocol):
    """What there is under a key."""

    @property
    def tokens(self) -> TokenSequence | None:
        """Return its tokens, as far as they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one part stands in the consumer's prompt."""

    token_offset: int | None
    """Index of its first token; None if the length of an earlier part is not known."""
    length: int | None
    """Its tokens; None if that is not known."""
    earlier_ids: tuple[bytes, ...] | None = ()
    """Packed ids of the parts before it; None if one of them is not known by id."""


def check_plan(parts: Sequence[AcquireTerms]) -> None:
    """Refuse plans that hold nothing, too much, or one payload twice.

    Raises:
        InvalidFieldError: naming `payloads`.
    """
    if not 1 <= len(parts) <= PLAN_PARTS_MAX:
        raise InvalidFieldError("payloads", f"must name 1 to {PLAN_PARTS_MAX} payloads, got {len(parts)}")
    keys = [terms.reference.key for terms in parts]
    if len(set(keys)) != len(keys):
        raise InvalidFieldError("payloads", "must not name a key twice")


def places(found: Sequence[Found | None]) -> list[Place]:
    """Return the place of each part, given what the ledger found for it."""
    return list(_places(found))


def _places(found: Sequence[Found | None]) -> Iterator[Place]:
    offset: int | None = 0
    earlier: tuple[bytes, ...] | None = ()
    for part in found:
        length, ids = _length(part), None if part is None or part.tokens is None else part.tokens.packed_ids
        yield Place(token_offset=offset, length=length, earlier_ids=earlier)
        offset = None if offset is None or length is None else offset + length
        earlier = None if earlier is None or ids is None else (*earlier, ids)


def _length(found: Found | None) -> int | None:
    tokens = None if found is None else found.tokens
    return None if tokens is None else tokens.count


def placed(terms: AcquireTerms, place: Place, *, cached_segments_nearer: int) -> AcquireTerms:
    """Return the terms of a part that stands at `place`, with so many cached parts between it and the new tokens."""
    if terms.token_offset == place.token_offset and terms.cached_segments_nearer == cached_segments_nearer:
        return terms  # As most are: a copy of so many fields takes longer than most checks.
    return replace(
        terms,
        token_offset=place.token_offset,
        # Who knows the prompt compares with that.
        earlier_ids=place.earlier_ids if terms.tokens is None else (),
        cached_segments_nearer=cached_segments_nearer,
    )
