"""The two ends of a transfer by NIXL: `benchmarks.nixl_probe` measures what they do to each other.

`python -m benchmarks.nixl_ends owner` is the far one, `confined-owner` one that may only read its own memory, and
`reader ADDRESS METADATA` one that reads from it until it is killed.
"""

from __future__ import annotations

import importlib
import json
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

MIB = 1 << 20
PAYLOAD_BYTES = 256 * MIB
SECONDS_MAX = 60.0
SHARED, PRIVATE = 7, 9
"""What the two halves of the owner's memory are full of; only the first one is registered."""
SETTINGS = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}


class End:
    """One process' agent, and memory of which a part is registered with it."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Register the beginning of the memory."""
        nixl: Any = importlib.import_module("nixl_cu12")
        self.memory = np.frombuffer(memory, np.uint8)
        self.address = int(self.memory.ctypes.data)
        self.agent: Any = nixl.nixl_agent(f"probe-{os.getpid()}", nixl.nixl_agent_config())
        self._registered = self.agent.register_memory([(self.address, PAYLOAD_BYTES, 0, "")], "DRAM")

    def serve(self) -> None:
        """Be the owner: say where the memory is, and answer what a byte of it is; give it back when told so."""
        _say({"address": self.address, "metadata": self.agent.get_agent_metadata().hex()})
        while command := sys.stdin.readline().strip():
            if command == "deregister":
                self.agent.deregister_memory(self._registered)
                _say({})
            else:
                _say({"value": int(self.memory[int(command)])})


class Owner:
    """The other process."""

    def __init__(self, kind: str) -> None:
        """Start it as one of this kind."""
        command = [sys.executable, "-m", "benchmarks.nixl_ends", kind]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        told = _heard(self.process)
        self.address: int = told["address"]
        self.metadata = bytes.fromhex(told["metadata"])

    def ask(self, command: str) -> dict[str, Any]:
        """Tell it something and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return _heard(self.process)

    def metadata_of_all(self) -> bytes:
        """Return its metadata as if all of its memory were registered."""
        registered, everything = struct.pack("<Q", PAYLOAD_BYTES), struct.pack("<Q", 2 * PAYLOAD_BYTES)
        assert self.metadata.count(registered) == 1
        return self.metadata.replace(registered, everything)


class Reader:
    """An end that is connected to an owner."""

    def __init__(self, end: End, address: int, metadata: bytes) -> None:
        """Connect to the owner with this metadata, whose memory starts at `address`."""
        self.end, self._address = end, address
        self._name = end.agent.add_remote_agent(metadata)

    def begin(self, pieces: list[tuple[int, int, int]], operation: str = "READ") -> Any:
        """Start to move pieces of memory, each (offset here, offset there, bytes), and return the handle."""
        agent = self.end.agent
        here = agent.get_xfer_descs([(self.end.address + at, size, 0) for at, _, size in pieces], "DRAM")
        there = agent.get_xfer_descs([(self._address + at, size, 0) for _, at, size in pieces], "DRAM")
        handle = agent.initialize_xfer(operation, here, there, self._name)
        agent.transfer(handle)
        return handle

    def state(self, handle: Any) -> str:
        """Return DONE, PROC or ERR."""
        try:
            return str(self.end.agent.check_xfer_state(handle))
        except Exception:  # noqa: BLE001 - its errors have no base of their own
            return "ERR"

    def finish(self, handle: Any) -> str:
        """Wait for the end of a transfer and return how it ended."""
        wait(lambda: self.state(handle) != "PROC")
        state = self.state(handle)
        handle.release()
        return state

    def give_up(self, handle: Any) -> None:
        """Do all that there is to end a transfer: release its handle, and disconnect."""
        handle.release()
        self.end.agent.remove_remote_agent(self._name)

    def move(self, here: int, there: int, operation: str = "READ") -> str:
        """Move a page and return how that ended."""
        return self.finish(self.begin([(here, there, mmap.PAGESIZE)], operation))


@contextmanager
def running_owner(kind: str = "owner") -> Iterator[Owner]:
    """Run an owner of this kind."""
    owner = Owner(kind)
    try:
        yield owner
    finally:
        owner.process.kill()
        owner.process.communicate()


@contextmanager
def running_reader(owner: Owner) -> Iterator[subprocess.Popen[str]]:
    """Run a reader in a process of its own, whose first bytes have come."""
    command = [sys.executable, "-m", "benchmarks.nixl_ends", "reader", str(owner.address), owner.metadata.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            _heard(process)
            yield process
        finally:
            process.kill()


def wait(is_over: Callable[[], bool]) -> None:
    """Wait until something is so."""
    give_up_at = time.monotonic() + SECONDS_MAX
    while not is_over():
        assert time.monotonic() < give_up_at, "it took too long"
        time.sleep(0.0002)


def main() -> None:
    """Be one of the ends."""
    if sys.argv[1] != "reader":
        End(_full_memory(is_confined=sys.argv[1] != "owner")).serve()
        return
    end = End(mmap.mmap(-1, PAYLOAD_BYTES))
    reader = Reader(end, int(sys.argv[2]), bytes.fromhex(sys.argv[3]))
    handle = reader.begin([(0, 0, PAYLOAD_BYTES)])
    wait(lambda: bool(end.memory[0] == SHARED))
    _say({"state": reader.state(handle)})
    sys.stdin.read()


def _full_memory(*, is_confined: bool) -> mmap.mmap:
    """Return an owner's memory, of which one that is confined has only what may be read."""
    descriptor, nbytes = os.memfd_create("owner"), 2 * PAYLOAD_BYTES
    os.ftruncate(descriptor, nbytes)
    content = np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
    content[:PAYLOAD_BYTES], content[PAYLOAD_BYTES:] = SHARED, PRIVATE
    if not is_confined:
        return mmap.mmap(descriptor, nbytes)
    del content  # And its mapping, which may be written.
    return mmap.mmap(descriptor, PAYLOAD_BYTES, prot=mmap.PROT_READ)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the other process has ended"
    answer: dict[str, Any] = json.loads(line)
    return answer


if __name__ == "__main__":
    main()
