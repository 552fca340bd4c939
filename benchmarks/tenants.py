"""What tenants can learn of each other by a clock, and what the soft watermark saves a reservation.

    python -m benchmarks.tenants
    python -m benchmarks.tenants --json

Both run a node inside this process, without any protocol in between, so that what is measured is the node's own work.

1. A stranger asks for keys of another tenant and for keys of nobody in turn. The ratio of the two medians is that of a
   clock without any noise of a network.
2. A producer publishes payloads of mixed sizes, 16 KiB to 4 MiB, into an arena that is full of what nobody references,
   with the soft watermark and without it. What is timed is the reservation alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from benchmarks.gate_node import BYSTANDER_GEOMETRY, asked_spec, pair, publish, terms, token_ids
from benchmarks.timing import percentile
from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.wire import Seal

MIB = 1 << 20
OWNER, STRANGER = "owner", "stranger"
KEYS = 500
TOKENS = (16, 4096)
ARENA_BYTES = 256 * MIB
ACQUIRE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was measured; times in seconds."""

    acquire_of_another_tenants_median_seconds: float
    """Asking for what another tenant has."""
    acquire_of_nobodys_median_seconds: float
    """Asking for what nobody has."""
    acquire_ratio: float
    """The first over the second."""
    reserve_p50_seconds: float
    """Reserving below the soft watermark."""
    reserve_p99_seconds: float
    """The slowest of a hundred of them."""
    reserve_without_watermark_p50_seconds: float
    """Reserving where others have to be evicted first."""
    reserve_without_watermark_p99_seconds: float
    """The slowest of a hundred of them."""


def config(*, soft_watermark: float = 1.0) -> BridgeConfig:
    """Return the settings of a node that nobody can reach."""
    return BridgeConfig(
        arena_bytes=ARENA_BYTES,
        pretouch=False,
        huge_pages=False,
        unmeasured_tokens_min=1,
        memory_soft_watermark=soft_watermark,
    )


async def strangers(repetitions: int) -> tuple[float, float]:
    """Return the medians of asking for another tenant's keys and for nobody's."""
    bridge = Bridge(config(), tenants=(OWNER, STRANGER))
    await bridge.start()
    try:
        owner, stranger = bridge.sessions.open(OWNER), bridge.sessions.open(STRANGER)
        for number in range(KEYS):
            await publish(bridge, owner, _mixed(f"taken/{number}", 16), Verification.NONE)
        others: list[float] = []
        nobodys: list[float] = []
        for number in range(repetitions):
            asked = [("taken", others), ("empty", nobodys)]
            for prefix, seconds in asked if number % 2 else reversed(asked):
                seconds.append(await _acquire(bridge, stranger, f"{prefix}/{number % KEYS}"))
        return median(others), median(nobodys)
    finally:
        await bridge.close()


async def reservations(repetitions: int, *, soft_watermark: float) -> list[float]:
    """Return how long each reservation took."""
    bridge = Bridge(config(soft_watermark=soft_watermark), tenants=(OWNER,))
    await bridge.start()
    source = random.Random(1)
    taken: list[float] = []
    seal = Seal(
        valid_length=None, tokens=None, fallback=None, layer_digests=(), verification=Verification.NONE, hold=False
    )
    try:
        client = bridge.sessions.open(OWNER)
        for number in range(repetitions):
            spec = _mixed(f"k/{number}", source.randint(*TOKENS))
            started_at = time.perf_counter()
            grant = bridge.reserve(client, spec)
            taken.append(time.perf_counter() - started_at)
            await bridge.commit(client, grant.token, seal)
    finally:
        await bridge.close()
    return taken[repetitions // 4 :]  # Until then the arena was filling.


async def _acquire(bridge: Bridge, client: Client, key: str) -> float:
    asked = replace(terms(0, token_ids(600)), reference=PayloadReference(key=key, generation=0))
    started_at = time.perf_counter()
    acquisition = Acquisition(
        client=client, parts=(asked,), verification=Verification.NONE, deadline_seconds=ACQUIRE_SECONDS
    )
    await bridge.acquire(acquisition)
    return time.perf_counter() - started_at


def _mixed(key: str, tokens: int) -> PayloadSpec:
    return replace(
        asked_spec(0),
        key=key,
        model=pair(0).source,
        geometry=BYSTANDER_GEOMETRY,
        capacity_tokens=tokens,
        tokens=token_ids(tokens),
    )


def measure(repetitions: int) -> Report:
    """Measure everything."""
    others, nobodys = asyncio.run(strangers(repetitions))
    soft = asyncio.run(reservations(repetitions, soft_watermark=BridgeConfig().memory_soft_watermark))
    without = asyncio.run(reservations(repetitions, soft_watermark=1.0))
    return Report(
        acquire_of_another_tenants_median_seconds=others,
        acquire_of_nobodys_median_seconds=nobodys,
        acquire_ratio=others / nobodys,
        reserve_p50_seconds=median(soft),
        reserve_p99_seconds=percentile(soft, 99),
        reserve_without_watermark_p50_seconds=median(without),
        reserve_without_watermark_p99_seconds=percentile(without, 99),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tenants", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    figures = asdict(measure(options.repetitions))
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>46} {value:.3f}" if name.endswith("ratio") else f"{name:>46} {value * 1e6:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
