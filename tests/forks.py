"""Work in a forked child."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

CHILD_SECONDS_MAX = 30
_FORKS_MAX = 5


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child and return its exit status: 0 if nothing was raised.

    A child that is forked while a stream of gRPC is open crashes now and then, anywhere, and was seen to in a thread
    that runs no Python: gRPC skips its own handlers of forks then, and says so. Then another child is forked.
    """
    statuses = (_status_of_child(work) for _ in range(_FORKS_MAX))
    return next((status for status in statuses if status != -signal.SIGSEGV), -signal.SIGSEGV)


def _status_of_child(work: Callable[[], object]) -> int:
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
