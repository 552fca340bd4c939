"""A ledger with a clock that tests turn by hand, and short words for what clients do with it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, TypeVar

from kvbridge.core.descriptor import FallbackText, Verification
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import Committed, Effect, Grant, Ledger, LedgerLimits, Payload, Rejected, Tombstone
from kvbridge.core.reasons import Reason
from tests.builders import spec

RESERVATION_SECONDS = 5.0
LEASE_SECONDS = 20.0
HOLD_SECONDS = 30.0
LINGER_SECONDS = 10.0
TTL_SECONDS = 100.0
LONG_SECONDS = 1e6
DIGESTS = (bytes(16), bytes(range(16)))

T = TypeVar("T")


class Desk:
    """One ledger, its time and everything that it wanted done."""

    def __init__(self, *, pages: int = 64, **limits: Any) -> None:
        """Open a ledger over an arena of `pages` pages at time 0."""
        durations = {
            "reservation_ttl_seconds": RESERVATION_SECONDS,
            "lease_ttl_seconds": LEASE_SECONDS,
            "hold_ttl_seconds": HOLD_SECONDS,
            "linger_seconds_default": LINGER_SECONDS,
            "ttl_seconds_default": TTL_SECONDS,
        }
        tokens = count(1)
        self.ledger = Ledger(
            arena_bytes=pages * PAGE_BYTES,
            limits=LedgerLimits(**{**durations, **limits}),
            new_token=lambda: f"token-{next(tokens)}",
        )
        self.now = 0.0
        self.effects: list[Effect] = []

    def do(self, call: Callable[..., T], **arguments: Any) -> T:
        """Call a method at this moment and note its effects."""
        try:
            return call(now=self.now, **arguments)
        finally:
            self.effects += self.ledger.take_effects()

    def wait(self, seconds: float, *, processing: bool = True) -> None:
        """Let time pass, and process what becomes due unless the ledger is to fall behind."""
        self.now += seconds
        while processing and self.do(self.ledger.advance, events_max=3):
            pass

    def reserve(
        self, key: str = "k", *, pages: int = 1, client: str = "producer", attached: bool = True, **changes: Any
    ) -> Grant:
        """Reserve a slot of `pages` pages."""
        return self.do(
            self.ledger.reserve,
            client_id=client,
            attached=attached,
            spec=spec(key=key, **changes),
            slot_bytes=pages * PAGE_BYTES,
        )

    def begin(self, token: str, *, client: str = "producer", **changes: Any) -> Payload:
        """Begin the commit of a reservation with the tokens and the text of its spec."""
        seal: dict[str, Any] = {
            "valid_length": None,
            "tokens": None,
            "fallback": None,
            "layer_digests": (),
            "verification": Verification.DIGEST,
        }
        return self.do(self.ledger.begin_commit, client_id=client, token=token, **{**seal, **changes})

    def finish(
        self, payload_id: int, *, failure: tuple[Reason, str] | None = None, hold: bool = False
    ) -> Committed | Rejected:
        """Finish a verification."""
        return self.do(
            self.ledger.finish_commit, payload_id=payload_id, layer_digests=DIGESTS, failure=failure, hold=hold
        )

    def commit(self, token: str, *, client: str = "producer", hold: bool = False) -> Committed:
        """Begin and finish a commit that passes."""
        committed = self.finish(self.begin(token, client=client).payload_id, hold=hold)
        assert isinstance(committed, Committed)
        return committed

    def publish(self, key: str = "k", *, pages: int = 1, **changes: Any) -> int:
        """Reserve and commit a payload without a hold, and return its id."""
        return self.commit(self.reserve(key, pages=pages, **changes).token).payload_id

    def lease(self, payload_id: int, *, client: str = "consumer", attached: bool = True) -> str:
        """Lease a payload and return the token."""
        return self.do(self.ledger.lease, client_id=client, attached=attached, payload_id=payload_id).token

    def renew(self, *tokens: str, client: str = "consumer") -> list[float | None]:
        """Renew references."""
        return self.do(self.ledger.renew, client_id=client, tokens=tokens)

    def release(self, *tokens: str, client: str = "consumer") -> set[str]:
        """Release references."""
        return self.do(self.ledger.release, client_id=client, tokens=tokens)

    def abort(self, token: str, *, client: str = "producer") -> None:
        """Abort a reservation."""
        self.do(self.ledger.abort, client_id=client, token=token)

    def fail(self, payload_id: int, reason: Reason = Reason.PAYLOAD_CORRUPT, detail: str = "bits flipped") -> bool:
        """Report a payload as bad."""
        return self.do(self.ledger.fail, payload_id=payload_id, reason=reason, detail=detail)

    def end(self, client: str) -> int:
        """Let a client die."""
        return self.do(self.ledger.end_client, client_id=client)

    def find(self, key: str = "k", generation: int = 0) -> Payload | Tombstone | None:
        """Ask as a consumer does."""
        return self.do(self.ledger.find, key=key, generation=generation)

    def tombstone(self, key: str = "k", generation: int = 0) -> Tombstone:
        """Ask as a consumer does, for what has ended."""
        found = self.find(key, generation)
        assert isinstance(found, Tombstone), found
        return found

    def payload(self, key: str = "k", generation: int = 0) -> Payload:
        """Ask as a consumer does, for what is there."""
        found = self.find(key, generation)
        assert isinstance(found, Payload), found
        return found

    def is_there(self, key: str = "k", generation: int = 0) -> bool:
        """Tell whether a consumer finds a payload."""
        return isinstance(self.find(key, generation), Payload)

    def has_ended(self, key: str = "k", generation: int = 0) -> bool:
        """Tell whether a consumer finds a tombstone."""
        return isinstance(self.find(key, generation), Tombstone)

    def occupant(self, key: str = "k", generation: int = 0) -> Payload | None:
        """Look at what occupies memory."""
        return self.ledger.occupant(key=key, generation=generation)

    def effects_of(self, *kinds: type[Effect]) -> list[Effect]:
        """Return the effects of these kinds so far."""
        return [effect for effect in self.effects if isinstance(effect, kinds)]


def text(words: str) -> FallbackText:
    """Return a fallback text."""
    return FallbackText(text=words)
