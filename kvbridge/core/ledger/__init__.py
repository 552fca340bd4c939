"""The ledger of one arena: which payloads there are, who references them, until when, and which memory they occupy."""

from kvbridge.core.ledger.effects import Effect, PayloadEnded, SlotFreed, SlotGranted, SlotRetired, SlotSealed
from kvbridge.core.ledger.ledger import Ledger
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.ledger.records import Committed, Grant, Page, Payload, Rejected, Tombstone, Usage
from kvbridge.core.ledger.states import PayloadEvent, PayloadState
from kvbridge.core.references import ReferenceKind

__all__ = [
    "Committed",
    "Effect",
    "Grant",
    "Ledger",
    "LedgerLimits",
    "Page",
    "Payload",
    "PayloadEnded",
    "PayloadEvent",
    "PayloadState",
    "ReferenceKind",
    "Rejected",
    "SlotFreed",
    "SlotGranted",
    "SlotRetired",
    "SlotSealed",
    "Tombstone",
    "Usage",
]
