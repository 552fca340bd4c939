"""The ledger against a naive model, through any sequence of calls and silences."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvbridge.core.descriptor import Verification
from kvbridge.core.errors import (
    BridgeError,
    LimitExceededError,
    MemoryExhaustedError,
    NotYoursError,
    UnknownReferenceError,
    WrongStateError,
)
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import (
    Committed,
    Grant,
    Payload,
    PayloadState,
    ReferenceKind,
    Tombstone,
)
from kvbridge.core.reasons import Reason
from tests.builders import spec
from tests.unit.core.ledger.machine import ATTACHED, LIMITS, PAGES, LedgerMachine, clients, failures, keys
from tests.unit.core.ledger.model import PENDING, Row


class AnyLife(LedgerMachine):
    """Does to the ledger and to the model whatever clients, checks and time can do."""

    # Producers

    @rule(
        client=clients,
        key=keys,
        pages=st.integers(1, PAGES + 1),
        linger=st.sampled_from([None, 0.0, 3.0]),
        ttl=st.sampled_from([None, 0.0, 2.0, 12.0]),
    )
    def reserve(self, client: str, key: str, pages: int, linger: float | None, ttl: float | None) -> None:
        """Reserve a slot."""
        self.lend(client, key, pages, linger, ttl)

    @rule(client=clients, key=keys, pages=st.integers(1, PAGES // 2), hold=st.booleans())
    def publish(self, client: str, key: str, pages: int, hold: bool) -> None:
        """Reserve and commit in one go, so that the arena fills with what can be evicted."""
        grant = self.lend(client, key, pages, None, None)
        if grant is not None:
            self.begin(grant.token, client)
            self.finish(self.model.rows[grant.payload_id], None, hold=hold)

    def lend(self, client: str, key: str, pages: int, linger: float | None, ttl: float | None) -> Grant | None:
        """Reserve; whoever is evicted must have been necessary and least recently used."""
        self.settle()
        length = pages * PAGE_BYTES
        below_hard = self.model.kept_bytes() + length <= LIMITS.memory_hard_watermark * PAGES * PAGE_BYTES
        possible = below_hard and self.model.fits(length, self.model.evictable())
        refusal: type[BridgeError] | None = None if possible else MemoryExhaustedError
        if len(self.model.rows) >= LIMITS.payloads_max or self.no_reference_left(client):
            refusal = LimitExceededError
        grant = self.do(
            self.ledger.reserve,
            refusal,
            client_id=client,
            attached=ATTACHED[client],
            spec=spec(key=key, linger_seconds=linger, ttl_seconds=ttl),
            slot_bytes=length,
        )
        if refusal is MemoryExhaustedError:
            ending = self.memory.endings[-1]
            assert (ending[0], ending[2]) == (key, Reason.MEMORY_EXHAUSTED)
            self.check_generation(key, ending[1])
            self.model.endings.append(ending)
        if grant is None:
            return None
        self.check_eviction(length)
        self.check_generation(key, grant.reference.generation)
        row = Row(
            payload_id=grant.payload_id,
            key=key,
            generation=grant.reference.generation,
            start=grant.slot.offset_bytes,
            length=grant.slot.length_bytes,
            linger=LIMITS.linger_seconds_default if linger is None else linger,
            ttl=LIMITS.ttl_seconds_default if ttl is None else ttl,
        )
        assert row.length == length
        self.model.rows[row.payload_id] = row
        self.granted(grant, row, ReferenceKind.RESERVATION, client)
        return grant

    @rule(data=st.data())
    def begin_commit(self, data: st.DataObject) -> None:
        """Begin a commit."""
        self.settle()
        token = self.token(data)
        self.begin(token, self.client_of(data, token))

    def begin(self, token: str, client: str) -> None:
        """Begin a commit that starts or is refused."""
        claim, refusal = self.claimed(token, client, ReferenceKind.RESERVATION)
        if claim is not None and claim.row.state is PayloadState.VERIFYING:
            refusal = WrongStateError
        payload = self.do(
            self.ledger.begin_commit,
            refusal,
            client_id=client,
            token=token,
            valid_length=7,
            tokens=None,
            fallback=None,
            layer_digests=(),
            verification=Verification.NONE,
        )
        if payload is not None:
            assert claim is not None
            claim.row.state, claim.expires_at = PayloadState.VERIFYING, None

    @precondition(lambda self: self.model.bytes_in(PayloadState.VERIFYING))
    @rule(data=st.data(), failure=st.one_of(st.none(), st.none(), failures), hold=st.booleans())
    def finish_commit(self, data: st.DataObject, failure: Reason | None, hold: bool) -> None:
        """Finish a verification."""
        self.settle()
        self.finish(data.draw(self.rows(PayloadState.VERIFYING)), failure, hold=hold)

    def finish(self, row: Row, failure: Reason | None, *, hold: bool) -> None:
        """Finish a verification that passes or fails."""
        producer = self.model.reservation(row)
        outcome = self.do(
            self.ledger.finish_commit,
            None,
            payload_id=row.payload_id,
            layer_digests=(),
            failure=None if failure is None else (failure, "a finding"),
            hold=hold,
        )
        if failure is not None:
            self.model.drop_reservation(row)
            self.model.end(row, PayloadState.CORRUPT, failure)
            return
        assert isinstance(outcome, Committed)
        self.model.commit(row)
        if hold and producer is not None:
            self.granted(outcome.hold, row, ReferenceKind.HOLD, producer.client)
        else:
            assert outcome.hold is None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Abort a reservation, or acknowledge that it has expired."""
        self.settle()
        token = self.token(data)
        client = self.client_of(data, token)
        claim, refusal = self.known(token, client)
        if claim is not None and claim.kind is not ReferenceKind.RESERVATION:
            refusal = UnknownReferenceError
        elif claim is not None and claim.row.state is PayloadState.VERIFYING:
            refusal = WrongStateError
        self.do(self.ledger.abort, refusal, client_id=client, token=token)
        if refusal is not None:
            return
        if claim is None:
            del self.model.expired[token]
        elif claim.residue:
            self.model.give_back(claim)
        else:
            self.model.abort(claim.row)

    # Consumers

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), client=clients)
    def lease(self, data: st.DataObject, client: str) -> None:
        """Lease a payload."""
        row = data.draw(self.rows())
        self.settle()
        refusal: type[BridgeError] | None = None
        if self.no_reference_left(client):
            refusal = LimitExceededError
        elif row.payload_id not in self.model.rows or row.state is not PayloadState.COMMITTED:
            refusal = WrongStateError
        grant = self.do(
            self.ledger.lease, refusal, client_id=client, attached=ATTACHED[client], payload_id=row.payload_id
        )
        if refusal is None:
            self.granted(grant, row, ReferenceKind.LEASE, client)

    @precondition(lambda self: self.model.evictable())
    @rule(data=st.data(), client=clients)
    def visit(self, data: st.DataObject, client: str) -> None:
        """Lease and release in one go, so that payloads change places in the order of use."""
        self.settle()
        assert not self.do(self.ledger.advance, None, events_max=100)
        rows = self.model.evictable()
        if not rows or self.no_reference_left(client):
            return
        row = data.draw(st.sampled_from(rows))
        grant = self.do(self.ledger.lease, None, client_id=client, attached=ATTACHED[client], payload_id=row.payload_id)
        self.granted(grant, row, ReferenceKind.LEASE, client)
        claim = self.model.claims[self.tokens[-1]]
        assert self.do(self.ledger.release, None, client_id=client, tokens=[claim.token]) == set()
        self.model.give_back(claim)
        self.model.use(row)

    @rule(data=st.data())
    def payload_of(self, data: st.DataObject) -> None:
        """Ask for the payload of a lease: what it is told was not found bad, and is not freed meanwhile."""
        self.settle()
        token = self.token(data)
        client = self.client_of(data, token)
        claim, refusal = self.claimed(token, client, ReferenceKind.LEASE)
        if refusal is None and claim is not None and claim.row.failed:
            refusal = UnknownReferenceError
        payload = self.do(self.ledger.payload_of, refusal, client_id=client, token=token)
        if payload is not None:
            assert claim is not None
            assert payload.payload_id == claim.row.payload_id
            assert self.memory.slots[payload.slot_generation] == payload.slot

    @rule(data=st.data(), size=st.integers(0, 3))
    def renew(self, data: st.DataObject, size: int) -> None:
        """Renew tokens of one client, some of which may be gone, or another client's, or there twice."""
        self.settle()
        tokens = [self.token(data) for _ in range(size)]
        client = self.client_of(data, tokens[0]) if tokens else data.draw(clients)
        claims = [self.model.claims.get(token) for token in tokens]
        refusal = NotYoursError if any(claim is not None and claim.client != client for claim in claims) else None
        ttls = self.do(self.ledger.renew, refusal, client_id=client, tokens=tokens)
        if refusal is not None:
            return
        assert ttls == [None if claim is None or claim.residue else claim.ttl for claim in claims]
        for claim in claims:
            if claim is not None and not claim.residue and claim.expires_at is not None:
                claim.expires_at = self.now + claim.ttl

    @rule(data=st.data(), size=st.integers(0, 3))
    def release(self, data: st.DataObject, size: int) -> None:
        """Release tokens: all of them or none."""
        self.settle()
        tokens = [self.token(data) for _ in range(size)]
        client = self.client_of(data, tokens[0]) if tokens else data.draw(clients)
        refusals = [self.refusal_of_release(token, client) for token in tokens]
        refusal = next((refusal for refusal in refusals if refusal is not None), None)
        expired = self.do(self.ledger.release, refusal, client_id=client, tokens=tokens)
        if refusal is not None:
            return
        claims = [self.model.claims.get(token) for token in dict.fromkeys(tokens)]
        assert expired == {
            token for token in tokens if token not in self.model.claims or self.model.claims[token].residue
        }
        for token in set(tokens) - self.model.claims.keys():
            del self.model.expired[token]
        for claim in claims:
            if claim is not None:
                live = not claim.residue
                self.model.give_back(claim)
                if live:
                    self.model.use(claim.row)

    def refusal_of_release(self, token: str, client: str) -> type[BridgeError] | None:
        """Return the error that one token causes."""
        claim, refusal = self.known(token, client)
        if claim is not None and claim.kind is ReferenceKind.RESERVATION and not claim.residue:
            return UnknownReferenceError
        return refusal

    # Everybody else

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), reason=failures)
    def fail(self, data: st.DataObject, reason: Reason) -> None:
        """Find a payload corrupt."""
        row = data.draw(self.rows())
        self.settle()
        gone = row.payload_id not in self.model.rows or row.state is PayloadState.QUARANTINED
        refusal = WrongStateError if not gone and row.state in PENDING else None
        failed = self.do(self.ledger.fail, refusal, payload_id=row.payload_id, reason=reason, detail="a finding")
        if refusal is None:
            assert failed is not gone
        if failed:
            row.failed = True
            self.model.end(row, PayloadState.DRAINING, reason)

    @rule(client=clients)
    def end_client(self, client: str) -> None:
        """Let a client die."""
        self.settle()
        claims = [claim for claim in self.model.claims.values() if claim.client == client]
        assert self.do(self.ledger.end_client, None, client_id=client) == len(claims)
        for claim in claims:
            self.model.leave(claim)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 3.0, 5.0]))
    def be_silent(self, seconds: float) -> None:
        """Let time pass while nobody calls, not even to process deadlines."""
        self.now += seconds

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 9.0, 60.0]), punctually=st.booleans())
    def advance(self, seconds: float, punctually: bool) -> None:
        """Let time pass and process what becomes due, at each deadline or all at the end."""
        end = self.now + seconds
        while punctually and (due := self.ledger.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.do(self.ledger.advance, None, events_max=1)
        self.now = end
        while self.do(self.ledger.advance, None, events_max=2):
            pass
        self.settle()

    @rule()
    def relieve(self) -> None:
        """Keep some memory free: the least recently used go, one after the other, and never the last one."""
        while self.do(self.ledger.relieve, None, events_max=2):
            pass
        self.settle()
        while self.model.lent_bytes() > LIMITS.memory_soft_watermark * PAGES * PAGE_BYTES:
            evictable = self.model.evictable()
            if len(evictable) < 2:
                break
            self.model.end(evictable[0], PayloadState.DRAINING, Reason.MEMORY_EXHAUSTED)
        assert not self.ledger.pressed

    @rule(key=keys, data=st.data())
    def find(self, key: str, data: st.DataObject) -> None:
        """Ask as a consumer does."""
        self.settle()
        generation = data.draw(st.integers(0, self.generations.get(key, 0)))
        found = self.do(self.ledger.find, None, key=key, generation=generation)
        row = self.model.find(key, generation)
        if row is not None:
            assert isinstance(found, Payload)
            assert found.payload_id == row.payload_id
            return
        graves = [grave for grave in self.memory.graves if grave[0] == key and generation in {0, grave[1]}]
        if not graves:
            assert found is None
            return
        assert isinstance(found, Tombstone)
        assert (found.reference.key, found.reference.generation) == max(graves)
        assert found.reason is self.memory.graves[max(graves)]
        assert found.fallback.text == "the text"


TestLedger = AnyLife.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
