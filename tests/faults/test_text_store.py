"""A bridge that keeps texts is killed, runs out of disk and starts again: what it gives is what producers attached."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvbridge import Bridge, ModelPattern, QuarantineNotPersistedError, Reason, connect
from tests.faults import contents
from tests.faults.crew import PATIENCE_SECONDS, restart
from tests.faults.test_limits import limited
from tests.harness import BridgeProcess, running_bridge, wait_for

PRODUCERS = 3
EARLY = 20
"""Payloads that are on disk before the bridge is killed."""
LIVES = 2
LOAD_SECONDS = 0.3


@contextmanager
def keeping(path: Path, *flags: str) -> Iterator[BridgeProcess]:
    """Run a bridge that keeps texts at `path`."""
    with running_bridge("--text-store", str(path), *flags) as process:
        yield process


def publish(bridge: Bridge, key: str, number: int) -> tuple[str, str] | None:
    """Publish something with a text of its own, which ends at once; return its name on every node, and the text."""
    text = f"text {number} of {key}, " * (1 + number % 200)
    with contents.publish(bridge, key, 1, text=text, hold=False) as slot:
        name = slot.handoff_reference
    return None if name is None else (name, text)


def given(bridge: Bridge, name: str, **options: Any) -> tuple[Reason | None, str | None]:
    """Ask for something as a consumer that has no text of its own."""
    with contents.ask(bridge, name, text=None, **options) as handoff:
        assert handoff.kv is None
        return handoff.reason, handoff.text


def require_given(
    bridge: Bridge, name: str, text: str, *, reason: Reason = Reason.PAYLOAD_EXPIRED, **options: Any
) -> None:
    """Require that a name is answered with its text; while a disk is slow, its answer is that nothing is known."""

    def is_given() -> bool:
        found = given(bridge, name, **options)
        assert found in {(reason, text), (Reason.PAYLOAD_UNKNOWN, None)}
        return found[1] is not None

    wait_for(is_given)


@contextmanager
def load(process: BridgeProcess, life: int) -> Iterator[dict[str, str]]:
    """Have producers publish all the time; the text of what was published, by its name, is complete afterwards."""
    texts: dict[str, str] = {}
    stopping = Event()

    def produce(producer: int) -> None:
        with connect(process.target) as bridge:
            number = 0
            while not stopping.is_set():
                number += 1
                published = publish(bridge, f"load/{producer}/{number % 10}", life * 100_000 + number)
                if published is not None:
                    texts.update([published])

    with ThreadPoolExecutor(PRODUCERS) as pool:
        running = [pool.submit(produce, producer) for producer in range(PRODUCERS)]
        try:
            yield texts
        finally:
            stopping.set()
            for producer in running:
                producer.result(PATIENCE_SECONDS)


def test_texts_outlive_a_bridge_that_is_killed(tmp_path: Path) -> None:
    """Under load, again and again: no text but the right one for any name, and every one that had reached the disk.

    The same bridge object asks all the time; it attaches again by itself.
    """
    path = tmp_path / "folder" / "texts.db"
    on_disk: dict[str, str] = {}
    maybe: dict[str, str] = {}
    with keeping(path, "--lease-ttl-seconds", "5") as process, connect(process.target) as bridge:
        for life in range(LIVES):
            early = [publish(bridge, f"early/{life}/{number}", number) for number in range(EARLY)]
            assert None not in early
            on_disk.update(one for one in early if one is not None)
            _wait_until_kept(bridge)
            with load(process, life) as texts:
                wait_for(partial(_has_gone_on, texts, time.monotonic() + LOAD_SECONDS), PATIENCE_SECONDS)
                process.kill()
            maybe.update(texts)
            _assert_whole(path, tmp_path / f"copy-{life}.db")
            restart(process)
            for name, text in on_disk.items():
                require_given(bridge, name, text)
            for name, right in maybe.items():
                assert given(bridge, name) in {(Reason.PAYLOAD_EXPIRED, right), (Reason.PAYLOAD_UNKNOWN, None)}
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def _has_gone_on(texts: dict[str, str], until: float) -> bool:
    return bool(texts) and time.monotonic() > until


def _wait_until_kept(bridge: Bridge) -> None:
    """Wait until what was published is on disk: a quarantine is answered only then, and this one touches nothing."""
    bridge.quarantines.impose(ModelPattern(name="marker"), why="a marker")


def _assert_whole(path: Path, copy: Path) -> None:
    """Look at what the dead bridge left, without touching it."""
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            shutil.copy(source, copy.with_name(copy.name + suffix))
    with sqlite3.connect(copy) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        lost = "SELECT count(*) FROM texts LEFT JOIN contents USING (id) WHERE content IS NULL"
        assert connection.execute(lost).fetchone() == (0,)
    connection.close()


def test_a_name_from_before_never_means_something_newer(tmp_path: Path) -> None:
    """Neither key with generation nor handoff reference, which old conversations may still hold."""
    with keeping(tmp_path / "texts.db") as process, connect(process.target) as bridge:
        old = contents.publish(bridge, "reborn", 1, text="the old text", linger_seconds=600)
        assert old.reference is not None
        assert old.handoff_reference is not None
        _wait_until_kept(bridge)
        restart(process)
        new = contents.publish(bridge, "reborn", 2, linger_seconds=600)
        assert new.reference is not None
        assert new.reference.generation > old.reference.generation
        assert contents.ask_and_read(bridge, "reborn").accepted
        require_given(bridge, old.handoff_reference, "the old text")
        require_given(bridge, "reborn", "the old text", generation=old.reference.generation)
        new.release()


@pytest.mark.slow
def test_a_disk_that_is_full_of_texts(tmp_path: Path) -> None:
    """Handoffs go on and are not slower for it; what could not be written is written when there is room."""
    path = tmp_path / "texts.db"
    with keeping(path, "--metrics-listen", "127.0.0.1:0") as process, connect(process.target) as bridge:
        published = [publish(bridge, "before", 1)]
        _wait_until_kept(bridge)
        full = path.with_name("texts.db-wal").stat().st_size + 1024
        with limited(process, resource.RLIMIT_FSIZE, full):
            published += [publish(bridge, f"meanwhile/{number}", 199) for number in range(50)]
            assert None not in published
            wait_for(lambda: _metric(process, "kvbridge_text_store_failures_total") > 0, PATIENCE_SECONDS)
            assert contents.ask_and_read(bridge, "nothing").reason is Reason.PAYLOAD_UNKNOWN
            slot = contents.publish(bridge, "here", 1)
            assert contents.ask_and_read(bridge, "here").accepted
            slot.release()
            with pytest.raises(QuarantineNotPersistedError, match="in force"):
                bridge.quarantines.impose(ModelPattern(name="another"), why="a test")
        wait_for(lambda: _metric(process, "kvbridge_text_store_rows") == len(published) + 1, PATIENCE_SECONDS)
        assert _metric(process, "kvbridge_text_store_dropped_total") == 0
        _wait_until_kept(bridge)
        restart(process)
        for name, text in filter(None, published):
            require_given(bridge, name, text)


def _metric(process: BridgeProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [value] = [line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")]
    return float(value)


@pytest.mark.slow
def test_an_owner_that_keeps_texts(tmp_path: Path) -> None:
    """Its payloads' names are answered with their texts on other nodes, too, after it was killed and started again."""
    with keeping(tmp_path / "texts.db", "--node-id", "owner") as owner:
        peers = ("--node-id", "puller", "--peers", f"owner={owner.tcp_target}", "--peer-check-seconds", "0.001")
        with (
            running_bridge(*peers) as puller,
            connect(owner.target) as producer,
            connect(puller.target) as consumer,
        ):
            slot = contents.publish(producer, "owned", 1, hold=False, linger_seconds=600)
            name = slot.handoff_reference
            assert name is not None
            assert contents.ask_and_read(consumer, name, of="owned").accepted
            _wait_until_kept(producer)
            restart(owner)
            # The other node may hand over its replica until it has heard of the restart.
            wait_for(lambda: contents.ask_and_read(consumer, name, of="owned").reason is Reason.PAYLOAD_EXPIRED)
            require_given(consumer, name, contents.text_of("owned"))


