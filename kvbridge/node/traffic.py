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
    """Came in by value from clients, committed or not."""
    downloaded_bytes: int = 0
    """Went out by value to clients."""
    pulled_bytes: int = 0
    """Came in from other nodes, whether or not they became a replica."""
    pulled_from_owners_bytes: int = 0
    """Of these, came from the nodes that own them."""
    pulled_from_replicas_bytes: int = 0
    """Of these, came from other nodes that had a replica."""
    sent_bytes: int = 0
    """Went out to other nodes that pulled them."""

    def note_arrival(self, nbytes: int, *, from_a_node: bool) -> None:
        """Count what came in by value."""
        if from_a_node:
            self.pulled_bytes += nbytes
        else:
            self.uploaded_bytes += nbytes

    def note_pull(self, nbytes: int, *, from_replica: bool) -> None:
        """Count whose copy it was that came in from another node."""
        if from_replica:
            self.pulled_from_replicas_bytes += nbytes
        else:
            self.pulled_from_owners_bytes += nbytes

    def note_departure(self, nbytes: int, *, to_a_node: bool) -> None:
        """Count what went out by value."""
        if to_a_node:
            self.sent_bytes += nbytes
        else:
            self.downloaded_bytes += nbytes

    def note_commit(self, outcome: Committed | Rejected) -> None:
        """Count what was published."""
        if isinstance(outcome, Committed):
            self.published_bytes += outcome.descriptor.canonical_bytes
