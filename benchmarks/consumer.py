"""The consumer: a process of its own that acquires what the producer has published."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

import kvbridge
from benchmarks.baselines import memcpy
from benchmarks.timing import Pairs, interleave
from benchmarks.workload import LAYERS, MODEL, Tensors, token_ids, warm_tensors

ACQUIRE_SECONDS_MAX = 30.0
POPULATE_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
_POPULATE_THREAD = "kvbridge-populate"


class Consumer:
    """The consumer's process as the producer sees it: each method waits for the process to answer."""

    def __init__(self, connection: Connection, pid: int) -> None:
        """Speak to the process `pid` over `connection`."""
        self._connection = connection
        self.pid = pid

    def settle(self, key: str, size_bytes: int) -> None:
        """Map the arena by a first acquire of `key`, and wait until its pages are mapped."""
        self._ask("settle", key, size_bytes)

    def acquire(self, key: str, size_bytes: int, repetitions: int) -> list[float]:
        """Return the seconds from each acquire to a usable view of the first layer."""
        return cast("list[float]", self._ask("acquire", key, size_bytes, repetitions))

    def read(self, key: str, size_bytes: int, repetitions: int) -> Pairs:
        """Return the time of copying every layer out of the views, beside a memcpy of as many bytes."""
        return cast("Pairs", self._ask("read", key, size_bytes, repetitions))

    def take(self, key: str, size_bytes: int) -> None:
        """Acquire, look at every layer, and release."""
        self._ask("take", key, size_bytes)

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        answer, error = self._connection.recv()
        if error is not None:
            raise RuntimeError(f"the consumer failed: {error}")
        return answer


@contextmanager
def running_consumer(target: str) -> Iterator[Consumer]:
    """Run a consumer of the bridge at `target` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(target, there))
    process.start()
    there.close()
    try:
        assert process.pid is not None
        yield Consumer(here, process.pid)
    finally:
        here.close()
        process.join(STOP_SECONDS_MAX)
        process.kill()


def wait_populated() -> None:
    """Wait until the client library of this process has mapped all pages of its arenas."""
    ends_at = time.monotonic() + POPULATE_SECONDS_MAX
    for thread in threading.enumerate():
        if thread.name == _POPULATE_THREAD:
            thread.join(max(ends_at - time.monotonic(), 0.0))


class _Worker:
    """What the consumer's process does."""

    def __init__(self, bridge: kvbridge.Bridge) -> None:
        self._bridge = bridge

    def settle(self, key: str, size_bytes: int) -> None:
        self.take(key, size_bytes)
        wait_populated()

    def acquire(self, key: str, size_bytes: int, repetitions: int) -> list[float]:
        ids = token_ids(size_bytes)
        return [self._seconds_to_view(key, ids) for _ in range(repetitions)]

    def read(self, key: str, size_bytes: int, repetitions: int) -> Pairs:
        source = warm_tensors(size_bytes, seed=2)
        target = warm_tensors(size_bytes, seed=3)
        with self._acquired(key, token_ids(size_bytes)) as handoff:
            works = {"read": lambda: _seconds_to_copy(handoff, target)}
            return interleave(memcpy(source.buffer, target.buffer), works, repetitions=repetitions)["read"]

    def take(self, key: str, size_bytes: int) -> None:
        with self._acquired(key, token_ids(size_bytes)) as handoff:
            for layer in range(LAYERS):
                handoff.layer(layer)

    def _seconds_to_view(self, key: str, ids: list[int]) -> float:
        started_at = time.perf_counter()
        handoff = self._bridge.acquire(key, model=MODEL, tokens=ids, timeout=ACQUIRE_SECONDS_MAX)
        view = handoff.layer(0)
        seconds = time.perf_counter() - started_at
        del view
        handoff.release()
        return seconds

    @contextmanager
    def _acquired(self, key: str, ids: list[int]) -> Iterator[kvbridge.Handoff]:
        handoff = self._bridge.acquire(key, model=MODEL, tokens=ids, timeout=ACQUIRE_SECONDS_MAX)
        try:
            yield handoff
        finally:
            handoff.release()


def _seconds_to_copy(handoff: kvbridge.Handoff, target: Tensors) -> float:
    started_at = time.perf_counter()
    for layer, (key_target, value_target) in enumerate(target.layers):
        key_view, value_view = handoff.layer(layer)
        key_target.copy_(key_view)
        value_target.copy_(value_view)
    if not handoff.still_valid():
        raise RuntimeError("the lease was lost while the cache was read")
    return time.perf_counter() - started_at


def _run(target: str, connection: Connection) -> None:
    """Answer until the other side closes the connection."""
    torch.set_num_threads(1)
    with kvbridge.connect(target) as bridge:
        worker = _Worker(bridge)
        while True:
            try:
                method, arguments = connection.recv()
            except EOFError:
                return
            connection.send(_answer(worker, method, arguments))


def _answer(worker: _Worker, method: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return getattr(worker, method)(*arguments), None
    except Exception as error:  # noqa: BLE001 - the producer reports it, whatever it is
        return None, f"{type(error).__name__}: {error} (process {os.getpid()})"
