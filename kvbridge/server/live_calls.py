"""The calls that are being answered, so that those of somebody who may not make them any more can be broken off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import BridgeError, UnauthenticatedError
from kvbridge.server.access import Caller


@dataclass(slots=True, kw_only=True, eq=False)
class _LiveCall:
    caller: Caller
    admit: Callable[[], Caller | None]
    task: asyncio.Task[Any]
    refused: BridgeError | None = None


class LiveCalls:
    """Every call that has been let in and is not answered."""

    def __init__(self) -> None:
        """Start with none."""
        self._calls: set[_LiveCall] = set()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._calls)

    @contextmanager
    def entered(self, caller: Caller, admit: Callable[[], Caller | None]) -> Iterator[None]:
        """Count the current task's call in; `admit` decides on it again.

        Raises:
            BridgeError: what `admit` raised when it was asked again, in place of the cancellation.
        """
        task = asyncio.current_task()
        assert task is not None, "calls are answered by tasks"
        call = _LiveCall(caller=caller, admit=admit, task=task)
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.refused is None:
                raise
            task.uncancel()
            raise call.refused from None
        finally:
            self._calls.discard(call)

    def look_again(self) -> None:
        """Break off every call that would not be let in now, or not as the same caller."""
        for call in tuple(self._calls):
            refused = _refusal(call)
            if refused is not None and call.refused is None:
                call.refused = refused
                call.task.cancel()


def _refusal(call: _LiveCall) -> BridgeError | None:
    try:
        now = call.admit()
    except BridgeError as error:
        return error
    same = now is not None and (now.principal.name, now.tenant) == (call.caller.principal.name, call.caller.tenant)
    return None if same else UnauthenticatedError("what proved who makes this call proves another principal by now")
