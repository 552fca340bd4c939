"""Work in a forked child."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

CHILD_SECONDS_MAX = 30


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its exit status: 0 if nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(CHILD_SECONDS_MAX)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
