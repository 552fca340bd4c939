"""How an arena breaks into pieces under mixed sizes: ten minutes of a node's life, replayed on a clock that jumps.

    python -m tests.sim.fragmentation --arena-gib 4 --seeds 20

Payloads of 1 to 512 MiB, evenly spread over the logarithm, come five times a second. Each is referenced for a time
that is short (1 to 10 s, six in ten), middling (20 to 90 s) or long (2 to 10 minutes, one in ten), and lingers behind
that. One that would take the referenced bytes over the *load* is left out, so that whatever the ledger refuses, it
refuses although enough bytes are free or evictable in all. Ledger and allocator are the real ones; no byte is touched.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import Verification
from kvbridge.core.errors import MemoryExhaustedError
from kvbridge.core.ledger import Committed, Grant, Ledger, LedgerLimits, Payload, PayloadState
from tests import builders

MIB = 1 << 20
GIB = 1 << 30
SIZE_BYTES_MAX = 512 * MIB
SECONDS = 600.0
WARM_SECONDS = 60.0
"""Before this the arena is filling, and nothing is counted."""
LOADS = (0.6, 0.7, 0.8, 0.9, 0.95)
ARRIVALS_PER_SECOND = 5.0
_DEFAULTS = BridgeConfig()
_CLIENT = "producer"
_FOREVER_SECONDS = 6e5
_VICTIMS_PER_TURN = 512
_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What comes, and what it meets."""

    seed: int
    """Decides sizes and times."""
    load: float
    """Share of the arena that is referenced at most."""
    arena_bytes: int = 4 * GIB
    """Size of the arena."""
    soft_watermark: float = _DEFAULTS.memory_soft_watermark
    """As for the ledger; 1 for none."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a trace, or of several together."""

    asked: int = 0
    """Slots that were asked for."""
    asked_bytes: int = 0
    """Their bytes."""
    refused: int = 0
    """Slots that were refused although enough bytes were there in all."""
    refused_bytes: int = 0
    """Their bytes."""
    evicting: int = 0
    """Slots for which somebody had to be evicted on the spot."""
    wasted_bytes: int = 0
    """Bytes that slots had more than was asked for."""
    fragmentation_worst: float = 0.0
    """Greatest of all looks: the share of what is free or evictable that is not in the longest piece of it."""
    fragmentation_sum: float = 0.0
    """Sum over all looks."""
    looks: int = 0
    """How often that was looked at: once a second."""

    def add(self, other: Outcome) -> None:
        """Join what became of another trace."""
        self.fragmentation_worst = max(self.fragmentation_worst, other.fragmentation_worst)
        for name in ("asked", "asked_bytes", "refused", "refused_bytes", "evicting", "wasted_bytes", "looks"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fragmentation_sum += other.fragmentation_sum

    @property
    def refused_share(self) -> float:
        """Return the share of slots that were refused."""
        return self.refused / self.asked

    def line(self) -> str:
        """Return the figures for people."""
        return (
            f"{self.asked:>7} asked, refused {self.refused_share:8.4%} of slots and "
            f"{self.refused_bytes / self.asked_bytes:8.4%} of bytes, evicting {self.evicting / self.asked:7.2%}, "
            f"external worst {self.fragmentation_worst:.3f} mean {self.fragmentation_sum / self.looks:.3f}, "
            f"internal {self.wasted_bytes / self.asked_bytes:.4%}"
        )


class Replay:
    """One trace under way."""

    def __init__(self, trace: Trace) -> None:
        """Begin with an empty arena."""
        tokens = count()
        limits = LedgerLimits(
            hold_ttl_seconds=_FOREVER_SECONDS,
            ttl_seconds_default=_FOREVER_SECONDS,
            linger_seconds_default=_DEFAULTS.linger_seconds,
            memory_soft_watermark=trace.soft_watermark,
        )
        self._trace = trace
        self._random = random.Random(f"{trace.seed} {trace.load} {trace.arena_bytes}")
        self._ledger = Ledger(arena_bytes=trace.arena_bytes, limits=limits, new_token=lambda: str(next(tokens)))
        self._ends: list[tuple[float, str, int]] = []
        self._held_bytes = 0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Replay all of it."""
        now, look_at = 0.0, WARM_SECONDS
        while now < SECONDS:
            now += self._random.expovariate(ARRIVALS_PER_SECOND)
            self._let_go(now)
            self._arrive(now, _size(self._random), now + _lifetime(self._random))
            self._keep_house(now)
            if now >= look_at:
                look_at += 1.0
                self._look()
        return self._outcome

    def _let_go(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            ended_at, token, length = heapq.heappop(self._ends)
            self._ledger.release(now=ended_at, client_id=_CLIENT, tokens=[token])
            self._held_bytes -= length
        self._keep_house(now)

    def _keep_house(self, now: float) -> None:
        while self._ledger.relieve(now=now, events_max=_VICTIMS_PER_TURN):
            pass
        self._ledger.take_effects()

    def _arrive(self, now: float, size_bytes: int, ends_at: float) -> None:
        if self._held_bytes + size_bytes > self._trace.load * self._trace.arena_bytes:
            return
        payloads = self._ledger.usage().payloads
        grant = self._reserve(now, size_bytes)
        if now >= WARM_SECONDS:
            self._count(size_bytes, grant, evicted=grant is not None and self._ledger.usage().payloads <= payloads)
        if grant is not None:
            heapq.heappush(self._ends, (ends_at, self._commit(now, grant), grant.slot.length_bytes))
            self._held_bytes += grant.slot.length_bytes

    def _count(self, size_bytes: int, grant: Grant | None, *, evicted: bool) -> None:
        outcome = self._outcome
        outcome.asked += 1
        outcome.asked_bytes += size_bytes
        outcome.evicting += evicted
        if grant is None:
            outcome.refused += 1
            outcome.refused_bytes += size_bytes
        else:
            outcome.wasted_bytes += grant.slot.length_bytes - size_bytes

    def _reserve(self, now: float, size_bytes: int) -> Grant | None:
        spec = builders.spec(key="k")
        try:
            return self._ledger.reserve(now=now, client_id=_CLIENT, attached=True, spec=spec, slot_bytes=size_bytes)
        except MemoryExhaustedError:
            return None

    def _commit(self, now: float, grant: Grant) -> str:
        """Commit the payload and return the token of its hold."""
        sealed = self._ledger.begin_commit(
            now=now,
            client_id=_CLIENT,
            token=grant.token,
            valid_length=None,
            tokens=None,
            fallback=None,
            layer_digests=(),
            verification=Verification.NONE,
        )
        committed = self._ledger.finish_commit(
            now=now, payload_id=sealed.payload_id, layer_digests=(), failure=None, hold=True
        )
        assert isinstance(committed, Committed)
        assert committed.hold is not None
        return committed.hold.token

    def _look(self) -> None:
        """Measure how what is free or evictable is cut up by what is not."""
        kept = sorted(
            (payload.slot.offset_bytes, payload.slot.end_bytes) for payload in self._payloads() if _kept(payload)
        )
        starts = [0, *(end for _, end in kept)]
        ends = [*(start for start, _ in kept), self._trace.arena_bytes]
        gaps = [end - start for start, end in zip(starts, ends, strict=True)]
        fragmentation = 1 - max(gaps) / sum(gaps)
        self._outcome.fragmentation_worst = max(self._outcome.fragmentation_worst, fragmentation)
        self._outcome.fragmentation_sum += fragmentation
        self._outcome.looks += 1

    def _payloads(self) -> list[Payload]:
        payloads: list[Payload] = []
        cursor: int | None = None
        while True:
            page = self._ledger.payloads(page_size=_PAGE_SIZE, cursor=cursor)
            payloads += page.payloads
            cursor = page.next_cursor
            if cursor is None:
                return payloads


def _kept(payload: Payload) -> bool:
    return payload.state is not PayloadState.COMMITTED or payload.holds > 0


def _size(source: random.Random) -> int:
    return int(math.exp(source.uniform(math.log(MIB), math.log(SIZE_BYTES_MAX))))


def _lifetime(source: random.Random) -> float:
    kind = source.random()
    if kind < 0.6:
        return source.uniform(1.0, 10.0)
    return source.uniform(20.0, 90.0) if kind < 0.9 else source.uniform(120.0, 600.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay every load with and without the soft watermark, and print one line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arena-gib", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    for watermark in (_DEFAULTS.memory_soft_watermark, 1.0):
        for load in LOADS:
            together, shares = Outcome(), []
            for seed in range(options.seeds):
                trace = Trace(seed=seed, load=load, arena_bytes=options.arena_gib * GIB, soft_watermark=watermark)
                outcome = Replay(trace).run()
                together.add(outcome)
                shares.append(outcome.refused_share)
            print(f"soft {watermark:.2f} load {load:.2f}: worst seed {max(shares):.4%}; {together.line()}", flush=True)  # noqa: T201 - the result
    return 0


if __name__ == "__main__":
    sys.exit(main())
