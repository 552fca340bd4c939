"""Turning a token that a client shows into a reference, or into the error that the client made."""

from __future__ import annotations

from kvbridge.core.errors import NotYoursError, UnknownReferenceError
from kvbridge.core.ledger.entries import ReferenceEntry
from kvbridge.core.ledger.lifecycle import Lifecycle
from kvbridge.core.references import ReferenceKind


class Claims:
    """Looks tokens up. One whose time has come expires here, however far behind the processing of deadlines is."""

    def __init__(self, life: Lifecycle) -> None:
        """Look up in the tables of `life`."""
        self._life = life

    def __repr__(self) -> str:
        """Show what is looked up in."""
        return f"<Claims on {self._life.references!r}>"

    def find(self, client_id: str, token: str, *, now: float, field: str) -> ReferenceEntry | None:
        """Return the client's reference, be it live or a residue.

        Raises:
            NotYoursError: `field` belongs to another client.
        """
        references = self._life.references
        reference = references.find(token)
        if reference is not None and reference.expired(now):
            self._life.expire(reference)
            reference = references.find(token)
        if reference is not None and reference.client_id != client_id:
            raise NotYoursError(field)
        return reference

    def live(self, client_id: str, token: str, kind: ReferenceKind, *, now: float, field: str) -> ReferenceEntry:
        """Return the client's live reference of this kind.

        Raises:
            UnknownReferenceError: `field` is unknown, has expired, or is of another kind.
            NotYoursError: it belongs to another client.
        """
        reference = self.find(client_id, token, now=now, field=field)
        if reference is None:
            raise UnknownReferenceError(field)
        if reference.kind is not kind:
            raise UnknownReferenceError(field, f"the token is not a {kind.lower()}")
        if reference.residue:
            raise UnknownReferenceError(field, f"the {kind.lower()} has expired")
        return reference

    def abortable(self, client_id: str, token: str, *, now: float, field: str) -> ReferenceEntry | None:
        """Return the client's reservation, live or a residue, or None if the token is remembered as expired.

        Raises:
            UnknownReferenceError: `field` is unknown or not a reservation.
            NotYoursError: it belongs to another client.
        """
        reference = self._known(client_id, token, now=now, field=field)
        if reference is not None and reference.kind is not ReferenceKind.RESERVATION:
            raise UnknownReferenceError(field, "the token is not a reservation")
        return reference

    def releasable(self, client_id: str, token: str, *, now: float, field: str) -> ReferenceEntry | None:
        """Return the client's hold or lease, or any residue, or None if the token is remembered as expired.

        Raises:
            UnknownReferenceError: `field` is unknown or a live reservation.
            NotYoursError: it belongs to another client.
        """
        reference = self._known(client_id, token, now=now, field=field)
        if reference is not None and reference.kind is ReferenceKind.RESERVATION and not reference.residue:
            raise UnknownReferenceError(field, "the token is a reservation, which ends by commit or abort")
        return reference

    def _known(self, client_id: str, token: str, *, now: float, field: str) -> ReferenceEntry | None:
        reference = self.find(client_id, token, now=now, field=field)
        if reference is None and not self._life.references.remembers(token, client_id):
            raise UnknownReferenceError(field)
        return reference
