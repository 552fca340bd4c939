"""Payloads of other nodes that are brought over before anybody acquires them.

1. The gate is asked nothing, because nobody is handed anything: only what could never be handed over is not begun.
2. A prefetch waits for a visit like a consumer, so whoever acquires meanwhile waits for the same transfer.
3. Each has a bounded time, and a tenant and a client have a bounded number and bounded bytes under way.
4. What came is an ordinary replica. It is *used* when the first consumer gets a lease on it, and *wasted* if it goes
   away before that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.journal import HandoffRecord
from kvbridge.core.ledger import Payload, Tombstone
from kvbridge.core.prefetch import PrefetchState
from kvbridge.core.reasons import Reason
from kvbridge.node.costs import CostKeeper
from kvbridge.node.fetching import Fetching
from kvbridge.node.foreign import Foreign, unfit
from kvbridge.node.identity import Client
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.node.replicas import Replicas
from kvbridge.node.surroundings import computed_by
from kvbridge.node.tenancy import Tenancy

REMEMBERED_MAX = 4096
"""Most prefetched payloads of which it is still awaited whether they are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetched:
    """What becomes of one payload, as far as that is known at once."""

    state: PrefetchState
    """What is done."""
    reason: Reason | None = None
    """Why nothing is done; None otherwise."""
    detail: str = ""
    """The same for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLimits:
    """How much may be brought over beforehand."""

    seconds_max: float
    """How long one may take."""
    count_max: int
    """How many may be under way for a tenant."""
    count_per_client_max: int
    """How many of them a client may have asked for."""
    bytes_max: int
    """How many bytes may be under way for a tenant."""


@dataclass(slots=True, kw_only=True)
class PrefetchCounts:
    """What became of prefetches since the start; each only grows."""

    started: int = 0
    """Begun."""
    refused: int = 0
    """Not begun, because the payload cannot be brought over."""
    failed: int = 0
    """Begun, but the bytes did not arrive."""
    used: int = 0
    """Leased by a consumer."""
    wasted: int = 0
    """Arrived, and gone before anybody leased them."""


@dataclass(slots=True, kw_only=True)
class _Order:
    """One prefetch under way."""

    tenancy: Tenancy
    client: Client
    key: str
    within_seconds: float | None
    answer: asyncio.Future[Prefetched]
    counts: bool = False
    nbytes: int = 0


class Prefetching:
    """Brings payloads over for those who will ask for them."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        fetching: Fetching,
        replicas: Replicas,
        costs: CostKeeper,
        quarantines: QuarantineKeeper,
        limits: PrefetchLimits,
    ) -> None:
        """Visit other nodes by `replicas`; `clock` is the ledger's."""
        self.counts = PrefetchCounts()
        self._clock = clock
        self._fetching = fetching
        self._replicas = replicas
        self._costs = costs
        self._quarantines = quarantines
        self._limits = limits
        self._orders: dict[tuple[str, str], _Order] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: OrderedDict[tuple[str, str], Tenancy] = OrderedDict()

    def __repr__(self) -> str:
        """Show how many are under way, and what became of the others."""
        return f"<Prefetching of {len(self._orders)}: {self.counts}>"

    async def prefetch(
        self, client: Client, tenancy: Tenancy, references: Sequence[PayloadReference], within_seconds: float | None
    ) -> list[Prefetched]:
        """Begin with what can be brought over, and say of each payload what is done."""
        begun = [self._begin(client, tenancy, reference, within_seconds) for reference in references]
        answers = [await asyncio.shield(one) if isinstance(one, asyncio.Future) else one for one in begun]
        self.counts.refused += sum(answer.state is PrefetchState.REFUSED for answer in answers)
        return answers

    async def stop(self) -> None:
        """Break off what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def observe(self, record: HandoffRecord) -> None:
        """Take note of which prefetched payloads a handoff has leased."""
        for part in record.parts:
            if part.leased and self._awaited.pop((record.tenant, part.reference.key), None) is not None:
                self.counts.used += 1

    def sweep(self) -> None:
        """Take note of what has gone away unused."""
        for (tenant, key), tenancy in list(self._awaited.items()):
            if (tenant, key) not in self._orders and not isinstance(self._find(tenancy, key), Payload):
                del self._awaited[tenant, key]
                self.counts.wasted += 1

    # One payload

    def _begin(
        self, client: Client, tenancy: Tenancy, reference: PayloadReference, within_seconds: float | None
    ) -> Prefetched | asyncio.Future[Prefetched]:
        if not is_handoff_reference(reference.key):
            return self._at_home(tenancy, reference)
        name = (tenancy.tenant, reference.key)
        if name in self._orders:
            return self._orders[name].answer
        loop = asyncio.get_running_loop()
        order = _Order(
            tenancy=tenancy,
            client=client,
            key=reference.key,
            within_seconds=within_seconds,
            answer=loop.create_future(),
        )
        self._orders[name] = order
        task = loop.create_task(self._bring(order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return order.answer

    async def _bring(self, order: _Order) -> None:
        """Answer an order, and bring its payload over."""
        try:
            if not await self._fetching.missing(order.tenancy, [order.key], lambda: None):
                order.answer.set_result(self._at_home(order.tenancy, PayloadReference(key=order.key, generation=0)))
                return
            problem = self._crowded(order.client)
            if problem is not None:
                order.answer.set_result(refused(Reason.MEMORY_EXHAUSTED, problem))
                return
            order.counts = True
            with self._replicas.visiting(order.tenancy.tenant, [order.key]) as visits:
                visit = visits[order.key]
                said = await visit.look(None)
                refusal = self._refusal(order, said)
                order.answer.set_result(refusal or Prefetched(state=PrefetchState.STARTED))
                if refusal is not None:
                    return
                with self._counted(order):
                    failure = await visit.pull(self._limits.seconds_max)
                    if failure is None:
                        self._replicas.note(order.tenancy.tenant, order.key, visit)
                    else:
                        self._forget(order)
        finally:
            del self._orders[order.tenancy.tenant, order.key]
            if not order.answer.done():
                order.answer.set_result(refused(Reason.DRAINING, "the node is shutting down"))

    @contextmanager
    def _counted(self, order: _Order) -> Iterator[None]:
        """Count a prefetch that has begun, and one that breaks off."""
        self.counts.started += 1
        self._awaited[order.tenancy.tenant, order.key] = order.tenancy
        if len(self._awaited) > REMEMBERED_MAX:
            self._awaited.popitem(last=False)
        try:
            yield
        except BaseException:
            self._forget(order)
            raise

    def _forget(self, order: _Order) -> None:
        self._awaited.pop((order.tenancy.tenant, order.key), None)
        self.counts.failed += 1

    # Whether to begin

    def _at_home(self, tenancy: Tenancy, reference: PayloadReference) -> Prefetched:
        """Say what there is of a payload of this node's own, or of a replica."""
        found = self._find(tenancy, reference.key, reference.generation)
        if found is None:
            return refused(Reason.PAYLOAD_UNKNOWN, "nothing is known under this key and generation")
        quarantined = self._quarantined(found, tenancy.tenant)
        if quarantined is not None:
            return refused(Reason.QUARANTINED, quarantined)
        if isinstance(found, Tombstone):
            return refused(found.reason, found.detail)
        if found.committed_at is None:
            return refused(Reason.PAYLOAD_NOT_READY, "the producer has not committed it yet")
        return Prefetched(state=PrefetchState.HERE)

    def _refusal(self, order: _Order, said: Foreign) -> Prefetched | None:
        """Return why a payload of another node is not brought over, or None, and then count its bytes."""
        quarantined = self._quarantined(said, order.tenancy.tenant)
        if quarantined is not None:
            return refused(Reason.QUARANTINED, quarantined)
        if said.descriptor is None:
            return refused(said.ended or Reason.PAYLOAD_NOT_READY, said.detail)
        problem = unfit(said.descriptor)
        if problem is not None:
            return refused(Reason.TRANSFER_FAILED, problem)
        nbytes = said.descriptor.canonical_bytes
        source = self._costs.sources.first(said.owner, said.holders, nbytes)
        seconds = self._costs.pull_seconds(source, nbytes)
        if order.within_seconds is not None and seconds > order.within_seconds:
            detail = f"the bytes would take {seconds:.3g} s, but are wanted within {order.within_seconds:.3g} s"
            return refused(Reason.TRANSFER_TIMEOUT, detail)
        under_way = sum(other.nbytes for other in self._orders.values() if other.tenancy is order.tenancy)
        if under_way + nbytes > self._limits.bytes_max:
            detail = f"{under_way} bytes are being prefetched, and {nbytes} more would exceed {self._limits.bytes_max}"
            return refused(Reason.MEMORY_EXHAUSTED, detail)
        order.nbytes = nbytes
        return None

    def _quarantined(self, found: Payload | Tombstone | Foreign, tenant: str) -> str | None:
        source = computed_by(found)
        if source is None:
            return None
        descriptor = None if isinstance(found, Tombstone) else found.descriptor
        aligner, derived_from = (None, ()) if descriptor is None else (descriptor.aligner, descriptor.derived_from)
        return self._quarantines.problem(tenant, found.reference, source, aligner, derived_from)

    def _crowded(self, client: Client) -> str | None:
        others = [order for order in self._orders.values() if order.counts and order.tenancy.tenant == client.tenant]
        if len(others) >= self._limits.count_max:
            return f"{len(others)} payloads are being prefetched, which is as many as may be at once"
        own = sum(order.client.client_id == client.client_id for order in others)
        if own >= self._limits.count_per_client_max:
            return f"this client prefetches {own} payloads, which is as many as one may at once"
        return None

    def _find(self, tenancy: Tenancy, key: str, generation: int = 0) -> Payload | Tombstone | None:
        with tenancy.ledger() as ledger:
            return ledger.find(now=self._clock(), key=key, generation=generation)


def prefetch_limits(config: BridgeConfig) -> PrefetchLimits:
    """Return the limits that are configured."""
    return PrefetchLimits(
        seconds_max=config.prefetch_seconds,
        count_max=config.prefetches_max,
        count_per_client_max=config.prefetches_per_client_max,
        bytes_max=config.prefetch_bytes_max,
    )


def refused(reason: Reason, detail: str) -> Prefetched:
    """Return that nothing is done, and why."""
    return Prefetched(state=PrefetchState.REFUSED, reason=reason, detail=detail)
