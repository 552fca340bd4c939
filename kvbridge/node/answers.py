"""What a node answers to an acquire."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.attention import AttentionLayout
from kvbridge.core.descriptor import FallbackText, PayloadDescriptor
from kvbridge.core.gate import Finding
from kvbridge.core.ledger import Grant
from kvbridge.core.tags import AlignerTag
from kvbridge.core.tokens import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """The gate passed: a lease on verified tensors."""

    grant: Grant
    """The lease."""
    descriptor: PayloadDescriptor
    """What was leased."""
    aligner_to_apply: AlignerTag | None
    """The aligner that the consumer must apply before use; None if the cache is used as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The gate refused: take the text."""

    finding: Finding
    """The first check that failed."""
    fallback: FallbackText
    """What to take."""
    tokens: TokenSequence | None
    """The producer's tokens, if it gave them."""
    retry_after_seconds: float | None
    """When asking again may help; None if it will not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAnswer:
    """The answer to one acquire."""

    handoff_id: str
    """Unguessable name of the handoff."""
    parts: tuple[Leased | Fallback, ...]
    """One for each payload that was asked for, in that order."""
    layout: AttentionLayout | None
    """How the parts lie; None if the length of a part is not known."""
