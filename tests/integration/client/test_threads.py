"""Many threads, one bridge object."""

from __future__ import annotations

import gc
import random
import threading

from kvbridge import Bridge
from tests.harness import wait_for
from tests.integration.client.kv import MODEL, SHAPE, Contents

THREADS = 8
ROUNDS = 25
KEYS = 5


class Actor:
    """One thread's random walk over shared payloads."""

    def __init__(self, bridge: Bridge, contents: list[Contents], seed: int) -> None:
        self.errors: list[BaseException] = []
        self._bridge, self._contents = bridge, contents
        self._draw = random.Random(seed)
        self._kept: list[object] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            for _ in range(ROUNDS):
                self._step()
        except BaseException as error:  # noqa: BLE001 - any at all is the finding
            self.errors.append(error)

    def _step(self) -> None:
        index = self._draw.randrange(KEYS)
        payload, key = self._contents[index], f"hammer/{index}"
        if self._draw.random() < 0.3:
            assert payload.publish(self._bridge, key, hold=self._draw.random() < 0.5, linger_seconds=5).published
        handoff = payload.acquire(self._bridge, key)
        payload.assert_in(handoff)
        assert handoff.still_valid()
        match self._draw.randrange(4):
            case 0:
                handoff.release()
            case 1:
                self._kept.append(handoff.layer(0))
            case 2:
                self._kept.clear()
            case _:
                self._kept.append(handoff)


def test_threads_publish_acquire_and_release_at_will(either: Bridge) -> None:
    """Whatever threads do at the same time, every cache holds what its generation was published with."""
    contents = [Contents(seed=100 * index, tokens=16 + index) for index in range(KEYS)]
    for index, payload in enumerate(contents):
        payload.publish(either, f"hammer/{index}")
    actors = [Actor(either, contents, seed) for seed in range(THREADS)]
    for actor in actors:
        actor.thread.join()
        assert not actor.errors
    del actors, actor
    gc.collect()
    wait_for(lambda: (either.node().arena.leases, either.node().arena.holds) == (0, 0))


def test_one_slot_is_written_by_many_threads(either: Bridge) -> None:
    """Layers of one payload may come from different threads."""
    contents = Contents()
    with either.publish("shared slot", model=MODEL, geometry=SHAPE, tokens=contents.ids) as slot:
        writers = [threading.Thread(target=slot.write, args=(layer, k, v)) for layer, (k, v) in contents.layers.items()]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    assert slot.published, slot.detail
    contents.assert_in(contents.acquire(either, "shared slot"))


def test_the_first_call_may_come_from_many_threads(bridge: Bridge) -> None:
    """All threads share one session, whoever opens it."""
    contents = Contents()
    start = threading.Barrier(THREADS)
    seen: set[object] = set()

    def ask() -> None:
        start.wait()
        contents.acquire(bridge, "nothing")
        seen.add(bridge._connector._session)

    threads = [threading.Thread(target=ask) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1
    assert None not in seen


def test_closing_while_others_ask_answers_them(bridge: Bridge) -> None:
    """Whoever is under way when the object is closed has an answer, with or without a cache."""
    contents = Contents()
    contents.publish(bridge, "closing")
    errors: list[BaseException] = []
    closed = threading.Event()

    def ask() -> None:
        try:
            while not closed.is_set():
                handoff = contents.acquire(bridge, "closing", text="own text")
                assert handoff.kv or handoff.text
        except BaseException as error:  # noqa: BLE001 - any at all is the finding
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_for(lambda: bridge.snapshot().keeper.tracked)
    bridge.close()
    closed.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert not bridge.snapshot().keeper.running


def test_references_in_cycles_do_not_block_the_collector(bridge: Bridge) -> None:
    """Leases that end inside the garbage collector, in the middle of calls, are returned without a deadlock."""
    contents = Contents()
    contents.publish(bridge, "cycles")
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(200):
            cycle: list[object] = [contents.acquire(bridge, "cycles")]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*threshold)
    del cycle
    gc.collect()
    wait_for(lambda: bridge.node().arena.leases == 0)
