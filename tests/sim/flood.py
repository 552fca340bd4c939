"""A flood of keys, none of which ever comes twice, against a whole node on a virtual clock: what remembers must forget.

1. Every *way* offers names of its own: keys, handoff references of nodes that nobody knows, models, edges, clients,
   handoffs, tokens. They are what somebody would choose who wants the node to run out of memory.
2. Afterwards everything that can be reached from the node is walked through. No container may hold more than the
   configured limit that is its own, or than the largest one of all; nothing may have grown in the second half.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import types
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from kvbridge.config import BridgeConfig
from kvbridge.core.cost import CostLimits
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.errors import BridgeError
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import lineage
from kvbridge.core.journal import HandoffUse, Outcome
from kvbridge.core.layout import HEADER_BYTES
from kvbridge.core.ledger import Committed, Ledger
from kvbridge.core.tags import ModelTag
from kvbridge.link.port import HOLDERS_MAX, ReplicaNotice
from kvbridge.node import holders, prefetching, probes, replicas
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import HandoffAnswer
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.reports import Measured, Report
from kvbridge.server.answers import Answers
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import Seal
from tests.sim import content
from tests.sim.loop import SimulatedLoop, virtual_surroundings

_MARGIN_SHARE = 1.05
"""How much what is counted by its entries may be above what it was half-way: dictionaries are not all equally full."""
_EXPIRED_TOKENS_MAX, _ORDERS_MAX = 256, 128
_PREFETCHED_AT_ONCE = 8
_QUARANTINES_EVERY, _ROTS_EVERY = 5, 3
_PAUSE_SECONDS = 0.02
"""Virtual time between two offers, so that what is published expires meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a node holds at one moment."""

    names: int
    """How many distinct names it was offered so far."""
    counts: Mapping[str, tuple[int, int]]
    """Entries and limit of each structure that has a limit of its own."""
    largest: tuple[int, str]
    """Entries of the largest container of all, and where it is."""
    entries: int
    """Entries of all containers together."""


class Flood:
    """A node, and somebody who offers it names."""

    def __init__(self, loop: SimulatedLoop) -> None:
        """Start a node whose limits are so low that a flood reaches them soon."""
        self.config = BridgeConfig(
            node_id="flooded",
            arena_bytes=4 << 20,
            pretouch=False,
            huge_pages=False,
            unmeasured_tokens_min=1,
            linger_seconds=1.0,
            ttl_seconds=5.0,
            lease_ttl_seconds=5.0,
            reservation_ttl_seconds=5.0,
            payloads_max=512,
            references_max=1024,
            tombstones_max=256,
            answers_remembered_max=256,
            journal_records_max=256,
            breakers_max=128,
            provenance_payloads_max=256,
            provenance_handoffs_max=1024,
            quarantines_max=64,
            sessions_max=64,
            watches_max=64,
            listen="",
            metrics_listen="",
        )
        self.names = 0
        self._published = 0
        self._loop = loop
        self.bridge = Bridge(self.config, clock=loop.time)
        references = self.bridge._tenancies[DEFAULT_TENANT]._ledger._life.references
        references.limits = replace(references.limits, expired_tokens_max=_EXPIRED_TOKENS_MAX)  # Not configured.
        orders = self.bridge.cluster.orders._book
        orders._limits = replace(orders._limits, revocations_max=_ORDERS_MAX, lifted_max=_ORDERS_MAX)
        self.answers = Answers(self.config.answers_remembered_max, self.config.answer_bytes_remembered_max)
        self._ways: tuple[Callable[[], Awaitable[None]], ...] = (
            self._acquire_what_nobody_knows,
            self._acquire_from_nowhere,
            self._reserve_and_abort,
            self._publish_and_acquire,
            self._prefetch,
            self._report,
            self._release_and_renew,
            self._tell_of_replicas,
            self._lend,
            self._attach,
        )

    async def run(self, names: int) -> tuple[Held, Held]:
        """Offer so many names, and return what was held half-way and at the end."""
        await self.bridge.start()
        halves = []
        ways = cycle(self._ways)
        for until in (names // 2, names):
            while self.names < until:
                await next(ways)()
                await asyncio.sleep(_PAUSE_SECONDS)
            halves.append(self.held())
        await self.bridge.close()
        return halves[0], halves[1]

    # Ways

    def _name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}-{self.names}"

    def _client(self) -> Client:
        return Client(client_id=self._name("client-of-a-flood"), tenant=DEFAULT_TENANT, attached=False)

    def _terms(self, key: str, **terms: Any) -> AcquireTerms:
        model = ModelTag(
            name=self._name("model"), revision="r", adapter="", weight_dtype="float32", tokenizer_digest="t0"
        )
        named = {"edge": self._name("edge"), "affinity": self._name("affinity"), "model": model, **terms}
        return AcquireTerms(reference=PayloadReference(key=key, generation=0), tokens=None, **named)

    async def _acquire(self, client: Client, *parts: AcquireTerms) -> HandoffAnswer:
        asked = Acquisition(client=client, parts=parts, verification=Verification.DIGEST, deadline_seconds=5.0)
        request = pb.AcquireRequest(request_id=self._name("request"))

        async def work() -> HandoffAnswer:
            return await self.bridge.acquire(asked)

        return await self.answers.once(client, request.request_id, request, work)

    async def _acquire_what_nobody_knows(self) -> None:
        await self._acquire(self._client(), *(self._terms(self._name("never")) for _ in range(3)))

    async def _acquire_from_nowhere(self) -> None:
        keys = [f"kvb://{self._name('node')}/{self._name('key')}@1" for _ in range(2)]
        await self._acquire(self._client(), *map(self._terms, keys))

    def _spec(self, **terms: Any) -> PayloadSpec:
        key = self._name("published")
        named = {"model": content.MODEL, "tokens": content.tokens("flood", 1), **terms}
        fallback = FallbackText(text=f"the text of {key}")
        return PayloadSpec(key=key, geometry=content.GEOMETRY, capacity_tokens=1, fallback=fallback, **named)

    async def _reserve_and_abort(self) -> None:
        client = self._client()
        with suppress(BridgeError):
            grant = self.bridge.reserve_for_stream(client, self._spec())
            self.bridge.abort(client, grant.token)

    async def _publish_and_acquire(self) -> None:
        """Publish, derived from what never was, let it rot, and acquire it by two models; leases are forgotten."""
        self._published += 1
        producer, consumer = self._client(), self._client()
        source = PayloadReference(key=self._name("source"), generation=1)
        with suppress(BridgeError):
            grant = self.bridge.reserve_for_stream(producer, self._spec(derived_from=(source,)))
            sealed = await self.bridge.commit(producer, grant.token, Seal(verification=Verification.DIGEST, hold=True))
            assert isinstance(sealed, Committed), sealed
            key = sealed.descriptor.reference.key
            self._tell(sealed.descriptor.reference)
            await self._acquire(consumer, self._terms(key))
            answer = await self._acquire(consumer, self._terms(key, model=content.MODEL, edge=""))
            if self._published % _ROTS_EVERY == 0:
                self.bridge.slot_of(producer, grant)[HEADER_BYTES] ^= 1
                await self._acquire(self._client(), self._terms(key, model=content.MODEL))
            measured = Measured(size=1 + self.names % 4096, seconds=0.1)
            said = Report(handoff_id=answer.handoff_id, outcome=Outcome(use=HandoffUse.USED), prefill=measured)
            self.bridge.reports.take(consumer, said)
            if self._published % _QUARANTINES_EVERY == 0:
                await self._quarantine(sealed.descriptor.reference)

    async def _quarantine(self, reference: PayloadReference) -> None:
        keeper = self.bridge.containment.quarantines
        operator = self._client()
        imposed = await keeper.quarantine(operator, lineage(reference), why=self._name("why"), dry_run=False)
        await keeper.unquarantine(operator, imposed.quarantine_id)

    async def _prefetch(self) -> None:
        keys = [f"kvb://{self._name('node')}/{self._name('key')}@1" for _ in range(_PREFETCHED_AT_ONCE)]
        wanted = [PayloadReference(key=key, generation=0) for key in keys]
        await self.bridge.prefetch(self._client(), wanted, within_seconds=None)

    async def _report(self) -> None:
        made_up = Report(handoff_id=self._name("handoff"), outcome=Outcome(use=HandoffUse.DISCARDED))
        with suppress(BridgeError):
            self.bridge.reports.take(self._client(), made_up)
        model = self._terms("key").model
        self.bridge.reports.measure(DEFAULT_TENANT, model, prefill=Measured(size=100, seconds=0.1), scatter=None)
        self.bridge.reports.measure(DEFAULT_TENANT, model, prefill=None, scatter=Measured(size=100, seconds=0.1))

    async def _release_and_renew(self) -> None:
        client = self._client()
        self.bridge.renew(client, [self._name("token") for _ in range(4)])
        with suppress(BridgeError):
            self.bridge.release(client, [self._name("token")])

    def _peer(self) -> Client:
        return Client(client_id=f"node.{self._name('peer')}.{0:012d}", tenant=DEFAULT_TENANT, attached=False)

    def _tell(self, reference: PayloadReference) -> None:
        """Let more nodes than may be named say that they have brought a payload over."""
        for _ in range(HOLDERS_MAX + 1):
            peer = self._peer()
            lent = self.bridge.lender.lend(peer, DEFAULT_TENANT, reference)
            token = getattr(lent, "grant").token  # noqa: B009 - what was refused would be a fault of this module
            notice = ReplicaNotice(node_id=self._name("holder"), linger_seconds=1e9)
            self.bridge.holders.told(peer, [token], notice)
            self.bridge.release(peer, [token])

    async def _tell_of_replicas(self) -> None:
        notice = ReplicaNotice(node_id=self._name("holder"), linger_seconds=1e9)
        self.bridge.holders.told(self._peer(), [self._name("token")], notice)

    async def _lend(self) -> None:
        """Ask as nodes for what never was, for replicas of what never was, and of tenants that never were."""
        for tenant, key, epoch in (
            (DEFAULT_TENANT, self._name("key"), 0),
            (DEFAULT_TENANT, f"kvb://{self._name('node')}/{self._name('key')}@1", self.names),
            (self._name("tenant"), self._name("key"), 0),
        ):
            reference = PayloadReference(key=key, generation=1)
            self.bridge.lender.lend(self._peer(), tenant, reference, owner_epoch=epoch)

    async def _attach(self) -> None:
        """Attach, watch, take something, and end; watch without a session as well, and go."""
        attached = self.bridge.sessions.open(DEFAULT_TENANT)
        watch = self.bridge.containment.watchers.open(attached.client_id, 0)
        with suppress(BridgeError):
            self.bridge.reserve(attached, self._spec())
        self.bridge.sessions.close(attached.client_id)
        self.bridge.end_client(attached)
        watch.close()
        with suppress(BridgeError):
            self.bridge.containment.watchers.open(self._client().client_id, 0).close()

    # What is held

    def held(self) -> Held:
        """Return what the node holds now."""
        gc.collect()
        sizes = list(containers((self.bridge, self.answers), ends={id(self._loop)}))
        return Held(
            names=self.names,
            counts=self._counts(),
            largest=max(sizes),
            entries=sum(count for count, _ in sizes),
        )

    def _counts(self) -> dict[str, tuple[int, int]]:
        bridge, config, costs = self.bridge, self.config, CostLimits()
        tenancy = bridge._tenancies[DEFAULT_TENANT]
        with tenancy.ledger() as ledger:
            counts = _counts_of(ledger, config)
        book, mine = bridge.containment.quarantines._books[DEFAULT_TENANT], bridge.breakers._of_tenants[DEFAULT_TENANT]
        measured, watchers = bridge.costs.of_tenant(DEFAULT_TENANT), bridge.containment.watchers
        known = config.provenance_payloads_max + config.payloads_max
        return counts | {
            "answers": (len(self.answers._of_tenants[DEFAULT_TENANT]), config.answers_remembered_max),
            "records": (len(bridge.journal._records), config.journal_records_max),
            "provenance of payloads": (len(book.provenance._origins), known),
            "provenance of handoffs": (len(book.provenance._receipts), config.provenance_handoffs_max),
            "revocations": (len(bridge.cluster.orders._book._revocations), _ORDERS_MAX),
            "quarantines that were lifted": (len(bridge.cluster.orders._book._lifted), _ORDERS_MAX),
            "quarantines": (len(book._in_force), config.quarantines_max),
            "breakers": (len(mine.breakers), config.breakers_max),
            "bad payloads": (len(mine.bad_payloads), config.breakers_max),
            "trials": (len(bridge.breakers._trials), config.breakers_max),
            "models with a prefill": (len(measured._prefill), costs.models_max),
            "models with a scatter": (len(measured._scatter), costs.models_max),
            "holders": (len(bridge.holders), holders.PAYLOADS_MAX),
            "replicas": (len(bridge.replicas._epochs), replicas.EPOCHS_REMEMBERED_MAX),
            "visits": (len(bridge.replicas), 0),
            "prefetches": (len(bridge.prefetching._orders), config.prefetches_max),
            "prefetches awaited": (len(bridge.prefetching._awaited), prefetching.REMEMBERED_MAX),
            "nodes": (len(bridge.replicas._visitor.incarnations._known), 0),
            "sessions": (len(bridge.sessions), config.sessions_max),
            "clients that watch": (len(watchers._logs), 2 * config.watches_max),
            "work in the background": (len(bridge._background), 0),
        }

    @property
    def largest_limit(self) -> int:
        """Return the largest number of entries that any structure of this node may have."""
        return max(self.config.references_max, holders.PAYLOADS_MAX, prefetching.REMEMBERED_MAX, probes.FINDINGS_MAX)


def _counts_of(ledger: Ledger, config: BridgeConfig) -> dict[str, tuple[int, int]]:
    usage, shown = ledger.usage(), ledger.snapshot()
    known = config.payloads_max + config.tombstones_max
    return {
        "payloads": (usage.payloads, config.payloads_max),
        "references": (usage.holds + usage.leases + usage.reservations + usage.residues, config.references_max),
        "tombstones": (usage.tombstones, config.tombstones_max),
        "keys": (_count(shown["keys"]), known),
        "clients": (_count(shown["clients"]), config.references_max),
        "expired tokens": (_count(shown["expired_tokens"]), _EXPIRED_TOKENS_MAX),
        "deadlines": (_count(shown["deadlines"]), config.references_max + 2 * known),
        "effects": (_count(shown["effects_waiting"]), 0),
    }


def _count(shown: object) -> int:
    assert isinstance(shown, int), shown
    return shown


def has_grown(before: Held, after: Held) -> bool:
    """Tell whether a node holds more than it did half-way."""
    return after.entries > _MARGIN_SHARE * before.entries


_CONTAINERS = (dict, list, set, frozenset, tuple, collections.deque)
_ENDS = (type, types.ModuleType, types.CodeType, types.FrameType, types.CoroutineType, str, bytes, int, float)


def containers(roots: tuple[object, ...], *, ends: set[int]) -> Iterator[tuple[int, str]]:
    """Yield the size of every container that can be reached from `roots`, and where it is; never go beyond `ends`."""
    waiting: list[tuple[object, str]] = [(root, type(root).__name__) for root in roots]
    seen = set(ends) | {id(root) for root in roots}
    while waiting:
        thing, where = waiting.pop()
        if isinstance(thing, _CONTAINERS):
            yield len(thing), where
        for name, part in _parts(thing):
            if id(part) not in seen and not isinstance(part, _ENDS):
                seen.add(id(part))
                waiting.append((part, f"{where}[]" if not name else f"{type(thing).__name__}.{name}"))


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    """Yield what something refers to, with the name of the attribute if it is one."""
    if isinstance(thing, types.FunctionType):
        yield from (("", cell.cell_contents) for cell in thing.__closure__ or ())
        return
    named = {id(part): name for name, part in _attributes(thing)}
    yield from ((named.get(id(part), ""), part) for part in gc.get_referents(thing))
    yield from _attributes(thing)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    yield from getattr(thing, "__dict__", {}).items() if not isinstance(thing, _CONTAINERS) else ()
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            with suppress(AttributeError):
                yield name, getattr(thing, name)


def flood(names: int) -> tuple[Flood, Held, Held]:
    """Offer a node so many names, and return it with what it held half-way and at the end."""
    loop = SimulatedLoop("a flood", steps_max=1 << 62)
    with virtual_surroundings(loop, "a flood"):
        try:
            flooded = Flood(loop)
            return flooded, *loop.run_until_complete(flooded.run(names))
        finally:
            loop.close()
