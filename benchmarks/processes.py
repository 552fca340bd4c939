"""The bridge that is measured, as a process of its own, and the memory of processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvbridge.v1.inspect_service_pb2 import ArenaUsage, GetNodeRequest
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceStub

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
TOUCH_SECONDS_MAX = 300.0
POLL_SECONDS = 0.02
_METADATA = (("kvbridge-client", "benchmark-of-handoffs"),)


class RunningBridge:
    """A `kvbridge serve` process whose whole arena has been touched."""

    def __init__(
        self, process: subprocess.Popen[bytes], socket: str, channel: grpc.Channel, *, tcp_port: int = 0
    ) -> None:
        """Speak to the bridge at `socket` over `channel`; other nodes reach it at `tcp_port`."""
        self.tcp_port = tcp_port
        self.tcp_target = f"127.0.0.1:{tcp_port}"
        self.target = f"unix:{socket}"
        self.pid = process.pid
        self._inspect = InspectServiceStub(channel)

    def arena(self) -> ArenaUsage:
        """Return where the bytes of the arena are."""
        return self._inspect.GetNode(GetNodeRequest(), metadata=_METADATA).arena

    def limit(self, name: str) -> int:
        """Return a limit in force, by its name in the configuration."""
        return int(self._inspect.GetNode(GetNodeRequest(), metadata=_METADATA).limits[name])

    def wait_touched(self) -> None:
        """Wait until every byte of the arena is backed by a page."""
        ends_at = time.monotonic() + TOUCH_SECONDS_MAX
        while (arena := self.arena()).touched_bytes < arena.size_bytes:
            if time.monotonic() >= ends_at:
                raise RuntimeError(f"only {arena.touched_bytes} of {arena.size_bytes} bytes of the arena were touched")
            time.sleep(POLL_SECONDS)

    def wait_for_releases(self, payloads_max: int = 0) -> None:
        """Wait until at most so many payloads occupy the arena: clients return what they release in the background."""
        ends_at = time.monotonic() + STOP_SECONDS_MAX
        while (arena := self.arena()).payloads > payloads_max:
            if time.monotonic() >= ends_at:
                raise RuntimeError(f"payloads stay in the arena: {arena}")
            time.sleep(POLL_SECONDS)


@contextmanager
def running_bridge(arena_bytes: int, *flags: str, at: tuple[str, ...] = ()) -> Iterator[RunningBridge]:
    """Run a bridge with an arena of `arena_bytes`, a multiple of the page, and default settings but for `flags`.

    `at` are words before the command, if it is to run elsewhere on this machine.
    """
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as directory:
        socket = str(Path(directory, "bridge.sock"))
        log = Path(directory, "bridge.log")
        command = [*at, sys.executable, "-m", "kvbridge", "serve", "--socket", socket, "--listen", ""]
        command += ["--metrics-listen", ""]
        command += ["--unmeasured-tokens-min", "1"]  # A payload of 1 MiB is few tokens.
        command += ["--arena-bytes", str(arena_bytes), "--drain-seconds", "0.2", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stderr=output)
        try:
            tcp_port = _wait_serving(process, log)
            with grpc.insecure_channel(f"unix:{socket}") as channel:
                bridge = RunningBridge(process, socket, channel, tcp_port=tcp_port)
                bridge.wait_touched()
                yield bridge
        finally:
            _stop(process)


def private_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process without memory that it shares, such as an arena.

    The arena is as large at the end as at the start, and would hide what grows beside it.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kibibytes = {name: int(fields[name].split()[0]) for name in ("VmRSS", "RssShmem")}
    return (kibibytes["VmRSS"] - kibibytes["RssShmem"]) * 1024


def _wait_serving(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until it serves and return its TCP port, 0 if it has none."""
    ends_at = time.monotonic() + START_SECONDS_MAX
    while (serving := _serving(log.read_text(encoding="utf-8"))) is None:
        if process.poll() is not None or time.monotonic() >= ends_at:
            raise RuntimeError(f"the bridge did not start:\n{log.read_text(encoding='utf-8')}")
        time.sleep(POLL_SECONDS)
    return serving["tcp_port"] or 0


def _serving(log: str) -> dict[str, Any] | None:
    records = (line for line in log.splitlines(keepends=True) if line.startswith("{") and line.endswith("\n"))
    return next((record for record in map(json.loads, records) if record.get("event") == "serving"), None)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
