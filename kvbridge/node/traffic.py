"""How many bytes went through a node since its start."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.ledger import Committed, Rejected


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Canonical bytes by what became of them; each only grows."""

    published_bytes: int = 0
    """Committed, whichever way they came."""
    uploaded_bytes: int = 0
    """Came in by value, committed or not."""
    downloaded_bytes: int = 0
    """Went out by value."""

    def note_commit(self, outcome: Committed | Rejected) -> None:
        """Count what was published."""
        if isinstance(outcome, Committed):
            self.published_bytes += outcome.descriptor.canonical_bytes
