"""An event loop that is a pure function of its seed: virtual time, a seeded order of steps, and no threads.

1. `time()` stands still while anything is ready and then jumps to the next timer.
2. Of what is ready, any may come next: asyncio promises the order of arrival, and nothing here relies on it, so that
   code which does is found out.
3. Work for threads is done at a later step, somewhere between the moment it was asked for and that of its result.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import selectors
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

STARTED_AT = 1_700_000_000.0
"""What wall clocks show at the beginning."""
STEPS_MAX = 1_000_000
"""Most steps of one run; more is taken for a run that never ends."""


class EndlessRunError(AssertionError):
    """Everything waits for ever, or runs for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Moves the clock where others would sleep; nothing outside the loop can wake it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise EndlessRunError("everything waits, and nothing will ever happen")
        if timeout:
            self.now += max(timeout, 1e-9)
        return []


class _ShuffledSteps:
    """What is ready to run, as far as asyncio's base loop needs a deque for that."""

    def __init__(self, chance: random.Random, steps_max: int) -> None:
        self.steps = 0
        self._steps_max = steps_max
        self.after_step: Callable[[], None] = lambda: None
        self._chance = chance
        self._handles: list[asyncio.Handle] = []

    def __len__(self) -> int:
        return len(self._handles)

    def append(self, handle: asyncio.Handle) -> None:
        self._handles.append(handle)

    def popleft(self) -> asyncio.Handle:
        self.steps += 1
        if self.steps > self._steps_max:
            raise EndlessRunError("there is always something to do, and time stands still")
        self.after_step()
        chosen = int(self._chance.random() * len(self._handles))
        self._handles[chosen], self._handles[-1] = self._handles[-1], self._handles[chosen]
        return self._handles.pop()

    def clear(self) -> None:
        self._handles.clear()


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Runs tasks in virtual time, in an order that the seed decides."""

    def __init__(self, seed: str, *, steps_max: int = STEPS_MAX) -> None:
        """Start at time 0; more than `steps_max` steps are taken for a run that never ends."""
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.chance = random.Random(f"{seed} order")
        self._work = random.Random(f"{seed} threads")
        self.before_work: Callable[[], Awaitable[None]] | None = None
        """Awaited before work for a thread of a named executor is done."""
        self._steps = _ShuffledSteps(self.chance, steps_max)
        self._ready = self._steps

    @property
    def steps(self) -> int:
        """Return how many steps were taken."""
        return self._steps.steps

    def after_each_step(self, look: Callable[[], None]) -> None:
        """Call `look` after every step; what it raises ends the run."""
        self._steps.after_step = look

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Do work for a thread at a later step."""
        future: asyncio.Future[Any] = self.create_future()
        _ = self.create_task(self._do(future, func, *args, named=executor is not None))
        return future

    async def _do(self, future: asyncio.Future[Any], func: Callable[..., Any], *args: Any, named: bool) -> None:
        if named and self.before_work is not None:
            await self.before_work()
        await asyncio.sleep(self._work.choice((0.0, 0.001, 0.02, 0.2)))
        try:
            result, error = func(*args), None
        except Exception as problem:  # noqa: BLE001 - that is what an executor does
            result, error = None, problem
        await asyncio.sleep(self._work.choice((0.0, 0.001, 0.02, 0.2)))
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


@contextmanager
def virtual_surroundings(loop: SimulatedLoop, seed: str) -> Iterator[None]:
    """Let the clocks and the secrets that modules take straight from the standard library come from the run."""
    chance = random.Random(f"{seed} secrets")

    def hexadecimal(nbytes: int = 32) -> str:
        return chance.randbytes(nbytes).hex()

    with ExitStack() as patches:
        for module, name, replacement in (
            (time, "perf_counter", loop.time),
            (time, "time", lambda: STARTED_AT + loop.time()),
            (time, "time_ns", lambda: int((STARTED_AT + loop.time()) * 1e9)),
            (secrets, "token_hex", hexadecimal),
            (secrets, "token_urlsafe", hexadecimal),
            (secrets, "randbits", chance.getrandbits),
        ):
            patches.enter_context(patch.object(module, name, replacement))
        yield
