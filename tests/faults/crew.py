"""The parent's side of `children.py`, and what must be true after every fault."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvbridge import Bridge, connect
from tests.faults import contents
from tests.harness import BridgeProcess, wait_for

PATIENCE_SECONDS = 60.0
"""Far more than anything here takes; only what hangs exceeds it."""
_FREEZING = threading.Lock()


class Victim:
    """A child process."""

    def __init__(
        self, role: str, stage: str, bridge: BridgeProcess, *, by_value: bool = False, **settings: Any
    ) -> None:
        """Start it."""
        target = bridge.tcp_target if by_value else bridge.target
        known = {"target": target, "descriptor_socket": bridge.descriptor_socket, "key": "", "seed": 1}
        command = [sys.executable, "-m", "tests.faults.children", role, stage]
        command.append(json.dumps({**known, "tokens": contents.TOKENS, **settings}))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stage = stage
        self._bridge = bridge
        self.hung = False
        """Whether its parent gave it up."""

    def give_up(self) -> None:
        """Kill it, because it has not come to an end; it shows where all of its threads stand first."""
        self.hung = True
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        self._process.kill()

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Be at its stage inside the context; while a call is in flight there, the bridge stands still."""
        line = self._line()
        if line == {"stage": self._stage}:
            yield
            return
        assert line == {"stage": f"before {self._stage}"}, line
        with frozen(self._bridge):
            self.go_on()
            assert self._line() == {"stage": self._stage}
            yield

    def go_on(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def outcome(self) -> dict[str, Any]:
        """Wait for what came of it; it lives on and keeps what it has not given back."""
        found: dict[str, Any] = self._line()["outcome"]
        return found

    def stop(self) -> None:
        """Stop it, and wait until it stands still."""
        stop(self._process.pid)

    def resume(self) -> None:
        """Let it run again."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait(PATIENCE_SECONDS)

    def end(self) -> None:
        """Kill it, if it still lives, and close its pipes."""
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_SECONDS)

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with status {self._process.wait(PATIENCE_SECONDS)}"
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def victim(role: str, stage: str, bridge: BridgeProcess, **settings: Any) -> Iterator[Victim]:
    """Run a child for as long as the context lasts."""
    child = Victim(role, stage, bridge, **settings)
    try:
        yield child
    finally:
        child.end()


def stop(pid: int) -> None:
    """Stop a process and wait until all of it stands still."""
    subprocess.run(["kill", "-STOP", str(pid)], check=True)
    wait_for(lambda: all(_state(thread) == "T" for thread in Path(f"/proc/{pid}/task").iterdir()), PATIENCE_SECONDS)


@contextmanager
def frozen(bridge: BridgeProcess) -> Iterator[None]:
    """Stop a bridge for as long as the context lasts; one thread at a time."""
    with _FREEZING:
        stop(bridge.process.pid)
        try:
            yield
        finally:
            bridge.signal(signal.SIGCONT)


def restart(bridge: BridgeProcess) -> None:
    """Kill a bridge and start it again at the addresses it had."""
    bridge.kill()
    bridge.start()


def memory(bridge: Bridge) -> tuple[int, ...]:
    """Return what every fault must leave as it was."""
    arena = bridge.node().arena
    return (arena.free_bytes, arena.payloads, arena.leases, arena.holds, arena.reservations)


class Bystander:
    """A client that has nothing to do with the fault and must not notice it."""

    def __init__(self, bridge: BridgeProcess) -> None:
        """Remember how the memory is before the fault; all earlier payloads must have ended."""
        self.process = bridge
        self.bridge = connect(bridge.target)
        self.base = memory(self.bridge)
        self._count = 0

    def close(self) -> None:
        """Disconnect."""
        self.bridge.close()

    def assert_served(self) -> None:
        """Publish and acquire something, in place, and read it; it is gone afterwards."""
        self._count += 1
        key = f"bystander/{self._count}"
        slot = contents.publish(self.bridge, key, self._count)
        assert slot.published, slot.detail
        assert contents.ask_and_read(self.bridge, key).accepted
        slot.release()

    def assert_answered(self, key: str) -> None:
        """Ask for something that may or may not be there, in place and by value; no wrong byte may come."""
        contents.ask_and_read(self.bridge, key)
        with connect(self.process.tcp_target) as remote:
            contents.ask_and_read(remote, key)

    def assert_base(self, *, but_for_quarantine: bool = False) -> None:
        """Wait until the memory is as it was, or all of it that no client may still be touching."""
        if but_for_quarantine:
            wait_for(self._unreferenced, PATIENCE_SECONDS)
            return
        wait_for(lambda: memory(self.bridge) == self.base, PATIENCE_SECONDS)

    def _unreferenced(self) -> bool:
        arena = self.bridge.node().arena
        free_bytes, _, *references = self.base
        bytes_back = arena.free_bytes + arena.quarantined_bytes == free_bytes
        return bytes_back and [arena.leases, arena.holds, arena.reservations] == references


def _state(thread: Path) -> str:
    return (thread / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
