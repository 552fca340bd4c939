"""Bridges that start in a quarter of the time: a process that has loaded all they need forks for each of them.

From its command line on each is what `kvbridge serve` is: a process with a log, signals and an exit status of its own.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
END_SECONDS_MAX = 30.0


class Offspring:
    """A bridge of the nursery; what is here does what `subprocess.Popen` does."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        """Take over a process that has just been forked."""
        self._nursery = nursery
        self._descriptor = os.pidfd_open(pid)
        self._burying = threading.Lock()
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._status_within(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit status."""
        status = self._status_within(timeout)
        if status is None:
            raise subprocess.TimeoutExpired("kvbridge serve", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _status_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and _is_readable(self._descriptor, seconds):
            self._bury()
        return self.returncode

    def _bury(self) -> None:
        with self._burying:
            if self.returncode is None:
                self.returncode = self._nursery.buried(self.pid)
                os.close(self._descriptor)


def _is_readable(descriptor: int, seconds: float | None) -> bool:
    """Tell whether a descriptor is readable in time; a number above 1,023 is none for `select`."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


class Nursery:
    """The process that forks, as tests see it."""

    def __init__(self) -> None:
        """Start it."""
        self._lock = threading.Lock()
        # numpy has threads of its own when it forks, which is no news, and which it provides for.
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", "tests.nursery"]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def fork(self, arguments: Sequence[str], log: Path) -> Offspring:
        """Run the command with these arguments; all that it says goes to the log."""
        log.write_bytes(b"")  # Nobody may take what another bridge said there for what this one says.
        mine = {"directory": str(Path.cwd()), "environment": dict(os.environ)}
        return Offspring(self, self._answer({"arguments": list(arguments), "log": str(log), **mine}))

    def buried(self, pid: int) -> int:
        """Return the exit status of a process that has ended, of which nothing is left then."""
        return self._answer({"ended": pid})

    def close(self) -> None:
        """Let it end."""
        self._process.communicate(timeout=END_SECONDS_MAX)

    def _answer(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the nursery ended with status {self._process.wait(END_SECONDS_MAX)}"
        return int(answer)


@cache
def _started() -> Nursery:
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


_STARTING = threading.Lock()


def nursery() -> Nursery | None:
    """Return the nursery; None where a library is to be loaded before all others, for which it is too late there."""
    if "LD_PRELOAD" in os.environ:
        return None
    with _STARTING:
        return _started()


# The other side


def _serve_requests() -> int:
    """Fork and bury until nobody asks any more; in a child, return the command's exit status."""
    import kvbridge.server.logs  # noqa: PLC0415
    import kvbridge.server.process  # noqa: F401, PLC0415 - what the command would load later
    from kvbridge.cli import main  # noqa: PLC0415

    gc.collect()
    gc.freeze()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "ended" in request:
            _, status = os.waitpid(request["ended"], 0)
            _say(os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if not pid:
            _become(request)
            return main(request["arguments"])
        _say(pid)
    return 0


def _say(number: int) -> None:
    sys.stdout.buffer.write(b"%d\n" % number)
    sys.stdout.buffer.flush()


def _become(request: dict[str, Any]) -> None:
    """Have the folder and the environment of who asked, hear nothing and say everything to the log."""
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, stream in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, stream)
    os.close(log)
    os.close(nothing)


if __name__ == "__main__":
    raise SystemExit(_serve_requests())
