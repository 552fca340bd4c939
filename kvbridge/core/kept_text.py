"""The text of a payload as it is kept beyond the life of its node, and what it says to whoever asks in a later one.

A node's lives are numbered, and each has generations of its own, whatever is kept and whatever was lost: generation
`n` of life `l` is `l * GENERATIONS_OF_A_LIFE + n`. So a reference from an earlier life never names a newer payload.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.ledger import Tombstone
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence

GENERATIONS_OF_A_LIFE = 10**12
"""More than a node gives out from start to end: at a hundred thousand a second it would take 115 days."""
LIVES_MAX = (1 << 63) // GENERATIONS_OF_A_LIFE
"""As many lives as have generations that fit 63 bits."""

_CUT_OFF = "the node was restarted since it was committed"
_RESTARTED = "the node was restarted since"
_WHY_NOT_KEPT = "it has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptText:
    """What is kept of one payload."""

    reference: PayloadReference
    """Key and generation."""
    model: ModelTag
    """Who computed it, or was to."""
    fallback: FallbackText
    """What consumers take instead."""
    tokens: TokenSequence | None
    """Its tokens, if they were declared."""
    reason: Reason | None = None
    """Why it ended; None if it had not when that was last noted."""
    detail: str = ""
    """The same for people."""


def generations_before(life: int) -> int:
    """Return the greatest generation that a life before this one, counted from 0, may have given out."""
    return life * GENERATIONS_OF_A_LIFE


def recalled(kept: KeptText, *, life: int, now: float) -> Tombstone:
    """Return what a consumer in this life is told of a payload that no ledger remembers."""
    before = kept.reference.generation <= generations_before(life)
    if kept.reason is None:
        detail = _CUT_OFF if before else _WHY_NOT_KEPT
    else:
        detail = f"{kept.detail}; {_RESTARTED}" if before else kept.detail
    return Tombstone(
        reference=kept.reference,
        model=kept.model,
        reason=kept.reason or Reason.PAYLOAD_EXPIRED,
        detail=detail,
        fallback=kept.fallback,
        tokens=kept.tokens,
        ended_at=now,
    )
