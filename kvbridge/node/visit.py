"""One payload of another node, for as long as somebody waits for it.

1. However many consumers wait, the owner is asked once and the bytes come once: all of them share one *visit*.
2. The visit holds one lease at the owner, renewed while bytes come and given back when the last one leaves. An answer
   that is under way is waited for, so that the lease in it is given back, too.
3. The bytes go straight into a slot and are checked against the owner's digests before anybody can lease them. What
   cannot be checked is not taken. Values in fewer bits come in frames that are checked before they are decoded, and
   the replica is sealed with digests of what was decoded; it lies under a name of its own.
4. Nobody waits longer than its deadline allows, and a little less for each other who waits. When nobody is left the
   transfer breaks off; how fast it was is remembered, so that the next one that could not be in time is not begun.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from kvbridge.core.descriptor import PayloadSpec, Verification
from kvbridge.core.errors import BridgeError, InvalidFieldError, MemoryExhaustedError, UnknownReferenceError
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.journal import Pull
from kvbridge.core.layout import SlotLayout, slot_layout
from kvbridge.core.ledger import Grant, Rejected
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm
from kvbridge.link.port import Opened, OwnerUnreachableError, Peer, Sink
from kvbridge.node.background import Background
from kvbridge.node.byte_checks import NODE_CLIENT_ID, Failure
from kvbridge.node.costs import CostKeeper
from kvbridge.node.decoding import FrameReader
from kvbridge.node.encoding import Run
from kvbridge.node.foreign import Foreign, closed, encoded_spec, opened, unfit, unheard
from kvbridge.node.identity import Client
from kvbridge.node.incarnations import Incarnations
from kvbridge.node.streams import StreamDigests
from kvbridge.node.upload import Upload
from kvbridge.node.waiting import Waiters
from kvbridge.transform.encoded_layers import NotFiniteError, frames_of
from kvbridge.wire import Seal

_Result = TypeVar("_Result")

_RELEASE_SECONDS_MAX = 2.0
_RENEWALS_PER_TTL = 3
_RENEWAL_SECONDS_MIN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitLimits:
    """How long other nodes may take."""

    open_seconds_max: float
    """An owner's answer."""
    pull_seconds_max: float
    """The bytes of one payload."""
    stall_seconds_max: float
    """The wait for the next bytes."""


