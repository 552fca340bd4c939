"""A TCP proxy between two nodes that does what networks do."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, Self

from tests.ports import KeptPort

_PIECE_BYTES = 16_384
_KERNEL_BYTES = 1 << 18
_CLOSING_SECONDS_MAX = 10.0


class Proxy:
    """Passes connections on to a port; what comes back from there can be slowed, stopped, cut or changed."""

    def __init__(self, target_port: int = 0) -> None:
        """Listen on a free port of the loopback."""
        self.target_port = target_port
        self._port = KeptPort()
        self.port = self._port.number
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._runs = threading.Event()
        self.behave()
        self._begin(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def behave(
        self,
        *,
        bytes_per_second: float | None = None,
        delay_seconds: float = 0.0,
        cut_after_bytes: int | None = None,
        flip_at_byte: int | None = None,
        stop_after_bytes: int | None = None,
    ) -> None:
        """Count from 0 again, and treat from now on what comes back from the target like this."""
        with self._lock:
            self.passed_bytes = 0
            self._bytes_per_second = bytes_per_second
            self._delay_seconds = delay_seconds
            self._cut_after_bytes = cut_after_bytes
            self._flip_at_byte = flip_at_byte
            self._stop_after_bytes = stop_after_bytes
            self._runs.set()

    def cut(self) -> None:
        """Break every connection."""
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            _shut(one)

    def bar(self) -> None:
        """Let nobody connect any more, break every connection, and wait until nothing runs any more."""
        self._is_closed = True
        self._runs.set()
        _shut(self._listener)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(_CLOSING_SECONDS_MAX)

    def close(self) -> None:
        """Stop, and leave the port to others."""
        self.bar()
        self._port.close()

    def _begin(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type] # any function
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            # What the kernel keeps here has left its sender, as on no network of this speed.
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
            try:
                far.connect(("127.0.0.1", self.target_port))
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            up = threading.Thread(target=self._pump, args=(near, far, False), daemon=True)
            up.start()
            self._begin(self._serve, near, far, up)

    def _serve(self, near: socket.socket, far: socket.socket, up: threading.Thread) -> None:
        self._pump(far, near, True)
        up.join()
        with self._lock:
            self._sockets -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket, is_down: bool) -> None:
        with suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                passed = self._treated(piece) if is_down else piece
                sink.sendall(passed)
                if len(passed) < len(piece):
                    break
        _shut(source)
        _shut(sink)

    def _treated(self, piece: bytes) -> bytes:
        with self._lock:
            begins_at, self.passed_bytes = self.passed_bytes, self.passed_bytes + len(piece)
            pause = self._delay_seconds
            if self._bytes_per_second is not None:
                pause += len(piece) / self._bytes_per_second
            if self._stop_after_bytes is not None and self.passed_bytes > self._stop_after_bytes:
                self._runs.clear()
        time.sleep(pause)
        self._runs.wait()
        with self._lock:
            return self._changed(piece, begins_at)

    def _changed(self, piece: bytes, begins_at: int) -> bytes:
        flip, cut = self._flip_at_byte, self._cut_after_bytes
        if flip is not None and begins_at <= flip < begins_at + len(piece):
            index = flip - begins_at
            piece = piece[:index] + bytes([piece[index] ^ 1]) + piece[index + 1 :]
        if cut is not None and begins_at + len(piece) > cut:
            return piece[: max(cut - begins_at, 0)]
        return piece


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class Network:
    """What lies between two nodes: a proxy for calls and, if bytes take another way, one for them."""

    def __init__(self, calls: Proxy, *others: Proxy) -> None:
        """Treat all alike."""
        self._calls = calls
        self._proxies = (calls, *others)

    @property
    def target_port(self) -> int:
        """Return where calls are passed on to."""
        return self._calls.target_port

    @target_port.setter
    def target_port(self, port: int) -> None:
        self._calls.target_port = port

    @property
    def bulk(self) -> Proxy:
        """Return the proxy for bytes, which is that for calls if there is one way for both."""
        return self._proxies[-1]

    @property
    def port(self) -> int:
        """Return where calls are taken."""
        return self._calls.port

    @property
    def passed_bytes(self) -> int:
        """Return what has come back since `behave`."""
        return sum(proxy.passed_bytes for proxy in self._proxies)

    def behave(self, **how: Any) -> None:
        """Behave as `Proxy.behave` says, on every way."""
        for proxy in self._proxies:
            proxy.behave(**how)

    def cut(self) -> None:
        """Break every connection."""
        for proxy in self._proxies:
            proxy.cut()
