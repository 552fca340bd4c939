"""Who hears what quarantines do on one node, so that others can be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbridge.core.ledger import PayloadEnded
from kvbridge.core.quarantine import Quarantine


class QuarantineListener(Protocol):
    """Hears what happens on this node that matters to others."""

    def imposed(self, tenant: str, quarantine: Quarantine) -> None:
        """Note a quarantine."""

    def replaced(self, tenant: str, quarantine: Quarantine, before: Sequence[str]) -> None:
        """Note a quarantine that holds in place of those of the names `before`, which end."""

    def lifted(self, quarantine_id: str) -> None:
        """Note the end of a quarantine."""

    def ended(self, tenant: str, ended: PayloadEnded) -> None:
        """Note that a payload can no longer be had, whatever the reason."""

    def found_bad(self, tenant: str, ended: PayloadEnded) -> None:
        """Note that a payload of this node, which other nodes were lent, was found bad."""


class Unheard:
    """Hears nothing; a `QuarantineListener`."""

    def imposed(self, tenant: str, quarantine: Quarantine) -> None:
        """Do nothing."""

    def replaced(self, tenant: str, quarantine: Quarantine, before: Sequence[str]) -> None:
        """Do nothing."""

    def lifted(self, quarantine_id: str) -> None:
        """Do nothing."""

    def ended(self, tenant: str, ended: PayloadEnded) -> None:
        """Do nothing."""

    def found_bad(self, tenant: str, ended: PayloadEnded) -> None:
        """Do nothing."""
