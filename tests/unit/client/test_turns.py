"""Writers and the end of what they write to."""

from __future__ import annotations

import threading

from kvbridge.client.turns import Turns
from tests.harness import wait_for


def test_the_end_waits_for_the_writers_in_flight() -> None:
    """Nothing is given back before the last writer has left, and no other is admitted meanwhile."""
    turns, ended = Turns(), threading.Event()
    with turns.writing() as admitted:
        assert admitted

        def end() -> None:
            turns.end()
            ended.set()

        thread = threading.Thread(target=end)
        thread.start()
        wait_for(lambda: not _admitted(turns))
        assert not ended.is_set()
    thread.join(10)
    assert ended.is_set()


def test_only_the_first_end_counts() -> None:
    """Whoever comes second is told so."""
    turns = Turns()
    assert [turns.end(), turns.end()] == [True, False]


def _admitted(turns: Turns) -> bool:
    with turns.writing() as admitted:
        return admitted


def test_an_end_with_a_limit_does_not_wait_longer() -> None:
    """Whoever may not wait goes on while a writer is still there, and no other is admitted."""
    turns = Turns()
    with turns.writing():
        assert turns.end(timeout_seconds=0.0)
        assert not _admitted(turns)
