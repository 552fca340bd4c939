"""Two nodes' views of one directory, whatever keeps it, and what can happen to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.orders import Order
from kvbridge.directory import Directory, Entry, Member
from kvbridge.directory.asking import AskingDirectory, Roll, StaticRoll
from kvbridge.directory.dns import DnsRoll
from kvbridge.directory.memory import MemoryDirectory, MemoryHub
from kvbridge.directory.redis import RedisDirectory
from kvbridge.link.neighbour import Greeting, Neighbour, OrderNews, Owned
from kvbridge.link.port import OwnerUnreachableError
from tests.directory.servers import DirectoryServer

TIMEOUT_SECONDS = 2.0
TTL_SECONDS = 20.0
"""Longer than any test takes: whoever is no longer there was told to be gone, or forgotten."""
A = Member(node_id="node-a", target="127.0.0.1:1001", epoch=11)
B = Member(node_id="node-b", target="127.0.0.1:1002", epoch=12)
C = Member(node_id="node-c", target="127.0.0.1:1003", epoch=13)


class World(Protocol):
    """A directory that both nodes use."""

    def open(self) -> Directory:
        """Return one node's view."""

    async def own(self, directory: Directory, me: Member, *entries: Entry) -> None:
        """Let a node own these, or no longer."""

    def freeze(self) -> None:
        """Let nobody get an answer."""

    def thaw(self) -> None:
        """Let everybody go on."""

    def lose(self) -> None:
        """Let the directory be gone."""

    def restore(self) -> None:
        """Let it be there again, perhaps without what it knew."""


class _Told:
    """What is told to whoever keeps it."""

    async def own(self, directory: Directory, me: Member, *entries: Entry) -> None:
        await directory.announce(me, entries)


class MemoryWorld(_Told):
    """A hub in memory."""

    def __init__(self) -> None:
        self._hub = MemoryHub(ttl_seconds=TTL_SECONDS, clock=time.monotonic)

    def open(self) -> Directory:
        return MemoryDirectory(self._hub, timeout_seconds=TIMEOUT_SECONDS)

    def freeze(self) -> None:
        self._hub.behaviour.is_frozen = True

    def thaw(self) -> None:
        self._hub.behaviour.is_frozen = False

    def lose(self) -> None:
        self._hub.behaviour.is_gone = True

    def restore(self) -> None:
        self._hub.flush()
        self._hub.behaviour.is_gone = False


class RedisWorld(_Told):
    """A real server."""

    def __init__(self, server: DirectoryServer) -> None:
        self._server = server

    def open(self) -> Directory:
        return RedisDirectory(
            self._server.url,
            prefix="test",
            ttl_seconds=TTL_SECONDS,
            key_ttl_seconds=60.0,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def freeze(self) -> None:
        self._server.freeze()

    def thaw(self) -> None:
        self._server.thaw()

    def lose(self) -> None:
        self._server.kill()

    def restore(self) -> None:
        self._server.start()


class _MemoryNeighbour:
    """One node that can be asked."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.owned: dict[tuple[str, str], Owned] = {}
        self.is_frozen = False
        self.is_gone = False

    async def greet(self, *, seconds_max: float) -> Greeting:
        await self._answer(seconds_max)
        return Greeting(node_id=self.member.node_id, epoch=self.member.epoch, draining=False, orders_digest=b"")

    async def locate(self, tenant: str, keys: Sequence[str], *, seconds_max: float) -> Mapping[str, Owned]:
        await self._answer(seconds_max)
        return {key: self.owned[tenant, key] for key in keys if (tenant, key) in self.owned}

    async def exchange(self, news: OrderNews, *, seconds_max: float) -> OrderNews:
        await self._answer(seconds_max)
        return news

    async def _answer(self, seconds_max: float) -> None:
        if self.is_frozen:
            await asyncio.sleep(seconds_max)
        if self.is_frozen or self.is_gone:
            raise OwnerUnreachableError("it does not answer")


class AskingWorld:
    """Nodes that are asked themselves, at known addresses or behind one name."""

    def __init__(self, *, by_name: bool) -> None:
        self._by_name = by_name
        self.nodes = {member.node_id: _MemoryNeighbour(member) for member in (A, B, C)}

    def neighbour(self, node_id: str) -> Neighbour | None:
        return self.nodes.get(node_id)

    def learn(self, targets: Mapping[str, str]) -> None:
        assert targets is not None

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        [node] = [node for node in self.nodes.values() if node.member.target == target]
        return await node.greet(seconds_max=seconds_max)

    def open(self) -> Directory:
        return AskingDirectory(self._roll(), self, timeout_seconds=TIMEOUT_SECONDS)

    async def own(self, directory: Directory, me: Member, *entries: Entry) -> None:
        await directory.announce(me, entries)
        for entry in entries:
            owned = self.nodes[me.node_id].owned
            owned.pop((entry.tenant, entry.key), None)
            if entry.generation:
                reference = PayloadReference(key=entry.key, generation=entry.generation)
                owned[entry.tenant, entry.key] = Owned(reference=reference, committed_at=entry.committed_at)

    def freeze(self) -> None:
        for node in self.nodes.values():
            node.is_frozen = True

    def thaw(self) -> None:
        for node in self.nodes.values():
            node.is_frozen = False

    def lose(self) -> None:
        for node in self.nodes.values():
            node.is_gone = True

    def restore(self) -> None:
        for node in self.nodes.values():
            node.is_gone = False

    def _roll(self) -> Roll:
        if not self._by_name:
            return StaticRoll({member.node_id: member.target for member in (A, C)})
        return DnsRoll(
            "nodes",
            1,
            self,
            seconds=0.0,
            timeout_seconds=TIMEOUT_SECONDS,
            resolve=lambda _, __: [A.target, B.target, C.target],
        )


class Ear:
    """Hears orders."""

    def __init__(self) -> None:
        self.heard: dict[str, Order] = {}
        self._came = asyncio.Event()

    def __call__(self, order: Order) -> None:
        self.heard[order.order_id] = order
        self._came.set()

    async def wait_for(self, order_id: str, *, seconds_max: float = 10.0) -> Order:
        """Return an order once it has come."""
        async with asyncio.timeout(seconds_max):
            while order_id not in self.heard:
                self._came.clear()
                await self._came.wait()
        return self.heard[order_id]
