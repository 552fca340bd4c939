"""What becomes of a stream's first response when its call is broken off."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from kvbridge.core.errors import TooLateError
from kvbridge.server.writer import Writer

TOO_LATE = TooLateError("the time is over")


class Call:
    """A servicer's context as far as a writer needs one: each response waits until it is taken."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._taken = asyncio.Semaphore(0)
        self._is_gone = False

    def take(self) -> None:
        """Have the reader take one more response."""
        self._taken.release()

    def go(self) -> None:
        """Have the reader go away."""
        self._is_gone = True
        self.take()

    async def write(self, response: str) -> None:
        await self._taken.acquire()
        if self._is_gone:
            raise ConnectionError
        self.told.append(response)

    async def abort_with_status(self, status: Any) -> None:
        self.told.append(status.code.name)


class Stream:
    """Responses that are being written to a call."""

    def __init__(self) -> None:
        self.call = Call()
        self.writer = Writer(self.call)  # type: ignore[arg-type] # as much of one as is needed
        self.task = asyncio.create_task(self.writer.write_all(self._responses()))
        self.is_closed = False

    async def _responses(self) -> AsyncGenerator[str, None]:
        try:
            for number in range(2):
                yield str(number)
        finally:
            self.is_closed = True

    async def break_off(self) -> None:
        """Break it off once it has done what it can."""
        await settled()
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def settled() -> None:
    """Let every task do what it can without anybody else."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_status_comes_behind_the_first_response() -> None:
    """The stream itself is over before, with whatever it holds."""
    stream = Stream()
    await stream.break_off()
    assert stream.is_closed
    ending = asyncio.create_task(stream.writer.abort(TOO_LATE))
    await settled()
    assert stream.call.told == []
    stream.call.take()
    await ending
    assert stream.call.told == ["0", "DEADLINE_EXCEEDED"]


async def test_the_status_waits_for_no_other_response() -> None:
    """The headers have left with the first."""
    stream = Stream()
    stream.call.take()
    await stream.break_off()
    await stream.writer.abort(TOO_LATE)
    assert stream.call.told == ["0", "DEADLINE_EXCEEDED"]


async def test_where_nothing_was_written_the_status_comes_alone() -> None:
    """As of a stream that was refused."""
    writer = Writer(call := Call())  # type: ignore[arg-type] # as much of one as is needed
    await writer.abort(TOO_LATE)
    assert call.told == ["DEADLINE_EXCEEDED"]


async def test_every_response_is_written() -> None:
    """One by one, to a reader that takes them."""
    stream = Stream()
    for _ in range(2):
        stream.call.take()
    await stream.task
    assert (stream.call.told, stream.is_closed) == (["0", "1"], True)


async def test_a_first_response_that_cannot_be_written_ends_the_stream() -> None:
    """Its reader has gone."""
    stream = Stream()
    stream.call.go()
    with pytest.raises(ConnectionError):
        await stream.task
    assert stream.is_closed


async def test_a_reader_that_goes_after_its_call_was_broken_off_is_no_surprise() -> None:
    """Asyncio complains of failures that nobody has looked at."""
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    stream = Stream()
    await stream.break_off()
    stream.call.go()
    await settled()
    del stream
    gc.collect()
    assert complaints == []
