"""Links between simulated nodes: they delay, lose, repeat, cut and garble what nodes say to one another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import BridgeError
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm
from kvbridge.link.port import (
    Capabilities,
    Closed,
    Opened,
    OwnerUnreachableError,
    ReplicaNotice,
    TransferFailedError,
)
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.lending import Refused
from kvbridge.node.streams import canonical_chunks
from tests.sim.content import layout_of
from tests.sim.failpoints import Failpoint

if TYPE_CHECKING:
    from kvbridge.link.port import Peer, Sink
    from tests.sim.node import Start
    from tests.sim.world import World

CAPABILITIES = Capabilities(name="simulated", one_sided=False, abortable=True, device_memory=False, zero_copy=False)
"""What simulated wires can do."""
CHUNK_BYTES = 3000
"""Size of a chunk; it fits no page and no strip."""


class Wires:
    """What lies between the nodes."""

    def __init__(self, seed: str, *, lost_share: float, garbled_share: float) -> None:
        """Lose and garble these shares of all messages and chunks."""
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes that do not hear one another."""
        self.chance = random.Random(f"{seed} wires")
        self.lost_share, self.garbled_share = lost_share, garbled_share
        self.slowness: Callable[[str, str], float] = lambda *_: 1.0
        """How much longer everything takes between two nodes."""

    def heal(self) -> None:
        """Behave well from now on."""
        self.cut.clear()
        self.lost_share = self.garbled_share = 0.0

    async def carry(self, one: str, other: str) -> None:
        """Take a message from one node to another; never return if it is lost."""
        await asyncio.sleep(self.chance.choice((0.001, 0.01, 0.05, 0.4)) * self.slowness(one, other))
        if frozenset((one, other)) in self.cut or self.chance.random() < self.lost_share:
            await asyncio.get_running_loop().create_future()

    def repeats(self) -> bool:
        """Tell whether a message arrives twice."""
        return self.chance.random() < 0.1

    def garble(self, chunk: bytes) -> bytes:
        """Return what arrives of a chunk."""
        if self.chance.random() >= self.garbled_share:
            return chunk
        index = self.chance.randrange(len(chunk))
        return chunk[:index] + bytes([chunk[index] ^ 1]) + chunk[index + 1 :]


