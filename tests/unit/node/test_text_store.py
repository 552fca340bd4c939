"""The store of texts: its queue, its thread, and what becomes of both when the disk does not do its part."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.kept_text import KeptText
from kvbridge.core.reasons import Reason
from kvbridge.node import text_store
from kvbridge.node.text_file import TextFile
from kvbridge.node.text_store import TextStore
from tests.harness import wait_for
from tests.unit.node.test_text_file import ended, noted, words

PATIENCE_SECONDS = 30.0
KEEP_SECONDS = 100.0


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Return where the file is to be."""
    return str(tmp_path / "texts.db")


@pytest.fixture
async def store(path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TextStore]:
    """Run a store that is patient with readers and tries again soon."""
    monkeypatch.setattr(text_store, "ANSWER_SECONDS_MAX", PATIENCE_SECONDS)
    monkeypatch.setattr(text_store, "_RETRY_SECONDS", 0.01)
    running = TextStore(path, bytes_max=1 << 20, seconds=KEEP_SECONDS)
    assert running.open() == 0
    yield running
    assert await asyncio.to_thread(running.close, PATIENCE_SECONDS)


@contextmanager
def held(store: TextStore) -> Iterator[None]:
    """Keep the store's thread from the disk while the context lasts, as a disk that hangs would."""
    file, entered, go_on = store._file, Event(), Event()
    assert file is not None
    write = file.write

    def hang(*arguments: Any, **named: Any) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_SECONDS)
        write(*arguments, **named)

    file.write = hang  # type: ignore[method-assign]
    try:
        store.put(noted("the one that hangs"))
        assert entered.wait(PATIENCE_SECONDS)
        yield
    finally:
        file.write = write  # type: ignore[method-assign]
        go_on.set()


async def find(store: TextStore, key: str = "k", *, tenant: str = "t") -> KeptText | None:
    """Ask for something, and be patient."""
    reference = PayloadReference(key=key, generation=0)
    return (await store.find(tenant, [reference], seconds_max=PATIENCE_SECONDS)).get(reference)


async def test_what_is_put_is_found_and_outlives_the_store(store: TextStore, path: str) -> None:
    """In order: an end that is put behind its text is noted with it."""
    for number in range(1000):
        store.put(noted(f"k{number}"))
    store.put(ended("k7", reason=Reason.MEMORY_EXHAUSTED, detail="evicted"))
    assert await store.settle(PATIENCE_SECONDS)
    found = await find(store, "k7")
    assert found is not None
    assert (words(found), found.reason) == ("the text", Reason.MEMORY_EXHAUSTED)
    assert (store.rows, store.dropped, store.failures) == (1000, 0, 0)
    store.put(noted("last"))
    assert await asyncio.to_thread(store.close, PATIENCE_SECONDS)
    file = TextFile(path, bytes_max=1 << 20)
    assert (file.rows, file.life) == (1001, 1)
    file.close()


async def test_texts_end_by_the_wall_clock(path: str) -> None:
    """Which goes on while the node is down."""
    now = [1000.0]
    first = TextStore(path, bytes_max=1 << 20, seconds=10.0, wall_clock=lambda: now[0])
    first.open()
    first.put(noted())
    assert first.close(PATIENCE_SECONDS)
    now[0] = 1009.0
    second = TextStore(path, bytes_max=1 << 20, seconds=10.0, wall_clock=lambda: now[0])
    second.open()
    assert words(await find(second)) == "the text"
    now[0] = 1010.0
    assert await find(second) is None
    assert second.close(PATIENCE_SECONDS)


