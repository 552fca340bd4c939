"""`python -m tests.sim.core_day`: 24 hours at a hundred handoffs a second through the core alone, 8.64 million of them.

`tests.sim.day` takes a whole node through its day, at a fraction of this speed. Here there is neither an event loop nor
an arena: the ledger, the gate, provenance with its quarantines, breakers and the journal, driven directly and with
their default limits, on a clock that goes 10 ms further with each handoff.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog import RoutePolicy
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms, Conditions, Question, Verdict, decide
from kvbridge.core.journal import HandoffRecord, PartRecord, RouteKey
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Committed, Grant, Ledger, LedgerLimits, Payload, PayloadEnded, Tombstone
from kvbridge.core.provenance import Provenance, ProvenanceLimits, Receipt
from kvbridge.core.quarantine import Quarantine, Quarantines
from kvbridge.node.breakers import Breakers
from kvbridge.node.journal import Journal
from kvbridge.node.parts import candidate_of
from tests.sim import content
from tests.sim.day import GEOMETRY, HOUR_SECONDS, TOKENS, Day, DayError, Look, private_resident_bytes, show

CLIENTS_DIE_EVERY, FORGETFUL_EVERY, WRONG_EVERY, HELD_EVERY, RECURRING_EVERY, QUARANTINE_EVERY = (
    500,
    50,
    25,
    10,
    5,
    6000,
)
"""One handoff of so many."""
_ARENA_BYTES = 64 << 20
_LINGER_SECONDS, _LEASE_SECONDS = 5.0, 1.0
_CLIENTS = 32


class _Core:
    """The core of one node with its default limits, and those who use it."""

    def __init__(self, per_second: float) -> None:
        self.now, self.day = 0.0, Day(per_second=per_second)
        self._step_seconds = 1 / per_second
        defaults = BridgeConfig()
        limits = LedgerLimits(
            tombstones_max=defaults.tombstones_max,
            linger_seconds_default=_LINGER_SECONDS,
            lease_ttl_seconds=defaults.lease_ttl_seconds,
            hold_ttl_seconds=defaults.lease_ttl_seconds,
            reservation_ttl_seconds=defaults.reservation_ttl_seconds,
        )
        tokens = itertools.count()
        self._ledger = Ledger(arena_bytes=_ARENA_BYTES, limits=limits, new_token=lambda: f"token-{next(tokens)}")
        provenance = ProvenanceLimits(
            seconds=defaults.provenance_seconds,
            payloads_max=defaults.provenance_payloads_max,
            handoffs_max=defaults.provenance_handoffs_max,
        )
        self._quarantines = Quarantines(Provenance(provenance), quarantines_max=defaults.quarantines_max)
        self._breakers, self._journal = Breakers(defaults.breakers_max), Journal(defaults.journal_records_max)
        self._route = RouteKey(route="default", source=content.MODEL, target=content.MODEL, edge="")
        self._conditions = Conditions(policy=RoutePolicy(tokens_min_unmeasured=1))
        self._slot_bytes = slot_layout(GEOMETRY, TOKENS).slot_bytes
        self._tokens, self._text = content.tokens("day", TOKENS), FallbackText(text="what a consumer reads instead")
        self._due: deque[tuple[float, str, str]] = deque()
        self._imposed = ""

    def hand_over(self, number: int) -> None:
        """Publish, decide, lease, remember, and give back what is due."""
        ledger, counts, now = self._ledger, self.day.counts, self.now
        key = f"recurring/{number // RECURRING_EVERY % 64}" if number % RECURRING_EVERY == 0 else f"handoff/{number}"
        committed = self._publish(f"producer-{number % _CLIENTS}", key, number)
        found = ledger.find(now=now, key=key)
        verdict = self._decided(found, key, number)
        consumer = f"consumer-{number % _CLIENTS}"
        grant = None
        if verdict.failure is None:
            assert isinstance(found, Payload), found
            grant = ledger.lease(now=now, client_id=consumer, attached=number % 2 == 0, payload_id=found.payload_id)
            if committed is None or grant.reference != committed.descriptor.reference:
                raise DayError(f"{key} gave {grant}")
        counts["LEASED" if verdict.failure is None else str(verdict.failure.reason)] += 1
        self._remember(number, consumer, found, verdict, grant)
        if grant is not None and number % FORGETFUL_EVERY:
            self._due.append((now + _LEASE_SECONDS, consumer, grant.token))
        self._carry_out(number)

    def _publish(self, producer: str, key: str, number: int) -> Committed | None:
        ledger, now = self._ledger, self.now
        spec = PayloadSpec(
            key=key,
            model=content.MODEL,
            geometry=GEOMETRY,
            capacity_tokens=TOKENS,
            tokens=self._tokens,
            fallback=self._text,
        )
        grant = ledger.reserve(
            now=now, client_id=producer, attached=number % 2 == 1, spec=spec, slot_bytes=self._slot_bytes
        )
        self._quarantines.enter(reference=grant.reference, model=spec.model, aligner=None, derived_from=())
        if number % FORGETFUL_EVERY == 1:
            self.day.counts["forgotten"] += 1
            return None
        ledger.begin_commit(
            now=now,
            client_id=producer,
            token=grant.token,
            valid_length=None,
            tokens=None,
            fallback=None,
            layer_digests=(),
            verification=Verification.NONE,
        )
        outcome = ledger.finish_commit(
            now=now, payload_id=grant.payload_id, layer_digests=(), failure=None, hold=number % HELD_EVERY == 0
        )
        if not isinstance(outcome, Committed):
            raise DayError(f"{outcome}")
        if outcome.hold is not None and number % FORGETFUL_EVERY:
            self._due.append((now + _LEASE_SECONDS, producer, outcome.hold.token))
        return outcome

    def _decided(self, found: Payload | Tombstone | None, key: str, number: int) -> Verdict:
        """Ask the whole gate."""
        terms = AcquireTerms(
            reference=PayloadReference(key=key, generation=0),
            model=content.OTHER_MODEL if number % WRONG_EVERY == 2 else content.MODEL,
            tokens=self._tokens,
        )
        self._breakers.admit(self._route, self._conditions.policy.breaker, now=self.now)
        quarantine = None
        if found is not None:
            quarantine = self._quarantines.problem(found.reference, content.MODEL, None, ())
        candidate = candidate_of(found, quarantine=quarantine, node_draining=False)
        return decide(Question(terms=terms, candidate=candidate, conditions=self._conditions))

    def _remember(
        self, number: int, consumer: str, found: Payload | Tombstone | None, verdict: Verdict, grant: Grant | None
    ) -> None:
        handoff_id = f"{number:032x}"
        part = PartRecord(
            reference=PayloadReference(key="", generation=0) if found is None else found.reference,
            verdict=verdict,
            leased=grant is not None,
            route=self._route,
            route_mode=self._conditions.policy.mode,
        )
        record = HandoffRecord(
            handoff_id=handoff_id,
            at=self.now,
            tenant="default",
            client_id=consumer,
            model=content.MODEL,
            edge="",
            depth=0,
            seconds=0.0,
            deadline_seconds=None,
            parts=(part,),
        )
        self._breakers.note(part, now=self.now)
        self._journal.add(record)
        if grant is not None:
            receipt = Receipt(client_id=consumer, handoff_id=handoff_id, lease_token=grant.token, at=self.now)
            self._quarantines.provenance.receive(grant.reference, receipt)

    def _carry_out(self, number: int) -> None:
        """Let the time pass: references come back, clients end, quarantines come and go."""
        self.now += self._step_seconds
        while self._due and self._due[0][0] <= self.now:
            _, client, token = self._due.popleft()
            if token in self._ledger.release(now=self.now, client_id=client, tokens=[token]):
                raise DayError(f"{token} ended before its time")
        if number % CLIENTS_DIE_EVERY == 0:
            self.end_clients()
        if number % QUARANTINE_EVERY == 0:
            self._poison(number)
        if number % 10 == 0:
            self._ledger.advance(now=self.now, events_max=512)
            self._quarantines.provenance.advance(now=self.now, is_live=self._is_live)
        self._take_effects()

    def end_clients(self) -> None:
        """Let every client die; others of the same names come at once."""
        self._due.clear()
        for number in range(_CLIENTS):
            for name in ("producer", "consumer"):
                self.day.counts["deaths"] += 1
                self._ledger.end_client(now=self.now, client_id=f"{name}-{number}")

    def _poison(self, number: int) -> None:
        """Lift the last quarantine and impose one on what was just published."""
        self._quarantines.lift(self._imposed)
        self._imposed = f"quarantine-{number}"
        target = PayloadReference(key=f"handoff/{number + 2}", generation=1)
        self._quarantines.impose(Quarantine(quarantine_id=self._imposed, target=target, why="a drill", since=self.now))
        self.day.counts["quarantines"] += 1

    def _is_live(self, receipt: Receipt) -> bool:
        left = self._ledger.lease_seconds_left(now=self.now, client_id=receipt.client_id, token=receipt.lease_token)
        return left is not None

    def _take_effects(self) -> None:
        for effect in self._ledger.take_effects():
            if isinstance(effect, PayloadEnded):
                self._quarantines.provenance.end(effect.reference, now=self.now)

    def leave(self) -> None:
        """Let everybody go, and see what is left."""
        self.end_clients()
        for _ in range(1000):
            self.now += _LINGER_SECONDS
            self._ledger.advance(now=self.now, events_max=512)
            self._take_effects()
        usage = self._ledger.usage()
        self.day.leaked_bytes = usage.arena_bytes - usage.free_bytes

    def look(self, hours: float, handoffs: int, started_at: float) -> Look:
        """Return how things stand."""
        gc.collect()
        return Look(
            hours=hours,
            handoffs=handoffs,
            wall_seconds=time.monotonic() - started_at,
            private_bytes=private_resident_bytes(os.getpid()),
            objects=len(gc.get_objects()),
            traced_bytes=0,
            payloads=self._ledger.usage().payloads,
        )


def live_a_day(*, hours: int, per_second: float) -> Day:
    """Run the core for so long.

    Raises:
        DayError: something was wrong that must not be.
    """
    core, started_at, per_hour = _Core(per_second), time.monotonic(), int(HOUR_SECONDS * per_second)
    for hour in range(hours):
        for number in range(hour * per_hour, (hour + 1) * per_hour):
            core.hand_over(number)
        core.day.looks.append(core.look(hour + 1, (hour + 1) * per_hour, started_at))
        show(core.day.looks[-1])
    core.leave()
    return core.day


def main(arguments: Sequence[str] | None = None) -> int:
    """Live the day and say what it was like; 1 if memory was not flat, or anything was left."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.core_day", description=__doc__)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--per-second", type=float, default=100.0)
    parser.add_argument("--growth-max", type=float, default=1.01, help="the last hour's memory over the third one's")
    asked = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(700, 10, 500)  # As a node has it, which collects the oldest generation rarely.
    day = live_a_day(hours=asked.hours, per_second=asked.per_second)
    told = {"growth": day.growth(), "leaked_bytes": day.leaked_bytes, "counts": dict(day.counts.most_common())}
    print(json.dumps(told, indent=2))  # noqa: T201 - people read it
    return int(day.growth() > asked.growth_max or day.leaked_bytes > 0)


if __name__ == "__main__":
    sys.exit(main())
