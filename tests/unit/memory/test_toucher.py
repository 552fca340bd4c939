"""The background thread that touches pages."""

from __future__ import annotations

import errno
import threading

from kvbridge.memory.toucher import CHUNK_BYTES, Toucher
from tests.unit.memory.served import WAIT_SECONDS


def test_all_is_touched_once_and_in_order() -> None:
    """The chunks cover the range without gap or overlap, the last one shorter."""
    chunks: list[tuple[int, int]] = []
    toucher = Toucher(2 * CHUNK_BYTES + 4096, lambda offset, length: chunks.append((offset, length)), "test")
    assert toucher.wait(WAIT_SECONDS)
    assert chunks == [(0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, 4096)]
    snapshot = toucher.snapshot()
    assert (snapshot.touched_bytes, snapshot.finished, snapshot.error) == (2 * CHUNK_BYTES + 4096, True, "")


def test_stop_ends_after_the_current_chunk() -> None:
    """A stopped thread finishes the chunk it is in and begins no other."""
    entered, release = threading.Event(), threading.Event()

    def touch(offset: int, _: int) -> None:
        assert offset == 0
        entered.set()
        assert release.wait(WAIT_SECONDS)

    toucher = Toucher(4 * CHUNK_BYTES, touch, "test")
    assert entered.wait(WAIT_SECONDS)
    stopper = threading.Thread(target=toucher.stop)
    stopper.start()
    assert toucher._stop.wait(WAIT_SECONDS)
    release.set()
    stopper.join(WAIT_SECONDS)
    assert toucher.touched_bytes == CHUNK_BYTES
    assert not toucher.wait(WAIT_SECONDS)
    toucher.stop()


def test_a_refusal_of_the_kernel_is_noted_and_ends_it() -> None:
    """Touching only saves time, so its failure is reported and not raised."""

    def touch(_: int, __: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    toucher = Toucher(CHUNK_BYTES, touch, "test")
    assert not toucher.wait(WAIT_SECONDS)
    assert "no memory" in toucher.snapshot().error
    assert "no memory" in repr(toucher)
