"""One payload of another node, for as long as somebody waits for it.

1. However many consumers wait, the owner is asked once and the bytes come once: all of them share one *visit*.
2. The visit holds one lease at the owner, renewed while bytes come and given back when the last one leaves. An answer
   that is under way is waited for, so that the lease in it is given back, too.
3. The bytes go straight into a slot and are checked against the owner's digests before anybody can lease them. What
   cannot be checked is not taken. They come from the owner, or from a *holder*, a node that has a replica: what it
   sends has to have the same digests, and whatever goes wrong there, the owner is asked next. Values in fewer bits come
   from the owner, in frames that are checked before they are decoded, and the replica is sealed with digests of what
   was decoded; it lies under a name of its own.
4. Nobody waits longer than its deadline allows, and a little less for each other who waits. When nobody is left the
   transfer breaks off; how fast it was is remembered, so that the next one that could not be in time is not begun.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvbridge.core.cost.sources import Candidate, holders_seconds
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification
from kvbridge.core.errors import (
    BridgeError,
    InvalidFieldError,
    LimitExceededError,
    MemoryExhaustedError,
    UnavailableError,
    UnknownReferenceError,
)
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.journal import Pull
from kvbridge.core.layout import SlotLayout, slot_layout
from kvbridge.core.ledger import Grant, Rejected
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm
from kvbridge.link.port import (
    Closed,
    Opened,
    OwnerUnreachableError,
    Peer,
    ReplicaNotice,
    TransferFailedError,
)
from kvbridge.node.arrival import Arrival, ArrivalTerms, ArrivingFrames
from kvbridge.node.byte_checks import NODE_CLIENT_ID, Failure
from kvbridge.node.decoding import FrameReader
from kvbridge.node.foreign import Foreign, closed, encoded_spec, opened, unfit, unheard
from kvbridge.node.identity import Client
from kvbridge.node.source import Source, source_of
from kvbridge.node.streams import StreamDigests
from kvbridge.node.upload import Upload
from kvbridge.node.visitor import Visitor
from kvbridge.node.waiting import Waiters
from kvbridge.transform.encoded_layers import NotFiniteError, frames_of
from kvbridge.wire import Seal

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_RELEASE_SECONDS_MAX = 2.0
_OWN_REFUSALS = (MemoryExhaustedError, LimitExceededError, UnavailableError)
"""What this node refuses itself, whoever sends the bytes."""


class Visit:
    """One payload of another node."""

    def __init__(
        self,
        reference: HandoffReference,
        tenant: str,
        *,
        peer: Peer | None,
        visitor: Visitor,
        form: TransferForm = EXACT_FORM,
    ) -> None:
        """Ask `peer`, None if nobody knows where the owner is, when the first one looks; bring the bytes in `form`."""
        self.form = form
        self.must_be_exact = False
        """Whether it turned out that the payload can only come with all its bits."""
        self.users = 0
        self.epoch: int | None = None
        self._reference = reference
        self._tenant = tenant
        self._peer = peer
        self._visitor = visitor
        self._client = Client(client_id=NODE_CLIENT_ID, tenant=tenant, attached=False)
        self._opened: tuple[Opened, Foreign, PayloadSpec] | None = None
        self._lease_token = ""
        self._looking: asyncio.Task[Foreign] | None = None
        self._pulling: asyncio.Task[Failure | None] | None = None
        self._is_whole = False  # all bytes are here, and only their check is left
        self._coming: Arrival | None = None
        self._hold: Grant | None = None
        self._failure: Failure | None = None
        self._waiters = Waiters()

    def __repr__(self) -> str:
        """Show what is visited, and for how many."""
        return f"<Visit to {self._reference} for {self.users}>"

    @property
    def figures(self) -> Pull | None:
        """Return what has come so far; None if nothing has."""
        coming = self._coming
        if coming is None or not coming.nbytes:
            return None
        return Pull(
            node_id=coming.node_id,
            by=coming.by,
            nbytes=coming.nbytes,
            seconds=coming.seconds,
            from_replica=coming.node_id != self._reference.node_id,
        )

    @property
    def brought(self) -> bool:
        """Tell whether there is a replica that this visit has brought."""
        return self._hold is not None

    async def look(self, seconds_left: float | None) -> Foreign:
        """Return what the owner says."""
        if self._looking is None:
            self._looking = self._visitor.background.start(self._look())
        if await self._ends_in_time(self._looking, seconds_left):
            return self._looking.result()
        return self._unreachable("it did not answer before the caller's deadline")

    async def pull(self, seconds_left: float | None) -> Failure | None:
        """Bring the bytes over and return why that failed, or None; the owner must have leased them.

        The first caller's time says how long holders may be tried.
        """
        if self._pulling is None:
            self._pulling = self._visitor.background.start(self._pull(seconds_left))
        if await self._ends_in_time(self._pulling, seconds_left):
            return self._pulling.result()
        return Reason.TRANSFER_TIMEOUT, "the bytes did not arrive before the caller's deadline"

    async def end(self) -> None:
        """Break off and give everything back; nobody may wait any more."""
        if self._looking is not None:
            await asyncio.wait({self._looking})
        if self._pulling is not None:
            if not self._is_whole:
                self._pulling.cancel()
            await asyncio.wait({self._pulling})
        if self._hold is not None:
            with suppress(UnknownReferenceError):
                self._visitor.release(self._client, [self._hold.token])
        if self._lease_token and self._peer is not None:
            await self._peer.release(
                self._lease_token, seconds_max=_RELEASE_SECONDS_MAX, tenant=self._tenant, replica=self._notice()
            )

    def _notice(self) -> ReplicaNotice | None:
        """Return what the owner is told of the replica, if there is one that others may have."""
        if self._hold is None or not self.form.is_exact:
            return None
        return ReplicaNotice(node_id=self._visitor.node_id, linger_seconds=self._visitor.linger_seconds)

    async def _ends_in_time(self, task: asyncio.Task[_Result], seconds_left: float | None) -> bool:
        return await self._waiters.see_the_end(task, seconds_left)

    # Asking

    def _unreachable(self, why: str) -> Foreign:
        detail = f"node {self._reference.node_id!r}: {why}"
        return unheard(self._reference).lost((Reason.OWNER_UNREACHABLE, detail))

    async def _look(self) -> Foreign:
        if self._peer is None:
            return self._unreachable("nobody knows where it is")
        try:
            answer = await self._peer.open(
                self._tenant, self._reference.payload, seconds_max=self._visitor.limits.open_seconds_max
            )
            self.epoch = answer.epoch
            self._visitor.incarnations.hear(self._reference.node_id, answer.epoch)
            if not isinstance(answer, Opened):
                return closed(self._reference, answer)
            self._lease_token = answer.lease_token
            foreign, spec = opened(self._reference, answer)
            if not self.form.is_exact:
                spec = encoded_spec(foreign, spec, self.form)
        except OwnerUnreachableError as error:
            return unheard(self._reference).lost((Reason.OWNER_UNREACHABLE, str(error)))
        except InvalidFieldError as error:
            return self._unreachable(f"its answer makes no sense: {error}")
        foreign = replace(foreign, holders=tuple(filter(self._can_be_asked, dict.fromkeys(answer.holders))))
        self._opened = answer, foreign, replace(spec, linger_seconds=self._visitor.linger_seconds)
        return foreign

    def _can_be_asked(self, holder: str) -> bool:
        others = holder not in {self._visitor.node_id, self._reference.node_id}
        return others and self._visitor.find(holder) is not None

    # Bringing over

    async def _pull(self, seconds_left: float | None) -> Failure | None:
        assert self._opened is not None, self
        assert self._peer is not None, self
        answer, foreign, spec = self._opened
        assert foreign.descriptor is not None, self
        problem = unfit(foreign.descriptor)
        if problem is not None:
            return Reason.TRANSFER_FAILED, problem
        owner = source_of(foreign.owner, self._peer, answer, self._visitor.limits.pull_seconds_max, is_owner=True)
        try:
            async with owner.renewing(self._tenant):
                if await self._came_from_a_holder(answer, foreign, spec, seconds_left):
                    return self._failure
                await self._receive(owner, answer, spec)
                return self._failure
        except TimeoutError:
            return Reason.TRANSFER_FAILED, "the bytes stopped coming, or came too slowly"
        except MemoryExhaustedError as error:
            return Reason.MEMORY_EXHAUSTED, str(error)
        except BridgeError as error:
            return Reason.TRANSFER_FAILED, str(error)

    async def _came_from_a_holder(
        self, answer: Opened, foreign: Foreign, spec: PayloadSpec, seconds_left: float | None
    ) -> bool:
        """Ask the holders that are cheaper than the owner, and tell whether all bytes came from one of them."""
        costs, nbytes = self._visitor.costs, answer.descriptor.canonical_bytes
        before = costs.sources.before_owner(foreign.owner, foreign.holders, nbytes)
        if not before or not self.form.is_exact:
            return False
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + holders_seconds(costs.pull_seconds(foreign.owner, nbytes), seconds_left)
        for holder in before:
            left = ends_at - loop.time()
            if left > (holder.seconds or 0.0) and await self._tried(holder, answer, spec, left):
                return True
        return False

    async def _tried(self, holder: Candidate, answer: Opened, spec: PayloadSpec, seconds_max: float) -> bool:
        """Ask a holder, and tell whether all bytes came from it; nothing that it does is more than lost time."""
        sources = self._visitor.costs.sources
        try:
            with sources.trying(holder):
                if not await self._receive_from(holder.node_id, answer, spec, seconds_max):
                    return False  # Its replica is gone, as they go.
        except _OWN_REFUSALS:
            raise
        except (BridgeError, TimeoutError) as error:
            _log.warning("a replica could not be had", extra={"holder": holder.node_id, "problem": str(error)})
            sources.failed(holder.node_id)
            return False
        sources.succeeded(holder.node_id)
        return True

    async def _receive_from(self, holder: str, answer: Opened, spec: PayloadSpec, seconds_max: float) -> bool:
        peer = self._visitor.find(holder)
        if peer is None:
            return False
        ends_at = asyncio.get_running_loop().time() + seconds_max
        opened_there = await self._open_at(peer, answer.epoch, seconds_max)
        self._visitor.incarnations.hear(holder, opened_there.epoch)
        if not isinstance(opened_there, Opened):
            return False
        try:
            if opened_there.descriptor.layer_digests != answer.descriptor.layer_digests:
                raise TransferFailedError("it has other bytes than the owner sealed")
            left = ends_at - asyncio.get_running_loop().time()
            source = source_of(holder, peer, opened_there, left, is_owner=False)
            async with source.renewing(self._tenant):
                await self._receive(source, answer, spec)
        finally:
            self._visitor.background.begin(self._give_back(peer, opened_there))
        return True

    async def _open_at(self, peer: Peer, owner_epoch: int, seconds_max: float) -> Opened | Closed:
        """Lease a holder's replica; an answer that nobody waits for any more is waited for and given back."""
        key = PayloadReference(key=str(self._reference), generation=1)
        limit = min(seconds_max, self._visitor.limits.open_seconds_max)
        opening = self._visitor.background.start(
            peer.open(self._tenant, key, seconds_max=limit, owner_epoch=owner_epoch)
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._visitor.background.begin(self._give_back_later(peer, opening))
            raise

    async def _give_back_later(self, peer: Peer, opening: asyncio.Task[Opened | Closed]) -> None:
        with suppress(BridgeError):
            answer = await opening
            if isinstance(answer, Opened):
                await self._give_back(peer, answer)

    async def _give_back(self, peer: Peer, opened_there: Opened) -> None:
        await peer.release(opened_there.lease_token, seconds_max=_RELEASE_SECONDS_MAX, tenant=self._tenant)

    async def _receive(self, source: Source, answer: Opened, spec: PayloadSpec) -> None:
        """Bring all bytes over from a node and check them; a failure that is for consumers is noted in `_failure`.

        Raises:
            TransferFailedError: a holder sent other bytes than the owner sealed.
            BridgeError: they did not come.
            TimeoutError: they did not come in time.
        """
        length = answer.descriptor.valid_length
        self._is_whole = False
        with self._visitor.new_upload(self._client, spec, length) as upload:
            digests = await self._bring(upload, source, answer, spec)
            is_as_sealed = self._is_as_sealed(source, answer, digests)
            self._is_whole = True
            outcome = await upload.finish(
                Seal(
                    valid_length=length,
                    layer_digests=answer.descriptor.layer_digests if self.form.is_exact else digests,
                    verification=Verification.DIGEST,
                    hold=True,
                ),
                digested=is_as_sealed,
            )
        if isinstance(outcome, Rejected):
            quarantined = outcome.reason is Reason.QUARANTINED
            self._failure = Reason.QUARANTINED if quarantined else Reason.TRANSFER_FAILED, outcome.detail
        else:
            self._hold = outcome.hold

    def _is_as_sealed(self, source: Source, answer: Opened, digests: tuple[bytes, ...]) -> bool:
        """Tell whether what came has the digests that the owner told in this visit.

        Raises:
            TransferFailedError: it has not, and comes from a holder; the owner may still send what has.
        """
        # Frames were checked as they came, and what they decode to has digests of its own.
        agrees = not self.form.is_exact or digests == answer.descriptor.layer_digests
        if not agrees and not source.is_owner:
            raise TransferFailedError("it sent other bytes than the owner sealed")
        return agrees

    async def _bring(self, upload: Upload, source: Source, answer: Opened, spec: PayloadSpec) -> tuple[bytes, ...]:
        """Fill the slot and return the digests of what lies in it."""
        length, sealed = answer.descriptor.valid_length, answer.descriptor.layer_digests
        if self.form.is_exact:
            digests = StreamDigests(_layout(spec), length)
            await self._write(Arrival(upload, digests.update, **self._arriving(source)), source)
            return tuple(digests.done)
        frames = frames_of(spec.geometry, length, self.form)
        reader = FrameReader(upload, frames, sealed, run=self._visitor.run)
        try:
            await self._write(ArrivingFrames(reader, **self._arriving(source)), source, and_then=reader.finish)
        except NotFiniteError:
            self.must_be_exact = True
            raise
        finally:
            await reader.close()
        return tuple(reader.digests)

    def _arriving(self, source: Source) -> ArrivalTerms:
        return {
            "stall_seconds_max": self._visitor.limits.stall_seconds_max,
            "by": source.peer.capabilities.name,
            "node_id": source.node_id,
            "note": partial(self._visitor.traffic.note_pull, from_replica=not source.is_owner),
        }

    async def _write(
        self, arrival: Arrival, source: Source, *, and_then: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._coming = arrival
        asked: dict[str, Any] = {} if self.form.is_exact else {"form": self.form}
        try:
            # The check that follows is not timed: it goes on whatever becomes of this, and gives a hold to be returned.
            async with asyncio.timeout(source.seconds_max), arrival.stall:
                way = await source.peer.pull(
                    source.lease_token, arrival, seconds_max=source.seconds_max, tenant=self._tenant, **asked
                )
                arrival.by = way.name
                if and_then is not None:
                    await and_then()
        finally:
            # What broke off because it was too slow says so, too; otherwise every hurried caller would begin it anew.
            arrival.end()
            if arrival.nbytes:
                self._visitor.costs.record_pull(source.node_id, arrival.nbytes, arrival.seconds)


def _layout(spec: PayloadSpec) -> SlotLayout:
    return slot_layout(spec.geometry, spec.capacity_tokens)
