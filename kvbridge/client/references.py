"""What a client owes the bridge: reservations, holds and leases, each returned when nobody uses it any more."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbridge.client.rpc import Method
from kvbridge.client.sessions import Session
from kvbridge.core.references import ReferenceKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A reference that its owner has let go of and that the bridge is still to be told about."""

    session: Session
    """Who owned it."""
    kind: ReferenceKind
    """What it was."""
    token: str
    """Names it at the bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unanswered:
    """A call that may have granted a reference, and whose answer nobody waits for any more."""

    session: Session
    """Who asked."""
    method: Method[Any]
    """What was called."""
    request: Any
    """With what; the same request id brings the same answer, if there was one."""
    granted: Callable[[Session, Any], tuple[Ended, ...]]
    """Finds in the answer what is to be returned."""


class Reference:
    """One live reference. It ends by `end`, or when the last object that carries it as its owner is gone.

    Objects that depend on the referenced memory (buffers, and through them tensors) keep the reference alive, so the
    memory cannot go before they do. Ending never sends anything: it leaves a note for the keeper, without a lock,
    because a finalizer may interrupt any code at all.
    """

    __slots__ = (
        "__weakref__",
        "_ends_at",
        "_finalizer",
        "_keepalive",
        "_lost",
        "kind",
        "session",
        "token",
        "ttl_seconds",
    )

    def __init__(
        self,
        *,
        session: Session,
        kind: ReferenceKind,
        token: str,
        ttl_seconds: float,
        asked_at: float,
        on_end: Callable[[Ended], None],
        keepalive: object,
    ) -> None:
        """Take over a token that lasts `ttl_seconds` from `asked_at`, when it was asked for, at least.

        `on_end` is called once, from any thread and possibly from a finalizer. `keepalive` lives as long as this does.
        """
        self.session = session
        self.kind = kind
        self.token = token
        self.ttl_seconds = ttl_seconds
        self._ends_at = asked_at + ttl_seconds
        self._lost = False
        self._keepalive = keepalive
        self._finalizer = weakref.finalize(self, on_end, Ended(session=session, kind=kind, token=token))
        # At interpreter exit the keeper returns everything at once.
        self._finalizer.atexit = False

    def __repr__(self) -> str:
        state = "ended" if self.ended else "lost" if self.lost else f"{self._ends_at - time.monotonic():.1f} s left"
        return f"<Reference {self.kind.lower()}, {state}>"

    @property
    def ended(self) -> bool:
        """Tell whether it was returned, or turned into something else."""
        return not self._finalizer.alive

    @property
    def lost(self) -> bool:
        """Tell whether it may have run out: what was read since it was last known to be live must be discarded."""
        return self._lost or time.monotonic() >= self._ends_at or not self.session.alive

    @property
    def live(self) -> bool:
        """Tell whether the bridge certainly still honours it."""
        return not (self.ended or self.lost)

    def end(self) -> None:
        """Return it; more than once does nothing."""
        self._finalizer()

    def settle(self) -> None:
        """Forget it without returning it, because the bridge has already turned it into something else."""
        self._finalizer.detach()

    def renewed(self, ttl_seconds: float | None, asked_at: float) -> None:
        """Note what the bridge answered to a renewal that was asked for at `asked_at`; None means that it is gone."""
        if ttl_seconds is None:
            self._lost = True
        else:
            self._ends_at = asked_at + ttl_seconds
