"""What publications and handoffs need of the bridge object that made them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.keeper import Keeper
from kvbridge.client.references import Ended, Reference, Unanswered
from kvbridge.client.rpc import Method
from kvbridge.client.sessions import Session
from kvbridge.client.turns import Turns
from kvbridge.core.references import ReferenceKind

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The way to the bridge and the thread that looks after references."""

    connector: Connector
    """Finds the current session."""
    keeper: Keeper
    """Renews and returns references."""
    writers: Turns
    """Whoever is writing into a slot of the arena; nobody is any more once the bridge object is closed."""
    owner: object
    """The bridge object, which lives as long as anything that came from it."""

    def ask(
        self,
        method: Method[_Answer],
        request: Any,
        deadline: Deadline,
        *,
        granted: Callable[[Session, _Answer], tuple[Ended, ...]],
    ) -> tuple[Session, _Answer]:
        """Make a call that grants a reference; what it grants after this has given up is returned in the background.

        Raises:
            CallFailedError: there was no answer in time, or an error status.
        """

        def unanswered(session: Session) -> None:
            self.keeper.ended(Unanswered(session=session, method=method, request=request, granted=granted))

        return self.connector.call(method, request, deadline, unanswered=unanswered)

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
