"""Work that outlives whoever waits for it."""

from __future__ import annotations

import asyncio

import pytest

from kvbridge.node.background import Background


async def test_work_goes_on_when_the_waiting_is_cancelled() -> None:
    """Cancelling the one who waits leaves the work alone, and `settle` waits for its end."""
    background, may_end, done = Background(), asyncio.Event(), list[str]()

    async def work() -> None:
        await may_end.wait()
        done.append("work")

    waiting = asyncio.ensure_future(background.run(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(background) == 1
    may_end.set()
    await background.settle()
    assert done == ["work"]
    assert len(background) == 0


async def test_results_and_errors_reach_the_one_who_waits() -> None:
    """The waiter gets what the work returns or raises; settling survives either."""
    background = Background()

    async def number() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("broken")

    assert await background.run(number()) == 7
    with pytest.raises(ValueError, match="broken"):
        await background.run(fails())
    await background.settle()


async def test_settling_waits_for_work_that_work_has_begun() -> None:
    """What a task starts while it ends is waited for, too."""
    background, done = Background(), list[str]()

    async def second() -> None:
        await asyncio.sleep(0)
        done.append("second")

    async def first() -> None:
        _ = background.start(second())

    _ = background.start(first())
    await background.settle()
    assert done == ["second"]
