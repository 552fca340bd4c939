"""Measures what keeps NIXL from being a way for bytes: `pip install nixl-cu12`, then `python -m benchmarks.nixl_probe`.

Two processes on this machine: a reader, and an owner that registers the first half of its memory and keeps the rest to
itself. UCX uses TCP over the loopback unless `UCX_TLS` and `UCX_NET_DEVICES` say otherwise. Each line names something
that a node needs of a way for bytes and says what was found; the exit status is 1 unless all of it is so.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.nixl_ends import (
    MIB,
    PAYLOAD_BYTES,
    PRIVATE,
    SETTINGS,
    SHARED,
    End,
    Owner,
    Reader,
    running_owner,
    running_reader,
    wait,
)

PIECE_BYTES = 4 * MIB
STRIPS, STRIP_BYTES = 2048, 32 * 1024
DEATHS = 4
REPETITIONS = 3
IDLE_SHARE_MAX = 0.01
"""An agent takes less of one processor than this, if nothing is asked of it."""
_CLEAN, _WRITTEN = 0, 5
Finding = tuple[bool, str]
"""Whether it is as a node needs it, and the figures."""


def main() -> int:
    """Measure, print, and return the exit status."""
    os.environ.update(SETTINGS | {name: os.environ[name] for name in SETTINGS if name in os.environ})
    end = End(mmap.mmap(-1, PAYLOAD_BYTES))
    findings = {
        "an agent that does nothing takes no processor": idle(),
        "it is as fast as a socket": against(end, speeds),
        "a transfer that was given up writes nothing": against(end, late_writes),
        "only what is registered can be reached": against(end, exposure),
        "the end of an owner is noticed": against(end, dead_owner),
        "an owner survives the end of its readers": dead_readers(),
        "a process that may only read serves reads": confined(end),
    }
    for need, (is_so, figures) in findings.items():
        print(f"{'yes' if is_so else 'NO':4}{need}: {figures}")
    return 0 if all(is_so for is_so, _ in findings.values()) else 1


def against(end: End, measure: Callable[[Reader, Owner], Finding]) -> Finding:
    """Measure something with an owner of its own, all of whose memory this process claims to be told of."""
    with running_owner() as owner:
        return measure(Reader(end, owner.address, owner.metadata_of_all()), owner)


def idle() -> Finding:
    """Let an agent be for a while; its thread is what serves reads by TCP."""
    started_at, idle_seconds = time.process_time(), 2.0
    time.sleep(idle_seconds)
    share = (time.process_time() - started_at) / idle_seconds
    return share < IDLE_SHARE_MAX, f"{share:.0%} of one"


def speeds(reader: Reader, _: Owner) -> Finding:
    """Compare reads with a plain socket: at once, in strips, and by pieces that are copied from where they came to."""
    strips = [(at, at, STRIP_BYTES) for at in range(0, 2 * STRIPS * STRIP_BYTES, 2 * STRIP_BYTES)]
    target = np.zeros(PAYLOAD_BYTES, np.uint8)
    with plain_socket(target) as plain:
        works: dict[str, tuple[int, Callable[[], object]]] = {
            "socket": (PAYLOAD_BYTES, plain),
            "at once": (PAYLOAD_BYTES, lambda: reader.finish(reader.begin([(0, 0, PAYLOAD_BYTES)]))),
            f"in {STRIPS} strips": (STRIPS * STRIP_BYTES, lambda: reader.finish(reader.begin(strips))),
            "staged": (PAYLOAD_BYTES, lambda: staged(reader, target)),
        }
        rates = {
            name: size / min(seconds(work) for _ in range(REPETITIONS)) / 1e9 for name, (size, work) in works.items()
        }
    assert (target == SHARED).all()
    figures = ", ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items())
    return rates["staged"] > rates["socket"], figures


def staged(reader: Reader, target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    """Read pieces into two places by turns, and copy each to where it belongs once it is whole."""
    memory, started = reader.end.memory, [reader.begin([(0, 0, PIECE_BYTES)])]
    for at in range(0, PAYLOAD_BYTES, PIECE_BYTES):
        here, following = at % (2 * PIECE_BYTES), at + PIECE_BYTES
        if following < PAYLOAD_BYTES:
            started.append(reader.begin([(PIECE_BYTES - here, following, PIECE_BYTES)]))
        assert reader.finish(started.pop(0)) == "DONE"
        target[at:following] = memory[here : here + PIECE_BYTES]


def late_writes(reader: Reader, owner: Owner) -> Finding:
    """Give a transfer up while the owner is frozen, overwrite the memory, thaw the owner, and look."""
    memory = reader.end.memory
    memory[:] = _CLEAN
    handle = reader.begin([(0, 0, PAYLOAD_BYTES)])
    wait(lambda: bool(memory[0] == SHARED) or reader.state(handle) != "PROC")
    owner.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)  # What is in the sockets already is no matter.
    state = reader.state(handle)
    reader.give_up(handle)
    memory[:] = _CLEAN
    owner.process.send_signal(signal.SIGCONT)
    time.sleep(4.0)
    late = int((memory != _CLEAN).sum())
    return state == "PROC" and not late, f"it was {state}; {late} of {PAYLOAD_BYTES} bytes came later"


def exposure(reader: Reader, owner: Owner) -> Finding:
    """Read and write what the owner has never registered, and what it has given back."""
    memory, secret_at = reader.end.memory, PAYLOAD_BYTES + MIB
    memory[: 2 * MIB] = _WRITTEN
    reader.move(0, secret_at)
    is_read = bool(memory[0] == PRIVATE)
    reader.move(MIB, secret_at, "WRITE")
    is_written = owner.ask(str(secret_at))["value"] == _WRITTEN
    owner.ask("deregister")
    reader.move(MIB, MIB, "WRITE")
    is_written_later = owner.ask(str(MIB))["value"] == _WRITTEN
    is_kept = not (is_read or is_written or is_written_later)
    return is_kept, f"unregistered: read {is_read}, written {is_written}; deregistered: written {is_written_later}"


def dead_owner(reader: Reader, owner: Owner) -> Finding:
    """Kill the owner in the middle."""
    handle = reader.begin([(0, 0, PAYLOAD_BYTES)])
    time.sleep(0.05)
    owner.process.kill()
    noticed = seconds(lambda: wait(lambda: reader.state(handle) != "PROC"))
    return reader.state(handle) == "ERR", f"the read was {reader.state(handle)} after {noticed:.3f} s"


def dead_readers() -> Finding:
    """Kill readers in the middle while their owner is stopped for a moment, as one is that swaps or is traced."""
    ended = 0
    for _ in range(DEATHS):
        with running_owner() as owner, running_reader(owner) as reader:
            owner.process.send_signal(signal.SIGSTOP)
            time.sleep(0.2)
            reader.kill()
            reader.wait()
            owner.process.send_signal(signal.SIGCONT)
            time.sleep(3.0)
            ended += owner.process.poll() is not None
    return not ended, f"{ended} of {DEATHS} owners aborted"


def confined(end: End) -> Finding:
    """Read from an owner that may only read its own memory, and write there."""
    with running_owner("confined-owner") as owner:
        reader = Reader(end, owner.address, owner.metadata)
        read, written = reader.move(0, 0), reader.move(0, 0, "WRITE")
        time.sleep(1.0)
        return read == "DONE", f"a read was {read}, a write {written}, and the owner ended with {owner.process.poll()}"


@contextmanager
def plain_socket(target: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Iterator[Callable[[], None]]:
    """Give what receives as many bytes from another process over a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, view = server.getsockname()[1], target.data
        command = [sys.executable, "-m", "benchmarks.raw_sender", "127.0.0.1", str(port), str(len(view))]
        with subprocess.Popen(command), server.accept()[0] as connection:

            def receive() -> None:
                connection.sendall(b"!")
                received = 0
                while received < len(view):
                    received += connection.recv_into(view[received:])

            yield receive


def seconds(action: Callable[[], object]) -> float:
    """Return how long something takes."""
    started_at = time.perf_counter()
    action()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    sys.exit(main())
