"""What a node tells the clients that watch it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadRevoked:
    """Tensors that the client holds were found bad: they must not be used any more."""

    reference: PayloadReference
    """Key and generation."""
    reason: Reason
    """What was found."""
    detail: str
    """The same for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadQuarantined:
    """A payload that the client holds or held is contaminated, and with it whatever the client made of it."""

    reference: PayloadReference
    """Key and generation."""
    detail: str
    """What was quarantined and how it touches this payload, for people."""
    handoff_ids: tuple[str, ...]
    """The newest handoffs by which the client received it, newest first."""
    held: bool
    """Whether a lease of the client is still live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining:
    """The node is shutting down."""

    seconds_left: float
    """How long leases have to come home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseExpiring:
    """A lease ends soon unless it is renewed."""

    lease_token: str
    """The lease."""
    seconds_left: float
    """How long it lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsLost:
    """Events before this one are lost: whatever the client held since the last one that it saw is suspect."""


Event: TypeAlias = PayloadRevoked | PayloadQuarantined | NodeDraining | LeaseExpiring | EventsLost
"""Anything that a node tells."""