class NewUpload(Protocol):
    """Begins a payload that arrives by value."""

    def __call__(self, client: Client, spec: PayloadSpec, valid_length: int) -> Upload:
        """Reserve a slot; errors as for `Upload`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """What all visits of a node work with."""

    limits: VisitLimits
    """How long they may take."""
    new_upload: NewUpload
    """Takes what they bring."""
    release: Callable[[Client, Sequence[str]], object]
    """Returns the hold on what they brought."""
    costs: CostKeeper
    """Learns how fast bytes come."""
    background: Background
    """Runs what several wait for."""
    incarnations: Incarnations
    """Learns of the owners' starts."""
    linger_seconds: float
    """How long a replica stays when nobody references it."""
    run: Run
    """Does work on a thread."""


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
        self._coming: _Watched | None = None
        self._hold: Grant | None = None
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
        return Pull(owner=self._reference.node_id, by=coming.by, nbytes=coming.nbytes, seconds=coming.seconds)

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
        """Bring the bytes over and return why that failed, or None; the owner must have leased them."""
        if self._pulling is None:
            self._pulling = self._visitor.background.start(self._pull())
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
            await self._peer.release(self._lease_token, seconds_max=_RELEASE_SECONDS_MAX, tenant=self._tenant)

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
        self._opened = answer, foreign, replace(spec, linger_seconds=self._visitor.linger_seconds)
        return foreign

    # Bringing over

    async def _pull(self) -> Failure | None:
        assert self._opened is not None, self
        answer, foreign, spec = self._opened
        assert foreign.descriptor is not None, self
        problem = unfit(foreign.descriptor)
        if problem is not None:
            return Reason.TRANSFER_FAILED, problem
        try:
            return await self._receive(answer, spec)
        except TimeoutError:
            return Reason.TRANSFER_FAILED, "the bytes stopped coming, or came too slowly"
        except MemoryExhaustedError as error:
            return Reason.MEMORY_EXHAUSTED, str(error)
        except BridgeError as error:
            return Reason.TRANSFER_FAILED, str(error)

    async def _receive(self, answer: Opened, spec: PayloadSpec) -> Failure | None:
        length = answer.descriptor.valid_length
        with self._visitor.new_upload(self._client, spec, length) as upload:
            renewing = asyncio.get_running_loop().create_task(self._renew(answer))
            try:
                digests = await self._bring(upload, answer, spec)
            finally:
                renewing.cancel()
                await asyncio.wait({renewing})
            self._is_whole = True
            outcome = await upload.finish(
                Seal(
                    valid_length=length,
                    layer_digests=answer.descriptor.layer_digests if self.form.is_exact else digests,
                    verification=Verification.DIGEST,
                    hold=True,
                ),
                digested=digests == answer.descriptor.layer_digests or not self.form.is_exact,
            )
        if isinstance(outcome, Rejected):
            quarantined = outcome.reason is Reason.QUARANTINED
            return Reason.QUARANTINED if quarantined else Reason.TRANSFER_FAILED, outcome.detail
        self._hold = outcome.hold
        return None

    async def _bring(self, upload: Upload, answer: Opened, spec: PayloadSpec) -> tuple[bytes, ...]:
        """Fill the slot and return the digests of what lies in it."""
        length, sealed, token = answer.descriptor.valid_length, answer.descriptor.layer_digests, answer.lease_token
        if self.form.is_exact:
            digests = StreamDigests(_layout(spec), length)
            await self._write(_Watched(upload, digests.update, **self._watching()), token)
            return tuple(digests.done)
        frames = frames_of(spec.geometry, length, self.form)
        reader = FrameReader(upload, frames, sealed, run=self._visitor.run)
        try:
            await self._write(_WatchedFrames(reader, **self._watching()), token, and_then=reader.finish)
        except NotFiniteError:
            self.must_be_exact = True
            raise
        finally:
            await reader.close()
        return tuple(reader.digests)

    def _watching(self) -> dict[str, Any]:
        assert self._peer is not None, self
        return {
            "stall_seconds_max": self._visitor.limits.stall_seconds_max,
            "by": self._peer.capabilities.name,
        }

    async def _write(
        self, watched: _Watched, lease_token: str, *, and_then: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        assert self._peer is not None, self
        limits = self._visitor.limits
        self._coming = watched
        asked: dict[str, Any] = {} if self.form.is_exact else {"form": self.form}
        try:
            # The check that follows is not timed: it goes on whatever becomes of this, and gives a hold to be returned.
            async with asyncio.timeout(limits.pull_seconds_max), watched.stall:
                way = await self._peer.pull(
                    lease_token, watched, seconds_max=limits.pull_seconds_max, tenant=self._tenant, **asked
                )
                watched.by = way.name
                if and_then is not None:
                    await and_then()
        finally:
            # What broke off because it was too slow says so, too; otherwise every hurried caller would begin it anew.
            watched.end()
            if watched.nbytes:
                self._visitor.costs.record_pull(self._reference.node_id, watched.nbytes, watched.seconds)

    async def _renew(self, answer: Opened) -> None:
        assert self._peer is not None, self
        while True:
            await asyncio.sleep(max(answer.ttl_seconds / _RENEWALS_PER_TTL, _RENEWAL_SECONDS_MIN))
            await self._peer.renew(
                answer.lease_token, seconds_max=self._visitor.limits.stall_seconds_max, tenant=self._tenant
            )


def _layout(spec: PayloadSpec) -> SlotLayout:
    return slot_layout(spec.geometry, spec.capacity_tokens)


class _Watched:
    """An upload whose bytes must keep coming and are digested as they do; a `Sink`."""

    def __init__(
        self, target: Sink, also: Callable[[memoryview], object], *, stall_seconds_max: float, by: str
    ) -> None:
        """Count from now on; bytes will try to come `by` this way, to `target`, and `also` is told of them."""
        self.by = by
        self._began_at = time.perf_counter()
        self._ended_at: float | None = None
        self._also = also
        self._room: list[memoryview] = []
        self.nbytes = 0
        self._target = target
        self._stall_seconds_max = stall_seconds_max
        self._loop = asyncio.get_running_loop()
        self.stall = asyncio.timeout(stall_seconds_max)
        """Ends what happens in it when no bytes come."""

    @property
    def remaining_bytes(self) -> int:
        """Return how many bytes are missing."""
        return self._target.remaining_bytes

    @property
    def seconds(self) -> float:
        """Return how long bytes have been on their way, or were."""
        return (time.perf_counter() if self._ended_at is None else self._ended_at) - self._began_at

    def end(self) -> None:
        """Expect nothing more."""
        self._ended_at = time.perf_counter()

    def write(self, chunk: memoryview) -> None:
        """Copy the next bytes to their places; errors as for `Upload.write`."""
        self._target.write(chunk)
        self._also(chunk)
        self._came(chunk.nbytes)

    def room(self) -> list[memoryview]:
        """Return the places of the next bytes; errors as for `Upload.room`."""
        self._room = list(self._target.room())
        return self._room

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were written to where `room` said."""
        self._target.advance(nbytes)
        self._came(nbytes)
        for view in self._room:
            piece = view[:nbytes]
            self._also(piece)
            nbytes -= piece.nbytes
            if not nbytes:
                return

    def _came(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if not self.stall.expired():
            self.stall.reschedule(self._loop.time() + self._stall_seconds_max)


class _WatchedFrames(_Watched):
    """The same for frames, which take a while; a `PacedSink`."""

    def __init__(self, reader: FrameReader, *, stall_seconds_max: float, by: str) -> None:
        """Count from now on; bytes will try to come `by` this way."""
        super().__init__(reader, lambda _: None, stall_seconds_max=stall_seconds_max, by=by)
        self._reader = reader

    @property
    def is_ready(self) -> bool:
        """Tell whether more bytes are taken at the moment."""
        return self._reader.is_ready

    async def ready(self) -> None:
        """Wait until they are, which is no stall of the owner's."""
        await self._reader.ready()
        self._came(0)
