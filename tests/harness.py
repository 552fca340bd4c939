"""A real bridge in a process of its own, and small things that many tests need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbridge.config import descriptor_socket_path
from tests.nursery import Offspring, nursery
from tests.ports import KeptPort

DEFAULT_CATALOG = """\
defaults:
  tokens_min_unmeasured: 1
  breaker: {bad_share_max: 1}
"""
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
WAIT_SECONDS_MAX = 20.0
"""Far more than anything here takes, also on a busy machine; less than a reference lasts by default, so that whoever
waits until there is none notices if nobody gave it back."""
POLL_SECONDS = 0.005
ARENA_BYTES = 64 << 20


class BridgeProcess:
    """A `kvbridge serve` process."""

    def __init__(
        self, directory: str, flags: Sequence[str] = (), *, prefix: Sequence[str] = (), module: str = "kvbridge"
    ) -> None:
        """Start it with sockets in `directory`, by the command `prefix` if there is one, and wait until it serves.

        Another `module` than kvbridge's own is a bridge that differs in something.
        """
        self._module = module
        self._prefix = tuple(prefix)
        self.socket = str(Path(directory, "bridge.sock"))
        self.descriptor_socket = descriptor_socket_path(self.socket)
        self._flags = tuple(flags)
        self._log = Path(directory, "bridge.log")
        self._port = KeptPort()
        self.process: subprocess.Popen[bytes] | Offspring
        self.tcp_port = 0
        self.metrics_port = 0
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> str:
        """Return the gRPC target of the unix socket."""
        return f"unix:{self.socket}"

    @property
    def tcp_target(self) -> str:
        """Return the gRPC target of the TCP port."""
        return f"127.0.0.1:{self.tcp_port}"

    @property
    def log(self) -> str:
        """Return everything that it has logged since its last start."""
        return self._log.read_text(encoding="utf-8") if self._log.exists() else ""

    def start(self) -> None:
        """Start it (again) at the same addresses and wait until it serves."""
        command = ["serve", "--socket", self.socket, "--listen", self._port.target]
        command += ["--arena-bytes", str(ARENA_BYTES), "--drain-seconds", "0.2", "--metrics-listen", ""]
        command += [*self._default_catalog(), *self._flags]
        self.process = self._begun(command)
        serving = wait_for(self._serving_line, START_SECONDS_MAX)
        self.tcp_port = serving["tcp_port"] or 0
        self.metrics_port = serving["metrics_port"] or 0

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait(STOP_SECONDS_MAX)

    def stop(self) -> int:
        """Ask it to stop, and return its exit status."""
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def close(self) -> None:
        """Stop it, if it has not ended, and leave its port to others."""
        try:
            if self.process.poll() is None:
                self.stop()
        finally:
            self._port.close()

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        return resident_bytes(self.process.pid)

    def open_descriptors(self) -> int:
        """Return how many file descriptors it has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def _begun(self, arguments: Sequence[str]) -> subprocess.Popen[bytes] | Offspring:
        forking = None if self._prefix or self._module != "kvbridge" else nursery()
        if forking is not None:
            return forking.fork(arguments, self._log)
        with self._log.open("wb") as log:
            return subprocess.Popen([*self._prefix, sys.executable, "-m", self._module, *arguments], stderr=log)

    def _default_catalog(self) -> list[str]:
        """Return flags for a bridge that hands over few tokens, however many tests break caches."""
        if any(flag.startswith(("--catalog", "--unmeasured-tokens-min")) for flag in self._flags):
            return []
        path = Path(self.socket).with_name("catalog.yaml")
        path.write_text(DEFAULT_CATALOG, encoding="utf-8")
        return ["--catalog", str(path)]

    def _serving_line(self) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the bridge ended with status {self.process.returncode}:\n{self.log}")
        lines = (line for line in self.log.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n"))
        return next((record for record in map(json.loads, lines) if record["event"] == "serving"), None)


@contextmanager
def running_bridge(*flags: str, prefix: Sequence[str] = (), module: str = "kvbridge") -> Iterator[BridgeProcess]:
    """Run a bridge process with extra `flags` for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as directory:
        bridge = BridgeProcess(directory, flags, prefix=prefix, module=module)
        try:
            yield bridge
        finally:
            bridge.close()


def wait_for(condition: Callable[[], Any], timeout_seconds: float = WAIT_SECONDS_MAX) -> Any:
    """Return the condition's first true value, or fail once the time is over."""
    ends_at = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= ends_at:
            raise AssertionError(f"did not come true within {timeout_seconds} s: {condition}")
        time.sleep(POLL_SECONDS)


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
