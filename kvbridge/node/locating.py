"""What an acquire does about keys of which its own node knows nothing: it finds out who may own them.

What is found becomes a handoff reference, and goes the way that any other goes: its owner is asked, and what it says is
checked. If nothing is found, or not in time, the key is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.directory import Location
from kvbridge.node.neighbourhood import Neighbourhood
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.waiting import patience

_SHARE = 0.5
"""As much of a caller's time as finding out may take."""
_HURRIED = "the caller's time ran out before another node could be asked"
_SLOW = "the directory took too long, so no other node was asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What was found out."""

    parts: tuple[AcquireTerms, ...]
    """The terms, with the name on its owner of what is not here, where that is known."""
    not_asked: str = ""
    """Why no other node was asked for keys that may be one's; empty if one was, or none need be."""


async def located(
    parts: Sequence[AcquireTerms],
    tenancy: Tenancy,
    neighbourhood: Neighbourhood,
    *,
    seconds_left: float | None,
    seconds_max: float,
    clock: Callable[[], float],
) -> Located:
    """Find out about what is not here."""
    keys = [terms.reference.key for terms in parts if _is_missing(terms.reference, tenancy, now=clock())]
    if not keys:
        return Located(parts=tuple(parts))
    left = patience(seconds_left)
    share = seconds_max if left is None else left * _SHARE
    try:
        found = await neighbourhood.locate(tenancy.tenant, keys, seconds_max=min(share, seconds_max))
    except TimeoutError:
        return Located(parts=tuple(parts), not_asked=_HURRIED if share < seconds_max else _SLOW)
    taken = {terms.reference.key for terms in parts}
    return Located(parts=tuple(_renamed(terms, found.get(terms.reference.key), taken) for terms in parts))


def may_be_elsewhere(reference: PayloadReference) -> bool:
    """Tell whether others may know of a key; a generation is one of this node's own, and a handoff reference says."""
    return not reference.generation and not is_handoff_reference(reference.key)


def _is_missing(reference: PayloadReference, tenancy: Tenancy, *, now: float) -> bool:
    """Tell whether nothing is known here of a key that may be another node's."""
    if not may_be_elsewhere(reference):
        return False
    with tenancy.ledger() as ledger:
        return ledger.find(now=now, key=reference.key) is None


def _renamed(terms: AcquireTerms, location: Location | None, taken: set[str]) -> AcquireTerms:
    if location is None:
        return terms
    payload = PayloadReference(key=terms.reference.key, generation=location.generation)
    name = str(HandoffReference(node_id=location.node_id, payload=payload))
    if name in taken:  # The plan names it in both ways, and a plan holds nothing twice.
        return terms
    affinity = terms.affinity or terms.reference.key  # A conversation stays on its side of a canary wherever it is.
    return replace(terms, reference=PayloadReference(key=name, generation=0), affinity=affinity)