class SimulatedPeer:
    """Another node, whichever start of it there is; a `Peer`."""

    def __init__(self, world: World, caller: Start, host: str) -> None:
        """Let `caller` call `host`."""
        self.outstanding: set[str] = set()
        """Leases that the caller knows of and has not given back."""
        self._world, self._caller, self._host = world, caller, host
        self._leased: dict[str, tuple[str, str]] = {}
        """Tenant and handoff reference of every lease."""

    @property
    def capabilities(self) -> Capabilities:
        """Return what the wires can do."""
        return CAPABILITIES

    async def ping(self, *, seconds_max: float) -> int:
        """Return the boot epoch; errors as for `Peer.ping`."""
        async with self._answered(seconds_max):
            await self._request(Failpoint.PING_REQUEST)
            owner = self._owner()
            await self._carry()
        self._caller.hear(owner)
        return owner.bridge.epoch

    async def open(
        self, tenant: str, reference: PayloadReference, *, seconds_max: float, owner_epoch: int = 0
    ) -> Opened | Closed:
        """Lease a payload, or a replica; errors as for `Peer.open`."""
        is_replica = is_handoff_reference(reference.key)
        key = reference.key if is_replica else str(HandoffReference(node_id=self._host, payload=reference))
        if is_replica:
            self._caller.asked_last[tenant, key] = self._host
        async with self._answered(seconds_max):
            await self._request(Failpoint.OPEN_REQUEST)
            owner = self._owner()
            answer = self._lend(owner, tenant, reference, owner_epoch)
            await owner.reach(Failpoint.OPEN_ANSWER)
            await self._carry()
        self._caller.hear(owner)
        if isinstance(answer, Opened):
            self.outstanding.add(answer.lease_token)
            self._leased[answer.lease_token] = tenant, key
        return answer

    def _lend(self, owner: Start, tenant: str, reference: PayloadReference, owner_epoch: int) -> Opened | Closed:
        try:
            lent = owner.bridge.lender.lend(self._client(tenant), tenant, reference, owner_epoch=owner_epoch)
        except BridgeError as error:
            raise OwnerUnreachableError(str(error)) from error
        if isinstance(lent, Refused):
            return Closed(
                reason=lent.reason,
                detail=lent.detail,
                fallback=lent.fallback,
                tokens=lent.tokens,
                model=lent.model,
                epoch=owner.bridge.epoch,
            )
        self._world.judge.lent(owner.shares[tenant], lent)
        if owner_epoch and not self._lies():
            self._world.judge.lent_replica(owner.shares[tenant], lent, self._world.numbers[owner_epoch])
        return Opened(
            lease_token=lent.grant.token,
            ttl_seconds=lent.grant.ttl_seconds,
            descriptor=lent.descriptor,
            fallback=lent.fallback,
            epoch=owner.bridge.epoch,
            holders=(*self._tells_of(), *lent.holders),
        )

    async def pull(
        self, lease_token: str, sink: Sink, *, seconds_max: float, tenant: str = "", form: TransferForm = EXACT_FORM
    ) -> Capabilities:
        """Bring the canonical bytes of a leased payload over; errors as for `Peer.pull`."""
        del tenant  # It is the lease's.
        assert form.is_exact, "nothing else was offered"
        try:
            async with asyncio.timeout(seconds_max):
                await self._request(Failpoint.PULL_BEGIN)
                async for chunk in self._stream(self._owner(), lease_token):
                    await self._request(Failpoint.PULL_CHUNK)
                    self._deliver(sink, memoryview(self._world.wires.garble(chunk)))
                await self._request(Failpoint.PULL_END)
        except TimeoutError as error:
            raise TransferFailedError("the stream took too long") from error
        except OwnerUnreachableError as error:
            raise TransferFailedError("the owner is gone") from error
        return CAPABILITIES

    async def _stream(self, owner: Start, lease_token: str) -> AsyncGenerator[bytes, None]:
        """Yield what an owner sends, each chunk copied between a look at the lease and the next await."""
        try:
            client = self._holder(lease_token)
            payload, slot = owner.bridge.payload_of_lease(client, lease_token)
            assert payload.descriptor is not None, payload
            layout, length = layout_of(payload.descriptor), payload.descriptor.valid_length
            for pieces in canonical_chunks(slot, layout, length, chunk_bytes=CHUNK_BYTES):
                self._require_alive(owner)
                owner.bridge.payload_of_lease(client, lease_token)
                yield self._sends(payload.reference, b"".join(pieces))
        except BridgeError as error:
            raise TransferFailedError(str(error)) from error

    def _sends(self, reference: PayloadReference, chunk: bytes) -> bytes:
        crowd = self._world.crowd
        if crowd is None or not is_handoff_reference(reference.key):
            return chunk
        return crowd.sends(self._host, chunk)

    def _tells_of(self) -> tuple[str, ...]:
        return () if self._world.crowd is None else self._world.crowd.tells_of(self._caller.host, self._host)

    def _lies(self) -> bool:
        return self._world.crowd is not None and self._world.crowd.liar == self._host

    def _deliver(self, sink: Sink, chunk: memoryview) -> None:
        """Write a chunk, or let it be received into the memory itself."""
        if self._world.wires.chance.random() < 0.5 or chunk.nbytes > sink.remaining_bytes:
            sink.write(chunk)
            return
        while chunk.nbytes:
            room = sink.room()[0]
            count = min(room.nbytes, chunk.nbytes)
            room[:count] = chunk[:count]
            sink.advance(count)
            chunk = chunk[count:]

    async def renew(self, lease_token: str, *, seconds_max: float, tenant: str = "") -> None:
        """Prolong a lease."""
        del tenant
        with suppress(TimeoutError, BridgeError):
            async with asyncio.timeout(seconds_max):
                await self._request(Failpoint.RENEW_REQUEST)
                for _ in range(1 + self._world.wires.repeats()):
                    self._owner().bridge.renew(self._holder(lease_token), [lease_token])
                await self._carry()

    async def release(
        self, lease_token: str, *, seconds_max: float, tenant: str = "", replica: ReplicaNotice | None = None
    ) -> None:
        """Give a lease back."""
        del tenant
        if lease_token not in self.outstanding:
            raise self._world.judge.broken(f"{self._caller} gives a lease of {self._host} back that it has not")
        self.outstanding.remove(lease_token)
        with suppress(TimeoutError, BridgeError):
            async with asyncio.timeout(seconds_max):
                await self._request(Failpoint.RELEASE_REQUEST)
                for _ in range(1 + self._world.wires.repeats()):
                    if replica is not None:
                        self._owner().bridge.holders.told(self._holder(lease_token), [lease_token], replica)
                    self._owner().bridge.release(self._holder(lease_token), [lease_token])
                await self._carry()

    async def close(self) -> None:
        """Do nothing."""

    def _client(self, tenant: str) -> Client:
        return Client(client_id=self._caller.client_id, tenant=tenant, attached=False)

    def _holder(self, lease_token: str) -> Client:
        tenant, _ = self._leased.get(lease_token, (DEFAULT_TENANT, ""))
        return self._client(tenant)

    @asynccontextmanager
    async def _answered(self, seconds_max: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds_max):
                yield
        except TimeoutError as error:
            raise OwnerUnreachableError(f"node {self._host!r} did not answer") from error

    async def _request(self, failpoint: Failpoint) -> None:
        await self._caller.reach(failpoint)
        await self._carry()

    async def _carry(self) -> None:
        await self._world.wires.carry(self._caller.host, self._host)
        if not self._caller.alive:
            raise asyncio.CancelledError

    def _owner(self) -> Start:
        owner = self._world.starts[self._host]
        self._require_alive(owner)
        return owner

    def _require_alive(self, owner: Start) -> None:
        if not owner.serving:
            raise OwnerUnreachableError(f"node {self._host!r} refuses to be connected to")


class SimulatedPeers:
    """The other nodes, from the point of view of one; a `Peers`."""

    def __init__(self, world: World, caller: Start) -> None:
        """Know every other node of the world."""
        self.peers = {host: SimulatedPeer(world, caller, host) for host in world.hosts if host != caller.host}

    def find(self, node_id: str) -> Peer | None:
        """Return the node of this name, or None if nobody knows where it is."""
        return self.peers.get(node_id)

    async def close(self) -> None:
        """Do nothing."""
