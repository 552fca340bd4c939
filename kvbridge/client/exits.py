"""What bridge objects do when the interpreter ends."""

from __future__ import annotations

import atexit
import weakref
from functools import cache
from typing import Protocol


class Closable(Protocol):
    """Returns what it has and ends; more than once does nothing."""

    def close(self) -> None:
        """Close within a bounded time."""


def close_at_exit(closable: Closable) -> None:
    """Close an object at interpreter exit, unless it is gone by then."""
    _register()
    _open.add(closable)


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


@cache
def _register() -> None:
    """Arrange once in a process, and not on import, that everything open is closed."""
    atexit.register(_close_all)


def _close_all() -> None:
    for closable in list(_open):
        closable.close()
