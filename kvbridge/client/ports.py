"""What publications and handoffs need of the bridge object that made them."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.client.connector import Connector
from kvbridge.client.keeper import Keeper
from kvbridge.client.references import Reference, ReferenceKind
from kvbridge.client.sessions import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The way to the bridge and the thread that looks after references."""

    connector: Connector
    """Finds the current session."""
    keeper: Keeper
    """Renews and returns references."""
    owner: object
    """The bridge object, which lives as long as anything that came from it."""

    def reference(
        self, session: Session, kind: ReferenceKind, *, token: str, ttl_seconds: float, asked_at: float
    ) -> Reference:
        """Return a reference that is renewed from now on."""
        reference = Reference(
            session=session,
            kind=kind,
            token=token,
            ttl_seconds=ttl_seconds,
            asked_at=asked_at,
            on_end=self.keeper.ended,
            keepalive=self.owner,
        )
        self.keeper.track(reference)
        return reference
