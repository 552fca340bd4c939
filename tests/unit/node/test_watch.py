"""Who is told what, and what happens to those who do not listen."""

from __future__ import annotations

import asyncio

import pytest

from kvbridge.core.errors import LimitExceededError
from kvbridge.core.events import Event, EventsLost, NodeDraining
from kvbridge.node.watch import Watch, Watchers, WatchLimits

LIMITS = WatchLimits(watches_max=3, watches_per_client_max=2, events_max=4, seconds=10.0)
FIRST = 1000


class Clock:
    """A clock that tests turn by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def watchers(clock: Clock | None = None) -> Watchers:
    return Watchers(LIMITS, clock=clock or Clock(), first_sequence=FIRST)


def event(number: int) -> Event:
    return NodeDraining(seconds_left=float(number))


async def listen(watch: Watch, count: int) -> list[int]:
    """Return the numbers of the next events."""
    heard = [await anext(watch) for _ in range(count)]
    return [int(told.seconds_left) for _, told in heard if isinstance(told, NodeDraining)]


async def test_a_listener_waits_for_what_comes() -> None:
    """In order, with increasing sequence numbers."""
    told = watchers()
    watch = told.open("c", 0)
    hearing = asyncio.ensure_future(listen(watch, 2))
    await asyncio.sleep(0)
    told.tell("c", event(1))
    told.tell("somebody else", event(7))
    told.tell_all(event(2))
    assert await hearing == [1, 2]
    assert (watch.sequence, watch.events_lost) == (FIRST, False)


async def test_a_slow_reader_loses_its_place_and_is_told() -> None:
    """It holds up nobody; when it comes back it gets what is still remembered."""
    told = watchers()
    slow, quick = told.open("c", 0), told.open("c", 0)
    for number in range(10):
        told.tell("c", event(number))
        assert await listen(quick, 1) == [number]
    sequence, lost = await anext(slow)
    assert lost == EventsLost()
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    assert len(told) == 1
    again = told.open("c", sequence)
    assert not again.events_lost
    assert await listen(again, 4) == [6, 7, 8, 9]


async def test_a_client_that_comes_back_too_late_is_told_at_once() -> None:
    """And then gets what there is."""
    told = watchers()
    told.open("c", 0).close()
    for number in range(6):
        told.tell("c", event(number))
    late = told.open("c", FIRST + 1)
    assert late.events_lost
    assert late.sequence == FIRST + 2
    assert await listen(late, 4) == [2, 3, 4, 5]
    in_time = told.open("c", FIRST + 2)
    assert not in_time.events_lost


async def test_a_number_from_another_life_of_the_node_is_none_of_this() -> None:
    """Neither a smaller nor a greater one."""
    told = watchers()
    assert told.open("c", FIRST - 1).events_lost
    assert told.open("c", FIRST + 1).events_lost
    assert not told.open("d", FIRST).events_lost


async def test_streams_are_limited_for_each_client_and_in_all() -> None:
    """A stream that is closed, once or twice, makes room for one."""
    told = watchers()
    first = told.open("c", 0)
    told.open("c", 0)
    with pytest.raises(LimitExceededError, match="watches_per_client_max"):
        told.open("c", 0)
    told.open("d", 0)
    with pytest.raises(LimitExceededError, match="watches_max"):
        told.open("e", 0)
    assert not told.remembers("e")
    first.close()
    first.close()
    told.open("e", 0)
    assert len(told) == LIMITS.watches_max


async def test_a_client_without_a_stream_is_forgotten_after_a_while() -> None:
    """Unless it comes back before."""
    clock = Clock()
    told = watchers(clock)
    told.open("c", 0).close()
    told.open("d", 0).close()
    clock.now = LIMITS.seconds - 1
    back = told.open("d", 0)
    clock.now = LIMITS.seconds
    told.advance()
    assert not told.remembers("c")
    assert told.remembers("d")
    back.close()
    told.advance()
    assert told.remembers("d")


async def test_of_too_many_clients_without_a_stream_the_first_to_go_is_forgotten() -> None:
    """As many are remembered as there may be streams."""
    told = watchers()
    for name in "abcd":
        told.open(name, 0).close()
    assert [name for name in "abcd" if told.remembers(name)] == ["b", "c", "d"]


async def test_the_streams_of_a_client_that_is_gone_end() -> None:
    """After what it was told before."""
    told = watchers()
    watch = told.open("c", 0)
    told.tell("c", event(1))
    told.end_client("c")
    told.tell("c", event(2))
    assert await listen(watch, 1) == [1]
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    watch.close()
    assert len(told) == 0
    told.end_client("unknown")


async def test_a_node_that_stops_ends_every_stream() -> None:
    """One that is opened later ends at once."""
    told = watchers()
    waiting = asyncio.ensure_future(listen(told.open("c", 0), 1))
    await asyncio.sleep(0)
    told.close()
    with pytest.raises(StopAsyncIteration):
        await told.open("d", 0).__anext__()
    with pytest.raises(StopAsyncIteration):
        await waiting
