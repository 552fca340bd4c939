"""What the shell has to do after a call to the ledger, in order."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.allocator import Extent
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGranted:
    """A slot was lent to a producer: write its header page as being written."""

    payload_id: int
    """The payload that the slot is for."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """Unique and increasing over all slots that this ledger ever lent; fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSealed:
    """The payload is committed: mark its header page ready."""

    payload_id: int
    """The payload in the slot."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """As granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRetired:
    """What the slot holds must not be used any more: mark its header page retired.

    Comes once for each granted slot, before `SlotFreed`: when the last reference has gone, or at once for a payload
    that was found corrupt, whatever leases it has.
    """

    payload_id: int
    """The payload that was in the slot."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """As granted."""
    why: Reason
    """What consumers are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFreed:
    """Nobody can be touching the slot's bytes any more; the same bytes may be granted by the next effect."""

    payload_id: int
    """The payload that was in the slot."""
    slot: Extent
    """Where it lies in the arena."""
    slot_generation: int
    """As granted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadEnded:
    """A payload can no longer be leased, or never got memory; consumers are told why from now on."""

    reference: PayloadReference
    """Key and generation."""
    reason: Reason
    """What consumers are told."""
    detail: str
    """The same for people."""


Effect = SlotGranted | SlotSealed | SlotRetired | SlotFreed | PayloadEnded
"""Anything that `Ledger.take_effects` returns."""
