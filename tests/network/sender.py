"""A process that owns bytes of any length and nothing else: the far end of a link, without a node around it.

What it serves follows from the lease token, which is the number of bytes. It reads commands, one a line, from its
standard input: `pull PORT COUNT TIMES` pulls so many bytes so often at once from the one at that port, and answers with
a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from grpc import aio

from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.link import tcp
from kvbridge.link.grpc_peer import GrpcPeer
from kvbridge.link.secured import SecuredConnection, secured
from kvbridge.link.security import UNSECURED, PeerSecurity, Unsecured
from kvbridge.v1 import handoff_service_pb2 as handoff_pb
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, encode_chunk
from tests.certificates import Authority
from tests.network.box import Box

NODE = "sender"
OWN_PORT = -1
"""Stands for the port for bytes that a sender finds for itself."""
CA_NAME, CERTIFICATE_NAME, KEY_NAME = "ca.pem", "certificate.pem", "key.pem"
CHUNK_BYTES = 65_537
"""Size of a chunk; it fits no page and no power of two."""
ODD_BYTES = 1_000_003
"""Period of the content: a prime, so that bytes at a wrong place are wrong bytes."""
START_SECONDS_MAX = 60.0
SECONDS_MAX = 60.0
_LOOK_SECONDS = 1.0


@lru_cache(maxsize=2)
def content(count: int) -> memoryview:
    """Return so many bytes, the same in every process."""
    period = np.random.default_rng(5).integers(0, 256, ODD_BYTES, np.uint8)
    return np.resize(period, count).data.toreadonly()


class Pieces:
    """Bytes to be sent; a `tcp.Source`."""

    def __init__(self, count: int) -> None:
        """Begin at the first byte."""
        self._left = content(count)

    def look(self) -> None:
        """Say that they may be sent."""

    def views(self) -> Sequence[memoryview]:
        """Return the next bytes; none at the end."""
        return [self._left[:CHUNK_BYTES]] if self._left.nbytes else []

    def advance(self, nbytes: int) -> None:
        """Go on behind so many of them."""
        self._left = self._left[nbytes:]


class Server:
    """Serves bytes by gRPC and, if it is told of a port for that, by plain TCP."""

    def __init__(self, bulk_port_told: int, secret: str = "") -> None:
        """Tell others of that port for bytes: 0 for none, `OWN_PORT` for the one that is listened on.

        It is secured by the certificate in the folder `secret`, if there is one.
        """
        self._told = bulk_port_told
        self._context = server_context(secret) if secret else None
        self._server = aio.server()
        self._bulk: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.bulk_port = 0

    async def start(self) -> None:
        """Listen on free ports."""
        peer = {"Ping": grpc.unary_unary_rpc_method_handler(self._ping)}
        handoff = {"Download": grpc.unary_stream_rpc_method_handler(self._download)}
        for service, methods in (("PeerService", peer), ("HandoffService", handoff)):
            handler = grpc.method_handlers_generic_handler(f"kvbridge.v1.{service}", methods)
            self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        listener.setblocking(False)
        self.bulk_port = listener.getsockname()[1]
        self._told = self.bulk_port if self._told == OWN_PORT else self._told
        self._begin(self._accept(listener))

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            self._begin(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            await self._send(connection if self._context is None else await secured(connection, self._context))

    async def _send(self, connection: socket.socket | SecuredConnection) -> None:
        with connection, suppress(OSError, BridgeError, ValueError):
            token = (await tcp.read_request(connection)).lease_token
            count = int(token)
            await tcp.send(connection, count, Pieces(count), look_seconds=_LOOK_SECONDS)

    async def _ping(self, _: bytes, __: Any) -> bytes:
        return pb.PingResponse(node_id=NODE, epoch=1, bulk_port=self._told).SerializeToString()

    async def _download(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        token = handoff_pb.DownloadRequest.FromString(request).lease_token
        if not token.isdigit():
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such lease")
        pieces = Pieces(int(token))
        while views := pieces.views():
            yield encode_chunk(list(views), DOWNLOAD_CHUNK_TAG)
            pieces.advance(sum(view.nbytes for view in views))

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class SenderProcess:
    """A sender in a process of its own, which can be frozen and killed."""

    def __init__(self, bulk_port_told: int, secret: str = "") -> None:
        """Start it; the port that it tells others of, and the folder of its certificate, are as for `Server`."""
        command = [sys.executable, "-m", "tests.network.sender", str(bulk_port_told), secret]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ports = self.answer()
        self.port, self.bulk_port = ports["port"], ports["bulk_port"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and wait for its end."""
        self.process.kill()
        self.process.communicate()

    def tell(self, command: str) -> None:
        """Give it a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next line that it writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the sender has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


class OnlyBytesSecured(Unsecured):
    """Calls that are not secured, and bytes that are, by the authority in a folder; a `PeerSecurity`."""

    def __init__(self, secret: str) -> None:
        """Trust that authority."""
        self._context = ssl.create_default_context(cafile=str(Path(secret, CA_NAME)))

    def context(self) -> ssl.SSLContext:  # type: ignore[override] # where the other has none
        """Return what secures connections for bytes."""
        return self._context


def server_context(secret: str) -> ssl.SSLContext:
    """Return what secures the far end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(secret, CERTIFICATE_NAME), Path(secret, KEY_NAME))
    return context


def make_secret(folder: Path) -> str:
    """Write a certificate for the loopback, its key and its authority into a folder, and return its path."""
    authority = Authority()
    issued = authority.issue("127.0.0.1", "localhost")
    files = {CA_NAME: authority.certificate, CERTIFICATE_NAME: issued.certificate, KEY_NAME: issued.key}
    for name, pem in files.items():
        Path(folder, name).write_bytes(pem)
    return str(folder)


def security(secret: str) -> PeerSecurity:
    """Return how a sender with this certificate is reached."""
    return OnlyBytesSecured(secret) if secret else UNSECURED


async def pull_all(port: int, count: int, secret: str) -> str:
    """Pull so many bytes from the sender at `port` and return which way they took, if they are right."""
    target = f"127.0.0.1:{port}"
    peer = GrpcPeer(NODE, target, client_name="node.sender.0123456789abcdef", security=security(secret))
    try:
        await peer.ping(seconds_max=SECONDS_MAX)
        box = Box(count)
        way = await peer.pull(str(count), box, seconds_max=SECONDS_MAX)
    finally:
        await peer.close()
    if not box.holds(content(count)):
        raise InvalidFieldError("content", "is not what was sent")
    return way.name


async def main(bulk_port_told: int, secret: str) -> None:
    """Serve, and obey, until the input ends."""
    server = Server(bulk_port_told, secret)
    await server.start()
    _say({"port": server.port, "bulk_port": server.bulk_port})
    while line := await asyncio.to_thread(sys.stdin.readline):
        port, count, times = map(int, line.split()[1:])
        _say({"ways": await asyncio.gather(*(pull_all(port, count, secret) for _ in range(times)))})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
