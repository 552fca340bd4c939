"""What is paused while this process forks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbridge.client.forking import PAUSE_SECONDS_MAX, _Pausables, pause_at_forks
from tests.forks import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Stream:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.timeouts: list[float] = []

    def pause(self, timeout_seconds: float) -> None:
        self.asked.append("pause")
        self.timeouts.append(timeout_seconds)

    def resume(self) -> None:
        self.asked.append("resume")


def test_the_parent_goes_on_and_the_child_does_not() -> None:
    """What belongs to its parent is none of the child's business, when it forks in its turn, either."""
    streams = [Stream(), Stream()]
    for stream in streams:
        pause_at_forks(stream)

    def grandchild() -> None:
        assert [stream.asked for stream in streams] == [["pause"], ["pause"]]

    def child() -> None:
        grandchild()
        assert in_child(grandchild) == 0

    assert in_child(child) == 0
    assert [stream.asked for stream in streams] == [["pause", "resume"]] * 2
    assert all(0 < timeout <= PAUSE_SECONDS_MAX for stream in streams for timeout in stream.timeouts)


def test_a_child_may_have_streams_of_its_own() -> None:
    """They are paused when it forks."""

    def child() -> None:
        pause_at_forks(own := Stream())
        assert in_child(lambda: None) == 0
        assert own.asked == ["pause", "resume"]

    assert in_child(child) == 0


def test_a_child_needs_nothing_of_its_parents_other_threads() -> None:
    """One that held the lock when the process forked, or forked when nothing was arranged yet, lets nobody wait."""
    pausables = _Pausables()

    def child() -> None:
        pausables.forget()
        pausables.add(Stream())
        pausables.pause()
        pausables.resume()

    with ThreadPoolExecutor(1) as other:
        other.submit(pausables.pause).result()
        assert in_child(child) == 0
        other.submit(pausables.resume).result()
    pausables.resume()
    pausables.add(Stream())


def test_what_is_gone_is_not_paused() -> None:
    """Nothing stays because of forks."""
    pause_at_forks(stream := Stream())
    asked = stream.asked
    del stream
    assert in_child(lambda: None) == 0
    assert asked == []
