"""The far end of each kind of link, with a network between that does what a test wants."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from kvbridge.link.grpc_peer import GrpcPeer
from kvbridge.link.memory import CAPABILITIES, Behaviour, MemoryPayload, MemoryPeer
from kvbridge.link.port import Peer
from tests.network.box import Box
from tests.network.proxy import Network, Proxy
from tests.network.sender import NODE, OWN_PORT, SenderProcess, content, make_secret, security
from tests.unit.node.nodes import payload

SLOW_BYTES_PER_SECOND = 4e6
_SLOW_CHUNK_BYTES = 16_384


class FarEnd(Protocol):
    """Another node that leases any number of bytes."""

    name: str
    """The kind of link."""
    way: str
    """The way that bytes take by it."""

    async def connect(self) -> Peer:
        """Return the node as a peer that knows which way bytes are to take."""

    def lease(self, count: int) -> str:
        """Return the token of a lease on so many bytes."""

    def behave(self) -> None:
        """Be fast and faultless."""

    def slow_down(self) -> None:
        """Send so slowly that a mebibyte takes a quarter of a second."""

    def cut_at(self, position: int) -> None:
        """End the next stream in the middle, as if the sender had closed it."""

    def reset(self) -> None:
        """Break what is under way."""

    def corrupt_at(self, position: int) -> None:
        """Let a byte arrive as another one."""

    def freeze(self) -> None:
        """Stop the process."""

    def thaw(self) -> None:
        """Let it go on."""

    def kill(self) -> None:
        """Kill the process."""

    def start_again(self) -> None:
        """Start it again at the same address."""

    async def pull_both_ways(self, count: int, times: int) -> list[str]:
        """Pull so many bytes so often in both directions at once, and return which ways they took."""


class ProcessEnd:
    """A sender in a process of its own behind proxies; a `FarEnd`."""

    def __init__(self, name: str) -> None:
        """Start it; bytes take the way `name`."""
        self.name = name
        self.way = "tcp" if name == "tls" else name
        self._calls, self._bulk = Proxy(), Proxy()
        self._network = Network(self._calls) if name == "grpc" else Network(self._calls, self._bulk)
        self._folder = tempfile.TemporaryDirectory(prefix="kvb-")
        self._secret = make_secret(Path(self._folder.name)) if name == "tls" else ""
        self._process: SenderProcess
        self.start_again()

    async def connect(self) -> Peer:
        """Return the sender as a peer."""
        target = f"127.0.0.1:{self._calls.port}"
        peer = GrpcPeer(NODE, target, client_name="node.test.0123456789abcdef", security=security(self._secret))
        await peer.ping(seconds_max=30.0)
        return peer

    def lease(self, count: int) -> str:
        """Return a token: the sender serves as many bytes as it says."""
        return str(count)

    def behave(self) -> None:
        """Pass everything on."""
        self._network.behave()

    def slow_down(self) -> None:
        """Pass bytes on slowly."""
        self._network.behave(bytes_per_second=SLOW_BYTES_PER_SECOND)

    def cut_at(self, position: int) -> None:
        """Close the connection in the middle."""
        self._network.behave(cut_after_bytes=position)

    def reset(self) -> None:
        """Break every connection."""
        self._network.cut()

    def corrupt_at(self, position: int) -> None:
        """Change a byte on its way."""
        self._network.behave(flip_at_byte=position)

    def freeze(self) -> None:
        """Stop the process."""
        self._process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def start_again(self) -> None:
        """Start a process behind the same proxies."""
        self._process = SenderProcess(0 if self.name == "grpc" else self._bulk.port, self._secret)
        self._calls.target_port, self._bulk.target_port = self._process.port, self._process.bulk_port

    async def pull_both_ways(self, count: int, times: int) -> list[str]:
        """Let two processes pull from each other."""
        with SenderProcess(0 if self.name == "grpc" else OWN_PORT, self._secret) as other:
            other.tell(f"pull {self._calls.port} {count} {times}")
            self._process.tell(f"pull {other.port} {count} {times}")
            answers = await asyncio.gather(*(asyncio.to_thread(end.answer) for end in (other, self._process)))
        return [way for answer in answers for way in answer["ways"]]

    def close(self) -> None:
        """End everything."""
        self._process.kill()
        self._calls.close()
        self._bulk.close()
        self._folder.cleanup()


class MemoryEnd:
    """A node in this process' memory; a `FarEnd`."""

    name = way = CAPABILITIES.name

    def __init__(self) -> None:
        """Behave well."""
        self._peer = MemoryPeer(NODE)

    async def connect(self) -> Peer:
        """Return the node."""
        return self._peer

    def lease(self, count: int) -> str:
        """Lease so many bytes."""
        token = str(count)
        self._peer.leases[token] = MemoryPayload(descriptor=payload().descriptor, content=bytes(content(count)))
        return token

    def behave(self) -> None:
        """Be fast and faultless."""
        self._peer.behaviour = Behaviour()

    def slow_down(self) -> None:
        """Let every chunk take a while."""
        seconds = _SLOW_CHUNK_BYTES / SLOW_BYTES_PER_SECOND
        self._peer.behaviour = Behaviour(chunk_bytes=_SLOW_CHUNK_BYTES, chunk_seconds=seconds)

    def cut_at(self, position: int) -> None:
        """Break off in the middle."""
        self._peer.behaviour = Behaviour(chunk_bytes=_SLOW_CHUNK_BYTES, breaks_after_bytes=position)

    def reset(self) -> None:
        """Break what is under way."""
        self._peer.behaviour.breaks_after_bytes = 0

    def corrupt_at(self, position: int) -> None:
        """Let a byte arrive as another one."""
        self._peer.behaviour = Behaviour(flips_byte=position)

    def freeze(self) -> None:
        """Answer nothing."""
        self._peer.behaviour.is_frozen = True

    def thaw(self) -> None:
        """Go on."""
        self._peer.behaviour.is_frozen = False

    def kill(self) -> None:
        """Refuse connections."""
        self._peer.behaviour.is_gone = True

    def start_again(self) -> None:
        """Come back with nothing."""
        self._peer.restart()

    async def pull_both_ways(self, count: int, times: int) -> list[str]:
        """Let two nodes be pulled from at once."""
        peers = (self._peer, MemoryPeer("another"))
        for peer in peers:
            peer.leases["both"] = MemoryPayload(descriptor=payload().descriptor, content=bytes(content(count)))
        boxes = [(peer, Box(count)) for peer in peers for _ in range(times)]
        ways = await asyncio.gather(*(peer.pull("both", box, seconds_max=30.0) for peer, box in boxes))
        assert all(box.holds(content(count)) for _, box in boxes)
        return [way.name for way in ways]

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def far_end(name: str) -> Iterator[FarEnd]:
    """Run the far end of a link of this kind."""
    end: ProcessEnd | MemoryEnd = MemoryEnd() if name == CAPABILITIES.name else ProcessEnd(name)
    try:
        yield end
    finally:
        end.close()
