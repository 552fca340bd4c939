"""What is refused is counted, and told as far as the log has room."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvbridge.observe.refusals import LINES_PER_SECOND_MAX, Refusals

REASONS = {f"door-{number}": ("A", "B", "QUIET") for number in range(10)}


class Log:
    """The lines since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.WARNING, logger="kvbridge.observe.refusals")

    def lines(self) -> list[str]:
        found = [
            f"{record.__dict__['door']} {record.__dict__['reason']}"
            if "door" in record.__dict__
            else f"left out {record.__dict__['left_out']}"
            for record in self._caplog.records
        ]
        self._caplog.clear()
        return found


class Clock:
    """A clock that tests turn."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    """Return what is logged."""
    return Log(caplog)


@pytest.fixture(name="clock")
def made_clock() -> Clock:
    """Return a clock."""
    return Clock()


@pytest.fixture(name="refusals")
def made_refusals(clock: Clock) -> Refusals:
    """Return counts that are all 0."""
    return Refusals(REASONS, untold=("QUIET",), clock=clock)


def counts(refusals: Refusals) -> dict[tuple[str, str], float]:
    """Return what was counted and is not 0."""
    [family] = refusals.collect()
    samples = {(sample.labels["door"], sample.labels["reason"]): sample.value for sample in family.samples}
    assert len(samples) == len(REASONS) * 3
    return {what: count for what, count in samples.items() if count}


async def test_everything_is_counted(refusals: Refusals) -> None:
    """At its door and by its reason, and nothing else is."""
    for _ in range(3):
        refusals.note("door-1", "A", host="10.0.0.1")
    refusals.note("door-2", "QUIET")
    assert counts(refusals) == {("door-1", "A"): 3, ("door-2", "QUIET"): 1}
    with pytest.raises(KeyError):
        refusals.note("door-1", "a reason of a stranger")
    refusals.close()


async def test_one_of_a_kind_is_told_in_a_second(refusals: Refusals, clock: Clock, log: Log) -> None:
    """A flood hides nothing that is rare; the rest is a number."""
    for _ in range(1000):
        refusals.note("door-1", "A")
    refusals.note("door-2", "B")
    assert log.lines() == ["door-1 A", "door-2 B"]
    clock.now += 1
    refusals.note("door-1", "A")
    assert log.lines() == ["door-1 A"]
    refusals.close()
    assert log.lines() == ["left out 999"]


async def test_there_are_never_more_than_a_few_lines(refusals: Refusals, clock: Clock, log: Log) -> None:
    """Whatever comes."""
    for _ in range(100):
        for door in REASONS:
            refusals.note(door, "A")
    assert len(log.lines()) == LINES_PER_SECOND_MAX
    clock.now += 0.9
    refusals.note("door-1", "B")
    assert log.lines() == []
    refusals.close()
    assert log.lines() == [f"left out {1000 - LINES_PER_SECOND_MAX + 1}"]


async def test_what_is_no_news_is_not_told(refusals: Refusals, log: Log) -> None:
    """It is counted alone."""
    for _ in range(10):
        refusals.note("door-1", "QUIET")
    refusals.close()
    assert log.lines() == []


class Bell(logging.Handler):
    """Rings at every line."""

    def __init__(self) -> None:
        super().__init__()
        self.rung = asyncio.Event()

    def emit(self, _: logging.LogRecord) -> None:
        self.rung.set()


async def test_the_end_of_a_flood_is_told_by_itself(refusals: Refusals, log: Log) -> None:
    """Nobody has to be refused once more for it."""
    for _ in range(5):
        refusals.note("door-1", "A")
    assert log.lines() == ["door-1 A"]
    bell, logger = Bell(), logging.getLogger("kvbridge.observe.refusals")
    logger.addHandler(bell)
    try:
        await bell.rung.wait()
    finally:
        logger.removeHandler(bell)
    assert log.lines() == ["left out 4"]