async def test_nobody_waits_for_a_disk_that_hangs(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting returns, a question ends in its own time or a short one, and neither is asked for too many times."""
    monkeypatch.setattr(text_store, "ANSWER_SECONDS_MAX", 0.02)
    monkeypatch.setattr(text_store, "QUESTIONS_MAX", 3)
    with held(store):
        store.put(noted())
        assert await find(store) is None
        assert await store.find("t", [PayloadReference(key="k", generation=0)], seconds_max=0.0) == {}
        assert not await store.settle(0.01)
        found = await asyncio.gather(*(find(store) for _ in range(5)))
        assert found == [None] * 5
        assert store.failures == 7
    assert await store.settle(PATIENCE_SECONDS)
    monkeypatch.setattr(text_store, "ANSWER_SECONDS_MAX", PATIENCE_SECONDS)
    assert words(await find(store)) == "the text"


async def test_a_queue_that_is_full_drops_texts_and_says_so(
    store: TextStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Why a payload ended is still noted where its text is there; what comes when there is room is kept again."""
    store.put(noted("early"))
    assert await store.settle(PATIENCE_SECONDS)
    monkeypatch.setattr(text_store, "QUEUE_BYTES_MAX", 3000)
    with held(store):
        kept = [store.put(noted(f"k{number}", words="w" * 500)) for number in range(20)]
        assert 0 < sum(kept) < 20
        assert store.dropped == 20 - sum(kept)
        assert not store.put(noted("early", words="w" * 2500, reason=Reason.QUARANTINED, detail="bad"))
    assert await store.settle(PATIENCE_SECONDS)
    assert [await find(store, f"k{number}") is not None for number in range(20)] == kept
    early = await find(store, "early")
    assert early is not None
    assert (words(early), early.reason) == ("the text", Reason.QUARANTINED)
    assert store.put(noted("late"))
    assert await store.settle(PATIENCE_SECONDS)
    assert await find(store, "late") is not None
    assert sum("cannot keep up" in message for message in caplog.messages) == 1


async def test_quarantines_are_dropped_last(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever imposes one hears of it."""
    monkeypatch.setattr(text_store, "QUEUE_NOTES_MAX", 5)
    monkeypatch.setattr(text_store, "QUEUE_QUARANTINED_MAX", 8)
    with held(store):
        ends = [store.put(ended(f"k{number}", reason=Reason.PAYLOAD_EXPIRED)) for number in range(7)]
        marks = [store.put(ended(f"k{number}", reason=Reason.QUARANTINED)) for number in range(5)]
    assert ends == [True] * 5 + [False] * 2
    assert marks == [True] * 3 + [False] * 2
    assert store.dropped == 4


async def test_what_cannot_be_written_is_tried_again(store: TextStore, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is full: nothing is lost, questions are answered, and once there is room everything is there."""
    assert store._file is not None
    store.put(noted("early"))
    assert await store.settle(PATIENCE_SECONDS)
    connection = store._file._connection
    [pages] = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    for number in range(10):
        store.put(noted(f"k{number}", words="w" * 20_000))
    assert not await store.settle(0.2)
    assert store.failures > 0
    assert await find(store, "early") is not None
    assert await find(store, "k0") is None
    connection.execute("PRAGMA max_page_count = 100000")
    assert await store.settle(PATIENCE_SECONDS)
    assert (store.rows, store.dropped) == (11, 0)
    assert sum("to be tried again" in message for message in caplog.messages) == 1


async def test_what_never_can_be_written_ends_nothing(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted as dropped, nobody is told that it was written, and the next one is."""
    assert store._file is not None

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault in this program")

    with monkeypatch.context() as broken:
        broken.setattr(store._file, "write", fail)
        store.put(noted())
        assert not await store.settle(0.2)
    assert (store.dropped, await find(store)) == (1, None)
    store.put(noted())
    assert await store.settle(PATIENCE_SECONDS)
    assert words(await find(store)) == "the text"


async def test_a_file_that_cannot_be_read_says_nothing(store: TextStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks goes on with what they have."""
    assert store._file is not None

    def fail(*_: object, **__: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._file, "find", fail)
    assert await find(store) is None
    assert store.failures == 1


async def test_old_texts_go_although_nobody_writes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold prompts."""
    monkeypatch.setattr(text_store, "_IDLE_SECONDS_MAX", 0.01)
    now = [0.0]
    store = TextStore(path, bytes_max=1 << 20, seconds=10.0, wall_clock=lambda: now[0])
    store.open()
    store.put(noted())
    assert await store.settle(PATIENCE_SECONDS)
    assert store.rows == 1
    now[0] = 10.0
    await asyncio.to_thread(wait_for, lambda: store.rows == 0, PATIENCE_SECONDS)
    assert store.close(PATIENCE_SECONDS)


async def test_closing_does_not_wait_for_ever(path: str) -> None:
    """What could not be written in time is counted, if anybody still looks."""
    store = TextStore(path, bytes_max=1 << 20, seconds=KEEP_SECONDS)
    store.open()
    with held(store):
        assert not store.close(0.01)
    assert store.close(PATIENCE_SECONDS)


def test_a_store_that_never_opened_can_be_closed(path: str) -> None:
    """As at a start that failed elsewhere."""
    store = TextStore(path, bytes_max=1 << 20, seconds=KEEP_SECONDS)
    assert store.close()
    assert (store.rows, store.bytes) == (0, 0)
