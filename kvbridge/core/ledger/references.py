"""Which tokens are live, whose they are, and which have expired."""

from __future__ import annotations

from collections import OrderedDict

from kvbridge.core.errors import LimitExceededError
from kvbridge.core.ledger.entries import ReferenceEntry
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.references import ReferenceKind


class ReferenceTable:
    """References by token and by client.

    An expired reference stays as a *residue* if its client may still be touching the bytes. Otherwise only its token is
    remembered, up to a limit, so that a late release is told "expired" rather than "unknown".
    """

    def __init__(self, limits: LedgerLimits) -> None:
        """Start empty."""
        self.limits = limits
        self._by_token: dict[str, ReferenceEntry] = {}
        self._by_client: dict[str, dict[str, ReferenceEntry]] = {}
        self._live = dict.fromkeys(ReferenceKind, 0)
        self._expired: OrderedDict[str, str] = OrderedDict()  # token -> client
        self.residues = 0

    def __repr__(self) -> str:
        """Show how many references there are, and of how many clients."""
        return f"<ReferenceTable of {len(self._by_token)} references of {len(self._by_client)} clients>"

    def __len__(self) -> int:
        """Return the number of references, residues included."""
        return len(self._by_token)

    @property
    def clients(self) -> int:
        """Return the number of clients that have a reference."""
        return len(self._by_client)

    @property
    def expired_tokens(self) -> int:
        """Return how many expired tokens are remembered."""
        return len(self._expired)

    def live(self, kind: ReferenceKind) -> int:
        """Return the number of live references of this kind."""
        return self._live[kind]

    def find(self, token: str) -> ReferenceEntry | None:
        """Return the reference, be it live or a residue."""
        return self._by_token.get(token)

    def of_client(self, client_id: str) -> list[ReferenceEntry]:
        """Return all references of a client, oldest first."""
        return list(self._by_client.get(client_id, {}).values())

    def remembers(self, token: str, client_id: str) -> bool:
        """Tell whether this is remembered as an expired token of this client."""
        return self._expired.get(token) == client_id

    def check_room(self, client_id: str) -> None:
        """Refuse if `client_id` can get no reference more.

        Raises:
            LimitExceededError: naming the limit.
        """
        if len(self._by_token) >= self.limits.references_max:
            raise LimitExceededError("references_max", self.limits.references_max)
        if len(self._by_client.get(client_id, ())) >= self.limits.references_per_client_max:
            raise LimitExceededError("references_per_client_max", self.limits.references_per_client_max)

    def add(self, reference: ReferenceEntry) -> None:
        """Enter a live reference."""
        assert reference.token not in self._by_token, "new_token() repeated itself"
        self._by_token[reference.token] = reference
        self._by_client.setdefault(reference.client_id, {})[reference.token] = reference
        self._live[reference.kind] += 1

    def expire(self, reference: ReferenceEntry) -> None:
        """Turn a live reference into a residue, or remove it and remember its token."""
        if not reference.leaves_residue:
            self.remove(reference)
            self.remember(reference)
            return
        self._live[reference.kind] -= 1
        self.residues += 1
        reference.residue = True

    def remove(self, reference: ReferenceEntry) -> None:
        """Forget a live reference or a residue."""
        del self._by_token[reference.token]
        of_client = self._by_client[reference.client_id]
        del of_client[reference.token]
        if not of_client:
            del self._by_client[reference.client_id]
        if reference.residue:
            self.residues -= 1
        else:
            self._live[reference.kind] -= 1

    def remember(self, reference: ReferenceEntry) -> None:
        """Remember the token of a removed reference as expired, forgetting the oldest beyond the limit."""
        self._expired[reference.token] = reference.client_id
        if len(self._expired) > self.limits.expired_tokens_max:
            self._expired.popitem(last=False)

    def forget_expired(self, token: str) -> None:
        """Forget that the token has expired."""
        self._expired.pop(token, None)
