"""Simulated clients: producers and consumers, attached or by value, that write, read, dawdle, freeze and die."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, PayloadSpec, Verification
from kvbridge.core.errors import BridgeError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.journal import HandoffUse, Outcome
from kvbridge.core.ledger import Committed, Grant, Rejected
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import HandoffAnswer, Leased
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.reports import Report
from kvbridge.node.streams import canonical_chunks
from kvbridge.node.upload import Upload
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import Seal, encode_reference
from tests.sim import content
from tests.sim.book import Call
from tests.sim.crowd import DEADLINES_SECONDS
from tests.sim.failpoints import Failpoint
from tests.sim.node import EXPECTED, CallCancelledError, NodeDownError
from tests.sim.requests import Request, Requests

if TYPE_CHECKING:
    from tests.sim.share import Share
    from tests.sim.world import World

T = TypeVar("T")
KEYS = 4
"""Keys that every producer of a node publishes under; so generations supersede one another."""
TALK = "talk"
"""A conversation that is published in pieces, for plans of several parts."""
_HELD_MAX = 12
_DIES_WAITING_SHARE = 0.06
"""How often a client dies soon after it has asked for something."""
_PUBLISHED_MAX = 6
_WANTED_MAX = 2
"""How many of a library's payloads a crowd wants at a time."""
_PIECE_CAPACITY = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a payload is published."""

    verification: Verification = Verification.FULL
    """What the producer asks to be checked."""
    declares: bool = False
    """Whether it declares digests."""
    lies: bool = False
    """Whether those are not of what it wrote."""
    spoils: bool = False
    """Whether it writes one byte that it does not mean to."""
    infinite: bool = False
    """Whether a value is not finite."""

    @property
    def fails(self) -> bool:
        """Tell whether the node must find out."""
        compared = self.declares and self.verification.includes(Verification.DIGEST)
        return (self.infinite and self.verification is Verification.FULL) or (compared and (self.lies or self.spoils))


MANNERS = {
    Manner(): 8,
    Manner(verification=Verification.DIGEST, declares=True): 4,
    Manner(verification=Verification.DIGEST): 2,
    Manner(verification=Verification.NONE, declares=True): 2,
    Manner(verification=Verification.NONE): 1,
    Manner(verification=Verification.NONE, declares=True, lies=True): 1,
    Manner(verification=Verification.DIGEST, declares=True, lies=True): 1,
    Manner(verification=Verification.DIGEST, declares=True, spoils=True): 1,
    Manner(infinite=True): 1,
}
"""How payloads are published, and how often."""


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A lease or a hold that a client has."""

    start: Share
    """Who gave it."""
    grant: Grant
    """What it is."""
    descriptor: PayloadDescriptor
    """Of what."""
    slot: memoryview | None
    """The bytes; None for a hold and for who shares no memory."""
    lapsed: bool = False
    """Whether the client must not read any more."""


