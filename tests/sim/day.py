"""`python -m tests.sim.day`: a node through 24 hours of handoffs, in virtual time, with its memory at every hour.

1. The node is a real bridge with its asynchronous shell, on a virtual clock and over a real arena; there is no gRPC and
   there are no threads. Repeated requests go through the server's own memory of answers.
2. Workers publish, acquire, read, report and release without a pause, a hundred handoffs a second by default. Some are
   refused, some references are forgotten, clients die and come again, requests are repeated, and things are put into
   quarantine.
3. Everything that the node remembers has its default limit. All are full before the second hour is over; a full hash
   table whose entries come and go is still replaced by a new one now and then, and the first times move memory by its
   size. From the third hour on memory must be flat.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.geometry import CacheGeometry, DimensionOrder, Dtype, LayerGroup, PositionEncoding, PositionKind
from kvbridge.core.handoff_reference import lineage
from kvbridge.core.journal import HandoffUse, Outcome
from kvbridge.core.layout import HEADER_BYTES, slot_layout
from kvbridge.core.ledger import Committed
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, HandoffAnswer, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.reports import Measured, Report
from kvbridge.server.answers import Answers
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import Seal
from tests.sim import content
from tests.sim.loop import SimulatedLoop, virtual_surroundings

HOUR_SECONDS = 3600.0
SETTLED_HOUR = 3
"""From this hour on memory must not grow."""
GEOMETRY = CacheGeometry(
    groups=(
        LayerGroup(
            layers=(0,),
            kv_heads=1,
            head_dim_k=64,
            head_dim_v=64,
            dtype=Dtype.FLOAT32,
            order=DimensionOrder.NHD,
            position_encoding=PositionEncoding(kind=PositionKind.NONE),
        ),
    )
)
TOKENS = 16
"""Fills a page for K and one for V."""
_STAMP_BYTES = 8
_REMEMBERED_KEYS = 64
_DOOMED_SHARE, _FORGETFUL_SHARE, _WRONG_SHARE, _DIGESTED_SHARE = 0.002, 0.02, 0.04, 0.05
_REPEATED_SHARE, _REPORTED_SHARE, _HELD_SHARE, _RECURRING_SHARE = 0.05, 0.1, 0.1, 0.2
_QUARANTINE_SECONDS = 30.0
_LINGER_SECONDS = 5.0


class DayError(AssertionError):
    """Something was wrong that must not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The node at the end of one hour."""

    hours: float
    """Simulated time since the start."""
    handoffs: int
    """Acquires that were answered."""
    wall_seconds: float
    """Real time since the start."""
    private_bytes: int
    """Resident memory of the process but for the arena."""
    objects: int
    """Objects that the garbage collector knows."""
    traced_bytes: int
    """What tracemalloc counts; 0 if it does not run."""
    payloads: int
    """Payloads that occupy memory."""


@dataclass(slots=True, kw_only=True)
class Day:
    """What a day was like."""

    per_second: float
    """Handoffs that begin in each second."""
    looks: list[Look] = field(default_factory=list)
    """One for each hour."""
    counts: Counter[str] = field(default_factory=Counter)
    """Answers by reason, and other things that happened."""
    leaked_bytes: int = 0
    """Bytes of the arena that are not free after everybody has gone."""

    def growth(self, since_hour: int = SETTLED_HOUR) -> float:
        """Return the private memory of the last hour over that of an earlier one."""
        return self.looks[-1].private_bytes / self.looks[min(since_hour, len(self.looks)) - 1].private_bytes


class _Town:
    """The node and everybody who uses it."""

    def __init__(self, loop: SimulatedLoop, *, hours: float, per_second: float, tracing: bool) -> None:
        self.loop, self.chance = loop, random.Random("the day")
        self.day = Day(per_second=per_second)
        self.bridge = Bridge(
            BridgeConfig(
                node_id="day",
                arena_bytes=64 << 20,
                pretouch=False,
                huge_pages=False,
                unmeasured_tokens_min=1,
                linger_seconds=_LINGER_SECONDS,
                listen="",
                metrics_listen="",
            ),
            clock=loop.time,
        )
        config = self.bridge.config
        self.answers = Answers(config.answers_remembered_max, config.answer_bytes_remembered_max)
        self._hours, self._tracing = hours, tracing
        self._started_at = time.monotonic()
        self._slot_bytes = slot_layout(GEOMETRY, TOKENS).slot_bytes
        self._keys = [f"recurring/{number}" for number in range(_REMEMBERED_KEYS)]
        self._tokens = content.tokens("day", TOKENS)
        self._count = 0

    async def live(self) -> Day:
        """Let all workers work, look at the node at every hour, and see what is left at the end."""
        await self.bridge.start()
        workers_count = max(int(self.day.per_second), 1)
        period = workers_count / self.day.per_second
        workers = [self.loop.create_task(self._work(number, period)) for number in range(workers_count)]
        poison = self.loop.create_task(self._poison())
        for hour in range(1, int(self._hours) + 1):
            ends_at = hour * HOUR_SECONDS
            while self.loop.time() < ends_at:
                await asyncio.sleep(min(60.0, ends_at - self.loop.time()))
                for task in (*workers, poison):
                    if task.done():
                        task.result()
            self.day.looks.append(self._look(hour))
            show(self.day.looks[-1])
        for task in (*workers, poison):
            task.cancel()
        await asyncio.gather(*workers, poison, return_exceptions=True)
        await asyncio.sleep(self.bridge.config.reservation_ttl_seconds + 2 * _LINGER_SECONDS)
        usage = self.bridge.stock.usages()[0]
        self.day.leaked_bytes = usage.arena_bytes - usage.free_bytes
        await self.bridge.close()
        return self.day

    # Workers

    async def _work(self, number: int, period: float) -> None:
        draw = self.chance
        producer, consumer = self._arrive(number), self._arrive(number + 1)
        try:
            await asyncio.sleep(number * period / self.day.per_second)
            while True:
                begun_at = self.loop.time()
                await self._hand_over(producer, consumer)
                if draw.random() < _DOOMED_SHARE:
                    self._die(producer)
                    self._die(consumer)
                    producer, consumer = self._arrive(number), self._arrive(number + 1)
                await asyncio.sleep(max(begun_at + period - self.loop.time(), 0.0))
        finally:
            self._die(producer)
            self._die(consumer)

    def _arrive(self, number: int) -> Client:
        """Two of three clients are attached."""
        if number % 3:
            return self.bridge.sessions.open(DEFAULT_TENANT)
        self._count += 1
        return Client(client_id=f"client-{self._count:012d}", tenant=DEFAULT_TENANT, attached=False)

    def _die(self, client: Client) -> None:
        self.day.counts["deaths"] += 1
        if self.bridge.sessions.close(client.client_id) is not None:
            self.bridge.end_client(client)

    async def _hand_over(self, producer: Client, consumer: Client) -> None:
        draw = self.chance
        self._count += 1
        stamp = self._count
        key = draw.choice(self._keys) if draw.random() < _RECURRING_SHARE else f"handoff/{stamp}"
        committed = await self._publish(producer, key, stamp)
        await asyncio.sleep(draw.random() * 0.1)
        if committed is None:
            return
        wrong = draw.random() < _WRONG_SHARE
        terms = AcquireTerms(
            reference=committed.descriptor.reference,
            model=content.OTHER_MODEL if wrong else content.MODEL,
            tokens=self._tokens,
        )
        answer = await self._acquire(consumer, terms)
        await asyncio.sleep(draw.random() * 0.5)
        self._finish(consumer, answer, stamp)
        if committed.hold is not None and draw.random() >= _FORGETFUL_SHARE:
            self.bridge.release(producer, [committed.hold.token])

    async def _publish(self, producer: Client, key: str, stamp: int) -> Committed | None:
        draw = self.chance
        spec = PayloadSpec(
            key=key,
            model=content.MODEL,
            geometry=GEOMETRY,
            capacity_tokens=TOKENS,
            tokens=self._tokens,
            fallback=FallbackText(text=f"the text of {key}"),
        )
        grant = self.bridge.reserve_for_stream(producer, spec)
        if draw.random() < _FORGETFUL_SHARE:
            self.day.counts["forgotten"] += 1
            if producer.attached:
                return None  # Its time to live ends it.
            self.bridge.abort(producer, grant.token)
            return None
        slot = self.bridge.slot_of(producer, grant)
        slot[HEADER_BYTES : HEADER_BYTES + _STAMP_BYTES] = stamp.to_bytes(_STAMP_BYTES, "little")
        digested = draw.random() < _DIGESTED_SHARE
        seal = Seal(
            verification=Verification.DIGEST if digested else Verification.NONE, hold=draw.random() < _HELD_SHARE
        )
        outcome = await self.bridge.commit(producer, grant.token, seal)
        if isinstance(outcome, Committed):
            return outcome
        self.day.counts[f"rejected {outcome.reason}"] += 1
        return None

    async def _acquire(self, consumer: Client, terms: AcquireTerms) -> HandoffAnswer:
        draw = self.chance
        request = pb.AcquireRequest(request_id=str(draw.getrandbits(64)))

        async def work() -> HandoffAnswer:
            asked = Acquisition(
                client=consumer,
                parts=(terms,),
                verification=Verification.NONE,
                deadline_seconds=5.0,
                arrived_at=self.loop.time(),
            )
            return await self.bridge.acquire(asked)

        answer = await self.answers.once(consumer, request.request_id, request, work)
        self.day.counts["handoffs"] += 1
        if draw.random() < _REPEATED_SHARE:
            self.day.counts["repeated"] += 1
            again = await self.answers.once(consumer, request.request_id, request, work)
            if again is not answer:
                raise DayError(f"a repeated request was answered anew: {again}")
        return answer

    def _finish(self, consumer: Client, answer: HandoffAnswer, stamp: int) -> None:
        """Read what was leased and give it back, or forget it."""
        draw = self.chance
        [part] = answer.parts
        if isinstance(part, Fallback):
            self.day.counts[str(part.finding.reason)] += 1
            if part.fallback.text is None:
                raise DayError(f"a refusal without its text: {part}")
        else:
            self._read(consumer, part, stamp)
            if draw.random() >= _FORGETFUL_SHARE:
                self.bridge.release(consumer, [part.grant.token])
        if draw.random() < _REPORTED_SHARE:
            prefill = Measured(size=draw.randrange(1, 4096), seconds=draw.random() + 1e-3)
            said = Report(handoff_id=answer.handoff_id, outcome=Outcome(use=HandoffUse.USED), prefill=prefill)
            self.bridge.reports.take(consumer, said)

    def _read(self, consumer: Client, part: Leased, stamp: int) -> None:
        self.day.counts["LEASED"] += 1
        slot = self.bridge.slot_of(consumer, part.grant)
        found = int.from_bytes(slot[HEADER_BYTES : HEADER_BYTES + _STAMP_BYTES], "little")
        if found != stamp:
            raise DayError(f"{part.grant.reference} holds {found}, not {stamp}")

    async def _poison(self) -> None:
        """Put something into quarantine now and then, and lift it a while later."""
        keeper = self.bridge.containment.quarantines
        operator = Client(client_id="operator-000000000000", tenant=DEFAULT_TENANT, attached=False)
        while True:
            target = PayloadReference(key=f"handoff/{self._count}", generation=1)
            imposed = await keeper.quarantine(operator, lineage(target), why="a drill", dry_run=False)
            self.day.counts["quarantines"] += 1
            await asyncio.sleep(_QUARANTINE_SECONDS)
            await keeper.unquarantine(operator, imposed.quarantine_id)

    # Looking

    def _look(self, hour: int) -> Look:
        gc.collect()
        return Look(
            hours=hour,
            handoffs=self.day.counts["handoffs"],
            wall_seconds=time.monotonic() - self._started_at,
            private_bytes=private_resident_bytes(os.getpid()),
            objects=len(gc.get_objects()),
            traced_bytes=tracemalloc.get_traced_memory()[0] if self._tracing else 0,
            payloads=self.bridge.stock.usages()[0].payloads,
        )


def private_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process without memory that it shares, such as an arena."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kibibytes = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssShmem")}
    return (kibibytes["VmRSS"] - kibibytes["RssShmem"]) * 1024


def live_a_day(*, hours: float, per_second: float, tracing: bool = False) -> Day:
    """Run a node for so long.

    Raises:
        DayError: something was wrong that must not be.
    """
    loop = SimulatedLoop("the day", steps_max=sys.maxsize)
    if tracing:
        tracemalloc.start()
    with virtual_surroundings(loop, "the day"):
        try:
            return loop.run_until_complete(_Town(loop, hours=hours, per_second=per_second, tracing=tracing).live())
        finally:
            loop.close()
            tracemalloc.stop()


def show(look: Look) -> None:
    """Print one line."""
    print(json.dumps(asdict(look)), flush=True)  # noqa: T201 - people read it


def main(arguments: Sequence[str] | None = None) -> int:
    """Live the day and say what it was like; 1 if memory was not flat, or anything was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.day", description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--per-second", type=float, default=100.0)
    parser.add_argument("--growth-max", type=float, default=1.01, help="the last hour's memory over the third one's")
    parser.add_argument("--trace", action="store_true", help="count with tracemalloc, too, which takes far longer")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    day = live_a_day(hours=asked.hours, per_second=asked.per_second, tracing=asked.trace)
    told = {"growth": day.growth(), "leaked_bytes": day.leaked_bytes, "counts": dict(day.counts.most_common())}
    print(json.dumps(told, indent=2))  # noqa: T201 - people read it
    return int(day.growth() > asked.growth_max or day.leaked_bytes > 0)


if __name__ == "__main__":
    sys.exit(main())
