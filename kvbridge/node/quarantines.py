"""Quarantines at work: payloads end, consumers are refused, and whoever received one of them is told.

1. Everything that is published, handed over or ended is noted in its tenant's provenance.
2. A quarantine takes effect in one turn of the event loop: whatever it touches is marked for the gate, whatever of that
   can still be read ends at once, and every client that holds or held some of it is told. What is still being written
   or checked is refused when it would be committed.
3. Only then is it written to the file. If that fails it is in force all the same, and its caller gets an error that
   says so: what must not be used is refused first and told of second.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.events import PayloadQuarantined, PayloadRevoked
from kvbridge.core.handoff_reference import is_handoff_reference, lineage
from kvbridge.core.ledger import Grant, Ledger, Payload, PayloadEnded, Tombstone
from kvbridge.core.ledger.states import PENDING_STATES
from kvbridge.core.provenance import Provenance, ProvenanceLimits, Receipt
from kvbridge.core.quarantine import Quarantine, Quarantines, Target, Touched
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.transfer_encoding import unmarked_key
from kvbridge.node.answers import HandoffAnswer, Leased
from kvbridge.node.identity import Client
from kvbridge.node.quarantine_file import QuarantineFile, QuarantineFileError
from kvbridge.node.quarantine_listener import QuarantineListener, Unheard
from kvbridge.node.state_file import NotPersistedError
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.texts import Texts
from kvbridge.node.watch import Watchers

HANDOFF_IDS_MAX = 100
"""Most handoffs that one event names."""
_ID_BYTES = 8
_HARMLESS_ENDS = frozenset({Reason.PAYLOAD_EXPIRED, Reason.MEMORY_EXHAUSTED, Reason.QUARANTINED})
"""Ends that take nothing from those who hold a lease, or of which they are told in another way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedPayload:
    """One payload that a quarantine touches, as it was just before."""

    reference: PayloadReference
    """Key and generation."""
    because: str
    """How it comes to be touched, for people."""
    leases: int
    """Live leases."""
    handoffs: int
    """Handoffs within the retention window."""
    alive: bool
    """Whether it occupied memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineReport:
    """What a quarantine touches."""

    quarantine_id: str
    """Its name; empty for a dry run."""
    payloads: tuple[TouchedPayload, ...]
    """Payloads that are or would be refused, those that derive from others after them."""
    clients: int
    """How many clients hold or held one of them, or were to apply what is quarantined, within the retention window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Concern:
    """One payload that matters to those who received it."""

    reference: PayloadReference
    """Key and generation."""
    words: str
    """What is wrong with it."""
    receipts: tuple[Receipt, ...]
    """Who received it, oldest first."""