@pytest.mark.slow
def test_a_quarantine_that_outlives_the_bridge_in_its_texts(tmp_path: Path) -> None:
    """Without a `quarantine_file`: what was refused before the end is refused after it, for the same reason."""
    with keeping(tmp_path / "texts.db") as process, connect(process.target) as bridge:
        published = [publish(bridge, f"contaminated/{number}", 1) for number in range(3)]
        bridge.quarantines.impose(ModelPattern(name=contents.MODEL.name), why="wrong weights")
        restart(process)
        assert not bridge.quarantines.in_force()
        for name, text in filter(None, published):
            require_given(bridge, name, text, reason=Reason.QUARANTINED)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"something else, and long enough to be looked at " * 100, "is damaged or no file of texts"), (None, "locked")],
)
def test_a_store_that_cannot_be_used(tmp_path: Path, content: bytes | None, words: str) -> None:
    """The start ends at once with an error that names setting and file; a bridge that uses the file goes on."""
    path = tmp_path / "texts.db"
    if content is not None:
        path.write_bytes(content)
        _assert_no_start(path, words)
        assert path.read_bytes() == content
        return
    with keeping(path) as process, connect(process.target) as bridge:
        _assert_no_start(path, words)
        slot = contents.publish(bridge, "first", 1)
        assert slot.published
        slot.release()


def _assert_no_start(path: Path, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"ended with status 1(.|\n)*text_store: {path}.*{words}"), keeping(path):
        pytest.fail("it serves")
