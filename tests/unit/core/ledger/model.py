"""A ledger that anybody can check by reading: it looks at everything, counts nothing and remembers everything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvbridge.core.ledger import PayloadState, ReferenceKind
from kvbridge.core.reasons import Reason

PENDING = {PayloadState.RESERVED, PayloadState.VERIFYING}
Ending = tuple[str, int, Reason]


@dataclass(eq=False, kw_only=True)
class Row:
    """A payload that occupies memory."""

    payload_id: int
    key: str
    generation: int
    start: int
    length: int
    linger: float
    ttl: float
    state: PayloadState = PayloadState.RESERVED
    committed_at: float = 0.0
    since: float = 0.0
    used: int = 0
    failed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False, kw_only=True)
class Claim:
    """A token that has not been returned."""

    token: str
    kind: ReferenceKind
    client: str
    attached: bool
    row: Row
    ttl: float
    expires_at: float | None
    residue: bool = False


class Model:
    """What the ledger should hold."""

    def __init__(self, arena_bytes: int, ttls: dict[ReferenceKind, float]) -> None:
        self.arena_bytes = arena_bytes
        self.ttls = ttls
        self.now = 0.0
        self.rows: dict[int, Row] = {}
        self.claims: dict[str, Claim] = {}
        self.expired: dict[str, str] = {}
        self.committed: dict[str, int] = {}
        self.endings: list[Ending] = []
        self.uses = 0

    # Derived

    def live(self, *kinds: ReferenceKind) -> list[Claim]:
        return [claim for claim in self.claims.values() if not claim.residue and claim.kind in kinds]

    def references(self, row: Row, *kinds: ReferenceKind) -> list[Claim]:
        return [claim for claim in self.live(*kinds) if claim.row is row]

    def referenced(self, row: Row) -> bool:
        return bool(self.references(row, ReferenceKind.HOLD, ReferenceKind.LEASE))

    def residues(self, row: Row) -> list[Claim]:
        return [claim for claim in self.claims.values() if claim.residue and claim.row is row]

    def reservation(self, row: Row) -> Claim | None:
        return next(iter(self.references(row, ReferenceKind.RESERVATION)), None)

    def deadline(self, row: Row) -> float | None:
        if row.state is not PayloadState.COMMITTED:
            return None
        ttl_ends = row.committed_at + row.ttl
        return ttl_ends if self.referenced(row) else min(ttl_ends, row.since + row.linger)

    def ends_at(self, row: Row) -> float | None:
        reservation = self.reservation(row)
        return reservation.expires_at if reservation is not None else self.deadline(row)

    def next_deadline(self) -> float | None:
        claims = [c.expires_at for c in self.claims.values() if not c.residue and c.expires_at is not None]
        rows = [deadline for row in self.rows.values() if (deadline := self.deadline(row)) is not None]
        return min(claims + rows, default=None)

    def bytes_in(self, *states: PayloadState) -> int:
        return sum(row.length for row in self.rows.values() if row.state in states)

    def evictable(self) -> list[Row]:
        """Return whose end would free memory, least recently used first."""
        rows = [row for row in self.rows.values() if row.state is PayloadState.COMMITTED]
        free = [row for row in rows if not self.referenced(row) and not self.residues(row)]
        return sorted(free, key=lambda row: row.used)

    def lent_bytes(self) -> int:
        return sum(row.length for row in self.rows.values())

    def kept_bytes(self) -> int:
        """Return the bytes that no eviction would free."""
        return self.lent_bytes() - sum(row.length for row in self.evictable())

    def fits(self, length: int, without: Iterable[Row] = ()) -> bool:
        """Tell whether a gap of this length exists if some payloads were not there."""
        gone = set(without)
        start = 0
        for row in sorted((row for row in self.rows.values() if row not in gone), key=lambda row: row.start):
            if row.start - start >= length:
                return True
            start = row.end
        return self.arena_bytes - start >= length

    def find(self, key: str, generation: int) -> Row | None:
        rows = {row.generation: row for row in self.rows.values() if row.key == key}
        if generation:
            row = rows.get(generation)
            return row if row is not None and row.state in {*PENDING, PayloadState.COMMITTED} else None
        newest = self.committed.get(key, 0)
        if newest in rows and rows[newest].state is PayloadState.COMMITTED:
            return rows[newest]
        pending = [row for row in rows.values() if row.state in PENDING and row.generation > newest]
        return max(pending, key=lambda row: row.generation, default=None)

    # Changes

    def settle(self, now: float) -> None:
        """Let everything happen that is due, in order."""
        while (due := self.next_deadline()) is not None and due <= now:
            self.now = due
            claim = next((c for c in self.claims.values() if not c.residue and c.expires_at == due), None)
            if claim is not None:
                self.expire(claim)
            else:
                row = next(row for row in self.rows.values() if self.deadline(row) == due)
                self.end(row, PayloadState.DRAINING, Reason.PAYLOAD_EXPIRED)
        self.now = now

    def refer(self, row: Row, kind: ReferenceKind, token: str, client: str, *, attached: bool) -> None:
        assert token not in self.claims
        ttl = self.ttls[kind]
        self.claims[token] = Claim(
            token=token, kind=kind, client=client, attached=attached, row=row, ttl=ttl, expires_at=self.now + ttl
        )
        if kind is ReferenceKind.LEASE:
            self.use(row)

    def use(self, row: Row) -> None:
        self.uses += 1
        row.used = self.uses

    def commit(self, row: Row) -> None:
        self.drop_reservation(row)
        row.state = PayloadState.COMMITTED
        row.committed_at = row.since = self.now
        self.use(row)
        self.committed[row.key] = max(self.committed.get(row.key, 0), row.generation)

    def end(self, row: Row, state: PayloadState, reason: Reason) -> None:
        row.state = state
        self.endings.append((row.key, row.generation, reason))
        self.let_go(row)

    def drop_reservation(self, row: Row) -> None:
        reservation = self.reservation(row)
        if reservation is not None:
            del self.claims[reservation.token]

    def abort(self, row: Row) -> None:
        self.drop_reservation(row)
        self.end(row, PayloadState.ABORTED, Reason.PAYLOAD_EXPIRED)

    def expire(self, claim: Claim) -> None:
        if claim.attached and claim.kind is not ReferenceKind.HOLD:
            claim.residue = True
        else:
            del self.claims[claim.token]
            self.expired[claim.token] = claim.client
        if claim.kind is ReferenceKind.RESERVATION:
            self.end(claim.row, PayloadState.ABORTED, Reason.PAYLOAD_EXPIRED)
        else:
            self.unreferenced(claim.row)

    def give_back(self, claim: Claim) -> None:
        """Take a hold, a lease or a residue out."""
        del self.claims[claim.token]
        if claim.residue:
            self.let_go(claim.row)
        else:
            self.unreferenced(claim.row)

    def leave(self, claim: Claim) -> None:
        """Take any reference from a client that is gone."""
        if claim.residue or claim.kind is not ReferenceKind.RESERVATION:
            self.give_back(claim)
        elif claim.row.state is PayloadState.RESERVED:
            self.abort(claim.row)
        else:
            del self.claims[claim.token]

    def unreferenced(self, row: Row) -> None:
        if not self.referenced(row):
            row.since = self.now
        self.let_go(row)

    def let_go(self, row: Row) -> None:
        if row.state in {*PENDING, PayloadState.COMMITTED} or self.referenced(row):
            return
        if self.residues(row):
            row.state = PayloadState.QUARANTINED
        else:
            del self.rows[row.payload_id]