class QuarantineKeeper:
    """The quarantines of all tenants."""

    def __init__(
        self,
        tenancies: Mapping[str, Tenancy],
        watchers: Watchers,
        *,
        node_id: str,
        limits: ProvenanceLimits,
        quarantines_max: int,
        path: str,
        texts: Texts,
        clock: Callable[[], float],
    ) -> None:
        """Keep them in the file at `path`, if one is named, and tell `texts` what they touch.

        `clock` is the ledgers', and `node_id` this node's name.
        """
        self._node_id = node_id
        self._tenancies = tenancies
        self._watchers = watchers
        self._clock = clock
        self._books = {name: Quarantines(Provenance(limits), quarantines_max=quarantines_max) for name in tenancies}
        self._file = QuarantineFile(path) if path else None
        self._texts = texts
        self._writing = asyncio.Lock()
        self._saving: set[asyncio.Task[None]] = set()
        self.listener: QuarantineListener = Unheard()
        for tenancy in tenancies.values():
            tenancy.on_ended.append(self._ended)

    def __repr__(self) -> str:
        """Show the tenants' quarantines."""
        return f"<QuarantineKeeper {self._books!r}>"

    def load(self) -> None:
        """Put into force what the file holds.

        Raises:
            QuarantineFileError: the file cannot be read or written.
            LimitExceededError: it holds too many.
        """
        if self._file is None:
            return
        for tenant, quarantine in self._file.read():
            if tenant not in self._books:
                raise QuarantineFileError(f"quarantine_file: there is no tenant {tenant!r}")
            self._books[tenant].impose(quarantine)
        self._file.write(self._all())  # What cannot be written now could not be when it matters.

    # What happens to payloads

    @staticmethod
    def require_followable(spec: PayloadSpec) -> None:
        """Refuse a payload whose sources are not named exactly.

        "The newest" is another payload a moment later than the one that the producer received, so only a generation
        says from which one it derives; the producer has it from the descriptor.

        Raises:
            InvalidFieldError: a source has no generation.
        """
        if any(source.generation < 1 for source in spec.derived_from):
            raise InvalidFieldError("derived_from", "must name each source with its generation, as its descriptor does")

    def reserved(self, client: Client, grant: Grant, spec: PayloadSpec) -> None:
        """Note a payload that will be written."""
        self._books[client.tenant].enter(
            reference=self._known_as(grant.reference),
            life=grant.reference,
            model=spec.model,
            aligner=spec.aligner,
            derived_from=map(self._known_as, spec.derived_from),
        )

    def commit_failure(self, tenant: str, payload: Payload) -> tuple[Reason, str] | None:
        """Say why a payload may not be committed, if so."""
        spec = payload.spec
        problem = self.problem(tenant, payload.reference, spec.model, spec.aligner, spec.derived_from)
        return None if problem is None else (Reason.QUARANTINED, problem)

    def handed(self, client: Client, answer: HandoffAnswer) -> None:
        """Note what a client is given."""
        provenance = self._books[client.tenant].provenance
        for part in answer.parts:
            if isinstance(part, Leased):
                receipt = Receipt(
                    client_id=client.client_id,
                    handoff_id=answer.handoff_id,
                    lease_token=part.grant.token,
                    at=self._clock(),
                    aligner=part.aligner_to_apply,
                )
                provenance.receive(self._known_as(part.grant.reference), receipt)

    def lent(self, client: Client, tenant: str, grant: Grant) -> None:
        """Note what another node is lent, so that it counts among those who received it."""
        reference = self._known_as(grant.reference)
        receipt = Receipt(client_id=client.client_id, handoff_id="", lease_token=grant.token, at=self._clock())
        provenance = self._books[tenant].provenance
        provenance.receive(reference, receipt)
        origin = provenance.find(reference)
        if origin is not None:
            origin.lent = True

    def advance(self) -> None:
        """Forget what is past its window."""
        for tenant, book in self._books.items():
            with self._tenancies[tenant].ledger() as ledger:
                book.provenance.advance(now=self._clock(), is_live=lambda receipt: self._is_live(ledger, receipt))

    # What the gate asks

    def problem(
        self,
        tenant: str,
        reference: PayloadReference,
        model: ModelTag,
        aligner: AlignerTag | None,
        derived_from: Iterable[PayloadReference],
    ) -> str | None:
        """Say what about a payload, or the aligner that it went or will go through, is quarantined, or None."""
        sources = map(self._known_as, derived_from)
        return self._books[tenant].problem(self._known_as(reference), model, aligner, sources)

    # What people do

    async def quarantine(self, client: Client, target: Target, *, why: str, dry_run: bool) -> QuarantineReport:
        """Impose a quarantine on the caller's tenant's payloads, or only say what it would touch.

        What is quarantined already stays so under the same name, unless there is another reason now: then that holds,
        under a new name, on all nodes.

        Raises:
            InvalidFieldError: the target names nothing, or everything.
            LimitExceededError: there are too many.
            NotPersistedError: it is in force but could not be written.
        """
        target = self._target_here(target)
        new = Quarantine(quarantine_id=secrets.token_hex(_ID_BYTES), target=target, why=why, since=time.time())
        book = self._books[client.tenant]
        before = book.on(target)
        known = before[0] if before and why in {"", before[0].why} else None
        if dry_run:
            return self._report(client.tenant, known or new, book.touched(known or new))
        if known is None:  # Nobody publishes anything in between.
            for one in before:
                book.lift(one.quarantine_id)
        report, noted = self._impose(client.tenant, known or new)
        if known is None:
            self.listener.replaced(client.tenant, new, [one.quarantine_id for one in before])
        done = f"quarantine {report.quarantine_id} is in force, and {len(report.payloads)} payloads are refused"
        await self._save(done)
        if not (noted and await self._texts.settle()):
            raise NotPersistedError(f"{done}, but only until the node stops: the text store cannot be written")
        return report

    async def unquarantine(self, client: Client, quarantine_id: str) -> None:
        """End a quarantine for payloads that are published from now on.

        Raises:
            UnknownReferenceError: there is none of this name.
            NotPersistedError: it has ended, but could not be removed from the file.
        """
        if not self._books[client.tenant].lift(quarantine_id):
            raise UnknownReferenceError("quarantine_id", "no quarantine in force has this name")
        _log.warning("quarantine lifted", extra={"quarantine": quarantine_id})
        self.listener.lifted(quarantine_id)
        await self._save(f"quarantine {quarantine_id} has ended")

    def in_force(self, client: Client) -> tuple[Quarantine, ...]:
        """Return the quarantines on the caller's tenant's payloads, newest first."""
        return self._books[client.tenant].in_force()

    # What other nodes say

    def impose_told(self, tenant: str, quarantine: Quarantine) -> None:
        """Put a quarantine of another node into force, once; it is written to the file a little later.

        Raises:
            LimitExceededError: there are too many.
        """
        if tenant not in self._books or quarantine.quarantine_id in self._books[tenant]:
            return  # Nobody here has anything of that tenant's.
        _ = self._impose(tenant, replace(quarantine, target=self._target_here(quarantine.target)))
        self._save_soon()

    def lift_told(self, tenant: str, quarantine_id: str) -> None:
        """End a quarantine that was lifted on another node."""
        if tenant in self._books and self._books[tenant].lift(quarantine_id):
            _log.warning("quarantine lifted", extra={"quarantine": quarantine_id})
            self._save_soon()

    def revoke_told(self, tenant: str, key: str, reason: Reason, detail: str) -> None:
        """End the replicas, under the handoff reference `key`, of what its owner has found bad."""
        if tenant not in self._tenancies:
            return
        with self._tenancies[tenant].ledger() as ledger:
            for occupant in ledger.occupants(key=key):
                if occupant.state not in PENDING_STATES:
                    ledger.fail(now=self._clock(), payload_id=occupant.payload_id, reason=reason, detail=detail)

    def everything(self) -> list[tuple[str, Quarantine]]:
        """Return the quarantines of all tenants, each with its tenant, oldest first."""
        return self._all()

    async def settle(self) -> None:
        """Wait until what other nodes said is in the file, or known not to be."""
        await asyncio.gather(*self._saving)

    # The parts of these

    def _target_here(self, target: Target) -> Target:
        return self._known_as(target) if isinstance(target, PayloadReference) and target.generation else target

    def _impose(self, tenant: str, quarantine: Quarantine) -> tuple[QuarantineReport, bool]:
        """Put a quarantine into force unless it is, end and tell what it touches, and say whether texts are noted."""
        book = self._books[tenant]
        is_new = quarantine.quarantine_id not in book
        touched = book.impose(quarantine) if is_new else book.touched(quarantine)
        report = self._report(tenant, quarantine, touched)
        with self._tenancies[tenant].ledger() as ledger:
            self._end(ledger, [(one, _occupants(ledger, one.reference)) for one in touched])
            self._tell(ledger, self._concerns(book, quarantine, touched))
        _log.warning(
            "quarantined",
            extra={
                "quarantine": quarantine.quarantine_id,
                "payloads": len(report.payloads),
                "clients": report.clients,
                "why": quarantine.why,
            },
        )
        return replace(report, quarantine_id=quarantine.quarantine_id), self._texts.quarantined(tenant, touched)

    def _report(self, tenant: str, quarantine: Quarantine, touched: Sequence[Touched]) -> QuarantineReport:
        book = self._books[tenant]
        concerns = self._concerns(book, quarantine, touched)
        with self._tenancies[tenant].ledger() as ledger:
            there = [(one, _occupants(ledger, one.reference)) for one in touched]
        return QuarantineReport(
            quarantine_id="",
            payloads=tuple(_looked_at(book, one, occupants) for one, occupants in there),
            clients=len({receipt.client_id for concern in concerns for receipt in concern.receipts}),
        )

    def _save_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self._save_told())
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save_told(self) -> None:
        with suppress(NotPersistedError):  # It is in the log, and the other nodes have it, too.
            await self._save("what other nodes said of quarantines is in force")

    def _known_as(self, reference: PayloadReference) -> PayloadReference:
        return lineage(reference, here=self._node_id)

    async def _save(self, done: str) -> None:
        if self._file is None:
            return
        try:
            async with self._writing:
                await asyncio.to_thread(self._file.write, self._all())
        except QuarantineFileError as error:
            _log.exception("quarantines are not persisted")
            raise NotPersistedError(f"{done}, but only until the node stops: {error}") from error

    def _all(self) -> list[tuple[str, Quarantine]]:
        return [(tenant, quarantine) for tenant, book in self._books.items() for quarantine in book.in_force()[::-1]]

    def _concerns(self, book: Quarantines, quarantine: Quarantine, touched: Iterable[Touched]) -> list[_Concern]:
        concerns = []
        for one in touched:
            origin = book.provenance.find(one.reference)
            if origin is not None and origin.receipts:
                receipts = tuple(origin.receipts.values())
                concerns.append(_Concern(reference=one.reference, words=one.because, receipts=receipts))
        applied: dict[tuple[PayloadReference, str], list[Receipt]] = {}
        for reference, words, receipt in book.receipts(quarantine):
            applied.setdefault((reference, words), []).append(receipt)
        concerns += [
            _Concern(reference=reference, words=words, receipts=tuple(receipts))
            for (reference, words), receipts in applied.items()
        ]
        return concerns

    def _end(self, ledger: Ledger, touched: Iterable[tuple[Touched, Iterable[Payload]]]) -> None:
        """End what can still be read; what is not committed yet never will be."""
        now = self._clock()
        for one, occupants in touched:
            for occupant in occupants:
                if occupant.state not in PENDING_STATES:
                    ledger.fail(now=now, payload_id=occupant.payload_id, reason=Reason.QUARANTINED, detail=one.because)

    def _tell(self, ledger: Ledger, concerns: Iterable[_Concern]) -> None:
        for concern in concerns:
            by_client: dict[str, list[Receipt]] = {}
            for receipt in reversed(concern.receipts):
                if self._watchers.remembers(receipt.client_id):
                    by_client.setdefault(receipt.client_id, []).append(receipt)
            for client_id, receipts in by_client.items():
                event = PayloadQuarantined(
                    reference=concern.reference,
                    detail=concern.words,
                    handoff_ids=tuple(receipt.handoff_id for receipt in receipts[:HANDOFF_IDS_MAX]),
                    held=any(self._is_live(ledger, receipt) for receipt in receipts),
                )
                self._watchers.tell(client_id, event)

    def _ended(self, tenancy: Tenancy, ended: PayloadEnded) -> None:
        """Note the end of a payload, and tell those who hold it if its tensors were found bad."""
        self._texts.ended(tenancy, ended, self._refusal)
        provenance = self._books[tenancy.tenant].provenance
        provenance.end(self._known_as(ended.reference), life=ended.reference, now=self._clock())
        self.listener.ended(tenancy.tenant, ended)
        origin = provenance.find(self._known_as(ended.reference))
        if origin is None or ended.reason in _HARMLESS_ENDS:
            return
        if origin.lent and not is_handoff_reference(ended.reference.key):
            self.listener.found_bad(tenancy.tenant, ended)
        if not origin.receipts:
            return
        # Holders know a replica that lost bits by the name that its descriptor gives, too.
        known_as = replace(ended.reference, key=unmarked_key(ended.reference.key))
        event = PayloadRevoked(reference=known_as, reason=ended.reason, detail=ended.detail)
        with tenancy.ledger() as ledger:
            holders = {receipt.client_id for receipt in origin.receipts.values() if self._is_live(ledger, receipt)}
        for client_id in holders:
            self._watchers.tell(client_id, event)

    def _refusal(self, tenant: str, ended: Tombstone) -> str | None:
        """Say why an ended payload is refused whatever it ended by, or None."""
        return self.problem(tenant, ended.reference, ended.model, None, ())

    def _is_live(self, ledger: Ledger, receipt: Receipt) -> bool:
        left = ledger.lease_seconds_left(now=self._clock(), client_id=receipt.client_id, token=receipt.lease_token)
        return left is not None


def _looked_at(book: Quarantines, touched: Touched, occupants: Sequence[Payload]) -> TouchedPayload:
    origin = book.provenance.find(touched.reference)
    return TouchedPayload(
        reference=touched.reference,
        because=touched.because,
        leases=sum(occupant.leases for occupant in occupants),
        handoffs=0 if origin is None else len(origin.receipts),
        alive=bool(occupants),
    )


def _occupants(ledger: Ledger, reference: PayloadReference) -> list[Payload]:
    """Return what occupies memory under a reference; of what was brought from another node, each time it was."""
    if not is_handoff_reference(reference.key):
        occupant = ledger.occupant(key=reference.key, generation=reference.generation)
        return [] if occupant is None else [occupant]
    return ledger.occupants(key=reference.key)