class SimulatedClient:
    """One process that uses a node."""

    def __init__(self, world: World, host: str, number: int) -> None:
        """Begin at once."""
        self.world, self.host, self.number = world, host, number
        self.chance = random.Random(f"{world.seed} client {number}")
        self.attached = self.chance.random() < 0.6
        self.is_gone = False
        self._held: dict[str, Held] = {}
        self._start: Share | None = None
        self._habits = random.Random(f"{world.seed} habits {number}")
        self._tenant = self._habits.choice(world.tenants)
        self._identity = Client(client_id=f"client-{number:012d}", tenant=self._tenant, attached=False)
        self._requests = Requests(f"{world.seed} requests {number}", world.judge)
        self._gave_up = False
        self._handoffs: list[str] = []
        self._task = world.begin(self._live())

    def __repr__(self) -> str:
        """Show who it is."""
        whose = "" if self._tenant == DEFAULT_TENANT else f" and {self._tenant}"
        return f"<client {self.number} of {self.host}{whose}{', attached' if self.attached else ''}>"

    def crash(self) -> None:
        """Be gone from one step to the next; the end of an attached client's socket is seen a little later."""
        if self.is_gone:
            return
        self.is_gone = True
        self.world.trace(f"{self} is gone")
        self._task.cancel()
        if self.attached and self._start is not None:
            _ = self.world.begin(self._hang_up(self._start, self._identity.client_id))

    async def _hang_up(self, start: Share, session: str) -> None:
        await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.01, 0.5)))
        if start.serving:
            start.port.ended(session)

    # Living

    async def _live(self) -> None:
        deeds: dict[Callable[[Share], Awaitable[None]], float] = {
            self._publish: self._weight(publishing=True),
            self._acquire: self._weight(publishing=False),
            self._use: 6,
            self._renew: 2,
            self._release: 4,
            self._report: 0.5,
            self._quarantine: 1.2 if self.world.rough else 0.3,
            self._freeze: 0.4,
            self._lift: 0.8 if self.world.rough else 0.2,
        }
        while True:
            await asyncio.sleep(self.chance.choice((0.0, 0.05, 0.3, 1.0)))
            [deed] = self.chance.choices(list(deeds), list(deeds.values()))
            try:
                await deed(self._here())
            except EXPECTED as error:
                self.world.trace(f"{self} fails to {deed.__name__}: {type(error).__name__} {error}")

    def _weight(self, *, publishing: bool) -> float:
        """Return how often the client publishes, or acquires, among everything else that it does."""
        crowd = self.world.crowd
        if crowd is None:
            return 6 if publishing else 8
        if crowd.publishes(self.host):
            return 2 if publishing else 1
        return 0.5 if publishing else 16

    def _here(self) -> Share:
        start = self.world.starts[self.host].shares[self._tenant]
        if start is not self._start:
            self._arrive(start)
        return start

    def _arrive(self, start: Share) -> None:
        """Meet a new start of the node: what an earlier one gave is worth nothing to this one."""
        if not start.serving:
            raise NodeDownError
        if self.attached:
            self._identity = start.attach(self._tenant)
        self._start = start
        self._held.clear()
        if self.chance.random() < 0.5:
            _ = start.bridge.containment.watchers.open(self._identity.client_id, 0)

    async def _reach(self, failpoint: Failpoint) -> None:
        await self.world.failpoints.reach(failpoint, crash=self.crash, cancel=self._give_up)
        if self._gave_up:
            self._gave_up = False
            raise CallCancelledError

    def _give_up(self) -> None:
        self._gave_up = True

    async def _freeze(self, _: Share) -> None:
        await asyncio.sleep(self.chance.uniform(2.0, 14.0))

    # Publishing

    async def _publish(self, start: Share) -> None:
        [manner] = self.chance.choices(list(MANNERS), list(MANNERS.values()))
        if self.world.crowd is not None and self.world.crowd.is_wanted(self.host):
            manner = Manner()
        spec = self._spec()
        if self.attached:
            await self._publish_in_place(start, spec, manner)
        else:
            await self._upload(start, spec, manner)

    def _spec(self) -> PayloadSpec:
        draw = self.chance
        derived_from: tuple[PayloadReference, ...] = ()
        if self._held and draw.random() < 0.4:
            derived_from = (draw.choice(list(self._held.values())).descriptor.reference,)
        publish = partial(
            content.spec,
            tenant=self._tenant,
            derived_from=derived_from,
            linger_seconds=draw.choice((None, None, None, 0.0, 3.0)),
            ttl_seconds=draw.choice((None, None, None, 4.0)),
        )
        if draw.random() < (0.4 if self.world.crowd is None else 0.1):
            key = f"{TALK}#{draw.randrange(content.PIECES)}"
            return publish(key, capacity_tokens=_PIECE_CAPACITY, count=content.PIECE_TOKENS)
        count = draw.choice((1, 5, 40, 300))
        capacity = count + draw.choice((0, 3, 300))
        return publish(f"key-{draw.randrange(KEYS)}", capacity_tokens=capacity, count=count)

    def _bytes(self, start: Share, reference: PayloadReference, spec: PayloadSpec, manner: Manner) -> NDArray[np.uint8]:
        """Return what is written, and tell the judge what to expect of it."""
        assert spec.tokens is not None, spec
        canonical = content.content(
            self.world.judge.stamp(start, reference), content.layout_of(spec).canonical_bytes(spec.tokens.count)
        )
        start.enter(reference, spec.derived_from)
        if manner.fails:
            self.world.judge.expect_rejection(start, reference)
        elif manner.lies:
            self.world.judge.distrust_digests(start, reference)
        return canonical

    def _written(self, canonical: NDArray[np.uint8], manner: Manner) -> NDArray[np.uint8]:
        if manner.spoils:
            canonical = canonical.copy()
            canonical[self.chance.randrange(canonical.nbytes)] ^= 1
        if manner.infinite:
            canonical = canonical.copy()
            canonical.view(np.float32)[self.chance.randrange(canonical.nbytes // 4)] = math.inf
        return canonical

    def _seal(self, canonical: NDArray[np.uint8], manner: Manner) -> Seal:
        digests: tuple[bytes, ...] = ()
        if manner.declares:
            digests = content.digests(canonical)
            digests = (digests[0], b"\0" * len(digests[1])) if manner.lies else digests
        return Seal(layer_digests=digests, verification=manner.verification, hold=self.chance.random() < 0.3)

    async def _publish_in_place(self, start: Share, spec: PayloadSpec, manner: Manner) -> None:
        async def reserve(_: Call) -> tuple[Grant, NDArray[np.uint8]]:
            grant = start.bridge.reserve(self._identity, spec)
            return grant, self._bytes(start, grant.reference, spec, manner)

        message = pb.ReserveRequest(request_id=self._requests.next_id(), spec=types_pb2.PayloadSpec(key=spec.key))
        grant, canonical = await self._ask(start, Request(message=message, work=reserve))
        await self._reach(Failpoint.RESERVE_ANSWERED)
        await self._write(start, grant, spec, self._written(canonical, manner))
        end = self.chance.random()
        if end < 0.05:
            return  # Forgotten: its time to live ends it, and the end of this client frees it.
        if end < 0.15:
            await self._abort(start, grant)
            return

        seal = self._seal(canonical, manner)

        async def commit(_: Call) -> Committed | Rejected:
            return await start.bridge.commit(self._identity, grant.token, seal)

        request = Request(
            message=pb.CommitRequest(request_id=self._requests.next_id(), reservation_token=grant.token),
            work=commit,
            arrived=Failpoint.COMMIT_ARRIVED,
            answered=Failpoint.COMMIT_ANSWERED,
        )
        self._committed(start, await self._ask(start, request))

    async def _ask(self, start: Share, request: Request[T]) -> T:
        return await self._requests.ask(start, self._identity, request)

    async def _write(self, start: Share, grant: Grant, spec: PayloadSpec, written: NDArray[np.uint8]) -> None:
        assert spec.tokens is not None, spec
        slot, at = start.bridge.slot_of(self._identity, grant), 0
        runs = list(content.runs(slot, content.layout_of(spec), spec.tokens.count))
        for index, run in enumerate(runs):
            if index == len(runs) // 2:
                await self._reach(Failpoint.WRITE_MIDDLE)
                await asyncio.sleep(self.chance.choice((0.0, 0.0, 0.1, 1.0)))
            run[:] = written[at : at + run.nbytes].data
            at += run.nbytes

    async def _abort(self, start: Share, grant: Grant) -> None:
        async def abort(_: Call) -> pb.AbortResponse:
            start.bridge.abort(self._identity, grant.token)
            return pb.AbortResponse()

        message = pb.AbortRequest(request_id=self._requests.next_id(), reservation_token=grant.token)
        await self._ask(start, Request(message=message, work=abort))

    async def _upload(self, start: Share, spec: PayloadSpec, manner: Manner) -> None:
        pause = self.chance.choice((0.0, 0.01, 0.3))

        async def upload(call: Call) -> Committed | Rejected:
            try:
                return await self._receive(start, spec, manner, pause)
            finally:
                self.world.judge.all_told(start, call, set())

        spec_said = types_pb2.PayloadSpec(key=spec.key)
        request = Request(
            message=pb.UploadHeader(request_id=self._requests.next_id(), spec=spec_said),
            work=upload,
            answered=Failpoint.COMMIT_ANSWERED,
            stops_with_caller=True,
        )
        self._committed(start, await self._ask(start, request))

    async def _receive(self, start: Share, spec: PayloadSpec, manner: Manner, pause: float) -> Committed | Rejected:
        """Do what a server does with an upload."""
        assert spec.tokens is not None, spec
        with Upload(start.bridge, self._identity, spec, spec.tokens.count) as upload:
            canonical = self._bytes(start, upload._grant.reference, spec, manner)
            written = self._written(canonical, manner)
            for at in range(0, written.nbytes, 5000):
                async with asyncio.timeout(start.bridge.config.reservation_ttl_seconds):
                    await start.reach(Failpoint.UPLOAD_CHUNK)
                    await asyncio.sleep(pause)
                upload.write(memoryview(written[at : at + 5000].data).cast("B"))
            return await upload.finish(self._seal(canonical, manner))

    def _committed(self, start: Share, outcome: Committed | Rejected) -> None:
        if isinstance(outcome, Rejected):
            self.world.trace(f"{self} published nothing: {outcome.reason} {outcome.reference}")
            return
        self.world.trace(f"{self} published {outcome.descriptor.reference}")
        self.world.published.append((self.host, self._tenant, outcome.descriptor.reference))
        del self.world.published[:-_PUBLISHED_MAX]
        if outcome.hold is not None:
            self._held[outcome.hold.token] = Held(
                start=start, grant=outcome.hold, descriptor=outcome.descriptor, slot=None
            )

    # Consuming

    async def _acquire(self, start: Share) -> None:
        if len(self._held) >= _HELD_MAX:
            await self._release(start)
        parts = self._parts()
        verification = self.chance.choice((Verification.NONE, Verification.DIGEST, Verification.FULL))
        hurried = (None, 0.004, 0.05, 0.3, 1.0, 3.0, 10.0)
        deadline_seconds = self.chance.choice(hurried if self.world.crowd is None else DEADLINES_SECONDS)

        async def acquire(call: Call) -> HandoffAnswer:
            asked = Acquisition(
                client=self._identity,
                parts=parts,
                verification=verification,
                deadline_seconds=deadline_seconds,
                arrived_at=time.perf_counter(),
            )
            return await self._answered(start, call, asked)

        request = Request(
            message=pb.AcquireRequest(
                request_id=self._requests.next_id(), payloads=[encode_reference(terms.reference) for terms in parts]
            ),
            work=acquire,
            arrived=Failpoint.ACQUIRE_ARRIVED,
            answered=Failpoint.ACQUIRE_ANSWERED,
            stops_unheard=True,
        )
        if self.chance.random() < _DIES_WAITING_SHARE * (1 + 3 * self.world.rough):
            self.world.loop.call_later(self.chance.choice((0.01, 0.1, 0.4)), self.crash)
        self._take(start, parts, await self._ask(start, request))
        if self.chance.random() < 0.7:
            await self._use(start)

    def _take(self, start: Share, parts: tuple[AcquireTerms, ...], answer: HandoffAnswer) -> None:
        self._handoffs.append(answer.handoff_id)
        self.world.judge.taken(start, self._identity.client_id, answer)
        for part in answer.parts:
            if isinstance(part, Leased):
                slot = start.bridge.slot_of(self._identity, part.grant) if self.attached and start.serving else None
                self._held[part.grant.token] = Held(
                    start=start, grant=part.grant, descriptor=part.descriptor, slot=slot
                )
        said = [part.grant.reference if isinstance(part, Leased) else part.finding.reason for part in answer.parts]
        self.world.trace(f"{self} asked for {[terms.reference for terms in parts]} and got {said}")

    async def _answered(self, start: Share, call: Call, asked: Acquisition) -> HandoffAnswer:
        judge, loop = self.world.judge, self.world.loop
        unsound, began_at = judge.unsound(start), loop.time()
        try:
            answer = await start.bridge.acquire(asked)
        except BaseException:
            judge.all_told(start, call, set())
            judge.in_time(start, asked, seconds=loop.time() - began_at)
            raise
        if start.alive:
            judge.answered(start, call, asked, answer, seconds=loop.time() - began_at, unsound=unsound)
        return answer

    def _parts(self) -> tuple[AcquireTerms, ...]:
        draw = self.chance
        model = content.OTHER_MODEL if draw.random() < 0.05 else content.MODEL
        if draw.random() < 0.15 and self.world.crowd is None:
            count = draw.randint(1, content.PIECES)
            prompt = content.tokens(TALK, content.PIECE_TOKENS * content.PIECES)
            references = [PayloadReference(key=f"{TALK}#{n}", generation=0) for n in range(count)]
            return tuple(AcquireTerms(reference=reference, model=model, tokens=prompt) for reference in references)
        return (AcquireTerms(reference=self._wanted(), model=model, tokens=None),)

    def _wanted(self) -> PayloadReference:
        draw = self.chance
        library = "" if self.world.crowd is None else self.world.crowd.wants(self.host)
        theirs = [reference for host, _, reference in self.world.published if host == library]
        if theirs:
            # The first ones of each start have the same names.
            usual = PayloadReference(key=f"key-{draw.randrange(2)}", generation=draw.choice((1, 2)))
            wanted = draw.choice((usual, *theirs[:_WANTED_MAX]))
            return PayloadReference(key=str(HandoffReference(node_id=library, payload=wanted)), generation=0)
        kind = draw.random()
        if self.world.published and kind < 0.95:
            host, _, reference = draw.choice(self.world.published)  # Whoever else published it.
            if host == self.host and kind < 0.4:
                return reference
            return PayloadReference(key=str(HandoffReference(node_id=host, payload=reference)), generation=0)
        return PayloadReference(key=f"key-{draw.randrange(KEYS)}", generation=draw.choice((0, 0, 0, 1, 2)))

    async def _use(self, start: Share) -> None:
        leases = [held for held in self._held.values() if held.grant.kind == "LEASE" and not held.lapsed]
        if not leases:
            return
        held = self.chance.choice(leases)
        if held.slot is not None:
            self.world.judge.read(held.start, held.grant.token, held.descriptor, held.slot)
            await self._reach(Failpoint.READ_MIDDLE)
            # Whoever maps the memory may read until it says that it is done, however late that is.
            self.world.judge.read(held.start, held.grant.token, held.descriptor, held.slot)
        elif not self.attached:
            await start.serve("download", lambda _: self._download(start, held))

    async def _download(self, start: Share, held: Held) -> None:
        """Do what a server does with a download."""
        token, got = held.grant.token, bytearray()
        payload, slot = start.bridge.payload_of_lease(self._identity, token)
        assert payload.descriptor is not None, payload
        layout, length = content.layout_of(payload.descriptor), payload.descriptor.valid_length
        for pieces in canonical_chunks(slot, layout, length, chunk_bytes=start.bridge.config.chunk_bytes):
            start.bridge.payload_of_lease(self._identity, token)
            got += b"".join(pieces)
            await start.reach(Failpoint.DOWNLOAD_CHUNK)
        self.world.judge.downloaded(start, token, payload.descriptor, bytes(got))

    # References

    def _some(self, most: int) -> list[str]:
        tokens = list(self._held)
        return self.chance.sample(tokens, min(len(tokens), self.chance.randint(1, most)))

    async def _renew(self, start: Share) -> None:
        await self._reach(Failpoint.RENEW_ASKED)
        tokens = self._some(4)

        async def renew(_: Call) -> list[float | None]:
            return start.bridge.renew(self._identity, tokens)

        for token, ttl in zip(tokens, await start.serve("renew", renew), strict=True):
            if ttl is None and not self.attached:
                self._held[token].lapsed = True

    async def _release(self, start: Share) -> None:
        await self._reach(Failpoint.RELEASE_ASKED)
        tokens = self._some(3)
        if not tokens:
            return
        for token in tokens:
            self._held[token].lapsed = True  # From here on the client touches nothing of it.

        try:
            await self._give_back(start, tokens)
        except BridgeError:
            # One of them was returned before, by a call of which the answer was lost; the others once more.
            del self._held[tokens[0]]
            await self._give_back(start, tokens[:1])
        else:
            for token in tokens:
                del self._held[token]

    async def _give_back(self, start: Share, tokens: list[str]) -> None:
        async def release(_: Call) -> set[str]:
            return start.bridge.release(self._identity, tokens)

        message = pb.ReleaseRequest(request_id=self._requests.next_id(), tokens=tokens)
        await self._ask(start, Request(message=message, work=release))

    async def _report(self, start: Share) -> None:
        if self._handoffs:
            report = Report(
                handoff_id=self.chance.choice(self._handoffs), outcome=Outcome(use=self.chance.choice(list(HandoffUse)))
            )
            start.bridge.reports.take(self._identity, report)

    async def _quarantine(self, start: Share) -> None:
        await self._reach(Failpoint.QUARANTINE_ASKED)
        here = self.host, self._tenant
        mine = [reference for *where, reference in self.world.published if tuple(where) == here]
        mine += [held.descriptor.reference for held in self._held.values()]
        if not mine:
            return
        target = self.chance.choice(mine)

        async def quarantine(_: Call) -> None:
            keeper = start.bridge.containment.quarantines
            imposed = await keeper.quarantine(self._identity, target, why="poison", dry_run=False)
            start.impose(imposed.quarantine_id, target)
            self.world.judge.contained(start)

        await start.serve("quarantine", quarantine)
        self.world.trace(f"{self} quarantined {target}")

    async def _lift(self, start: Share) -> None:
        if not start.in_force:
            return
        quarantine_id = self._habits.choice(start.in_force)

        async def lift(_: Call) -> None:
            if quarantine_id in start.in_force:
                start.lift(quarantine_id)
                await start.bridge.containment.quarantines.unquarantine(self._identity, quarantine_id)

        await start.serve("unquarantine", lift)
        self.world.trace(f"{self} lifted {quarantine_id}")
