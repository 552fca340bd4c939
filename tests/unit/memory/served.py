"""A descriptor server on an event loop of its own, so that tests can be its blocking clients."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvbridge.memory.arena import HostArena
from kvbridge.memory.descriptor_socket import (
    DescriptorServer,
    DescriptorServerSnapshot,
    DescriptorSocketLimits,
    PeerCredentials,
    SessionInfo,
    new_session_token,
)
from kvbridge.memory.errors import DescriptorRefusedError, RefusalCode
from kvbridge.v1 import descriptor_socket_pb2 as pb

WAIT_SECONDS = 30.0
EPOCH = 0xFEDCBA9876543210
REPOSITORY = Path(__file__).parents[3]
ATTACH = pb.DescriptorSocketRequest(request_number=1, attach=pb.AttachRequest(protocol_version=1)).SerializeToString()

Result = TypeVar("Result")


class RecordingPort:
    """A node that lets everybody in and remembers who came and went."""

    def __init__(self) -> None:
        self.arenas: dict[str, HostArena] = {}
        self.peers: list[PeerCredentials] = []
        self.ends: queue.Queue[str] = queue.Queue()
        self.before_answer: Callable[[], None] = lambda: None

    def attach(self, peer: PeerCredentials) -> SessionInfo:
        self.before_answer()
        self.peers.append(peer)
        return SessionInfo(session_token=new_session_token(), tenant=f"user-{peer.uid}", epoch=EPOCH)

    def arena(self, session_token: str, arena_id: str) -> HostArena:
        assert session_token
        self.before_answer()
        if arena_id not in self.arenas:
            raise DescriptorRefusedError(RefusalCode.ARENA_UNKNOWN, f"no arena {arena_id}")
        return self.arenas[arena_id]

    def ended(self, session_token: str) -> None:
        self.ends.put(session_token)

    def wait_ended(self) -> str:
        """Return the token of the next session that ends."""
        return self.ends.get(timeout=WAIT_SECONDS)


class Served:
    """A started server, its port, and the thread that runs its loop."""

    def __init__(self, path: Path, limits: DescriptorSocketLimits | None = None) -> None:
        self.path = path
        self.port = RecordingPort()
        self.failures: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = DescriptorServer(path, self.port, limits)
        try:
            self.run(self.server.start())
        except BaseException:
            self._stop_loop()
            raise

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_SECONDS)

    def open_descriptors(self) -> int:
        """Return how many file descriptors this process has when the loop has finished what it is at."""
        self.run(asyncio.sleep(0))
        return open_descriptors()

    def snapshot(self) -> DescriptorServerSnapshot:
        """Return the server's state when the loop has finished what it is at."""

        async def take() -> DescriptorServerSnapshot:
            return self.server.snapshot()

        return self.run(take())

    def close(self) -> None:
        """Close server, loop and arenas."""
        self.run(self.server.close())
        self._stop_loop()
        for arena in self.port.arenas.values():
            arena.close()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()


@contextmanager
def serving(path: Path, limits: DescriptorSocketLimits | None = None) -> Iterator[Served]:
    """Serve at `path` with two small arenas of different size, `small` and `large`."""
    served = Served(path, limits)
    served.port.arenas["small"] = HostArena("small", 1 << 20, pretouch=False)
    served.port.arenas["large"] = HostArena("large", 2 << 20, pretouch=False)
    try:
        yield served
    finally:
        served.close()


@contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    """Connect to the socket without attaching."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_SECONDS)
        sock.connect(os.fspath(path))
        yield sock


def receive(sock: socket.socket) -> pb.DescriptorSocketResponse | None:
    """Receive one response, `None` at the end of the connection."""
    packet = sock.recv(1 << 16)
    return pb.DescriptorSocketResponse.FromString(packet) if packet else None


def refusal(sock: socket.socket) -> RefusalCode:
    """Receive a refusal, and check that the connection ends with it."""
    response = receive(sock)
    assert response is not None
    assert response.WhichOneof("response") == "error"
    assert receive(sock) is None
    return RefusalCode(response.error.code)


@contextmanager
def child(script: str, *arguments: str | Path, pass_fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a Python script in a process of its own, which is killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=pass_fds,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a child prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def open_descriptors() -> int:
    """Return how many file descriptors this process has."""
    gc.collect()  # What earlier tests left to the collector is none of this one's.
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def is_mapped(address: int) -> bool:
    """Tell whether an address belongs to a mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(" ", 1)[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return True
    return False
