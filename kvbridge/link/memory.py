"""Other nodes in this process' memory, for tests and the simulator: real leases and bytes, and faults at will.

Time passes by the event loop's clock alone, so that a loop with virtual time runs hours in no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm
from kvbridge.link.port import (
    Capabilities,
    Closed,
    Opened,
    OwnerUnreachableError,
    ReplicaNotice,
    Sink,
    TransferFailedError,
)

CAPABILITIES = Capabilities(name="memory", one_sided=True, abortable=True, device_memory=False, zero_copy=False)
"""One process for both nodes."""
DEFAULT_CHUNK_BYTES = 1 << 16
"""Size of a chunk unless told otherwise."""


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """How a node in memory behaves; may be changed at any moment."""

    is_frozen: bool = False
    """Whether it answers nothing, as a stopped process does."""
    is_gone: bool = False
    """Whether it refuses connections, as a dead process does."""
    answer_seconds: float = 0.0
    """What it takes to answer a call that moves no bytes."""
    chunk_seconds: float = 0.0
    """What each chunk takes."""
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    """Size of a chunk."""
    breaks_after_bytes: int | None = None
    """Where a stream breaks off; None for nowhere."""
    stalls_after_bytes: int | None = None
    """Where a stream stops without an end; None for nowhere."""
    flips_byte: int | None = None
    """Index of a byte that arrives as another; None for none."""
    surplus: bytes = b""
    """What follows a payload that ought to have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPayload:
    """What a node in memory owns."""

    descriptor: PayloadDescriptor
    """What was sealed."""
    content: bytes
    """Its canonical bytes."""
    fallback: FallbackText = field(default_factory=FallbackText)
    """What consumers take instead."""


class MemoryPeer:
    """One node, from the point of view of the others; a `Peer`."""

    def __init__(self, node_id: str, *, lease_ttl_seconds: float = 30.0) -> None:
        """Start with nothing, behaving well."""
        self.node_id = node_id
        self.epoch = 1
        self.behaviour = Behaviour()
        self.leases: dict[str, MemoryPayload] = {}
        """What is leased, by token."""
        self.opened = 0
        """How often a payload was leased."""
        self.pulled = 0
        """How many streams were begun."""
        self.streaming = 0
        """How many streams are under way."""
        self.holders: tuple[str, ...] = ()
        """Nodes that it names as having replicas."""
        self.notices: list[ReplicaNotice] = []
        """What it was told of replicas."""
        self._lease_ttl_seconds = lease_ttl_seconds
        self._payloads: dict[PayloadReference, MemoryPayload] = {}
        self._replicas: dict[tuple[str, int], MemoryPayload] = {}
        self._ended: dict[PayloadReference, tuple[Reason, str]] = {}

    def __repr__(self) -> str:
        """Show what it has."""
        return f"<MemoryPeer {self.node_id}: {len(self._payloads)} payloads, {len(self.leases)} leases>"

    @property
    def capabilities(self) -> Capabilities:
        """Return what moving bytes in memory can do."""
        return CAPABILITIES

    def put(self, payload: MemoryPayload) -> None:
        """Own a payload."""
        self._payloads[payload.descriptor.reference] = payload

    def put_replica(self, key: str, payload: MemoryPayload, *, owner_epoch: int = 1) -> None:
        """Have a replica under its handoff reference."""
        self._replicas[key, owner_epoch] = payload

    def end(self, reference: PayloadReference, reason: Reason, detail: str) -> None:
        """Keep nothing of a payload but its text and why it ended."""
        self._ended[reference] = (reason, detail)

    def restart(self) -> None:
        """Lose everything and be another."""
        self.epoch += 1
        for kept in (self.leases, self._payloads, self._replicas, self._ended):
            kept.clear()

    async def ping(self, *, seconds_max: float) -> int:
        """Return the boot epoch; errors as for `Peer.ping`."""
        await self._answer(seconds_max)
        return self.epoch

    async def open(
        self, tenant: str, reference: PayloadReference, *, seconds_max: float, owner_epoch: int = 0
    ) -> Opened | Closed:
        """Lease a payload; errors as for `Peer.open`."""
        del tenant
        await self._answer(seconds_max)
        replica = self._replicas.get((reference.key, owner_epoch))
        payload = replica if owner_epoch else self._payloads.get(reference)
        if payload is None:
            return self._closed(None, Reason.PAYLOAD_UNKNOWN, "the owner knows nothing of it")
        if reference in self._ended:
            return self._closed(payload, *self._ended[reference])
        self.opened += 1
        token = f"{self.node_id}-{self.epoch}-{self.opened}"
        self.leases[token] = payload
        return Opened(
            lease_token=token,
            ttl_seconds=self._lease_ttl_seconds,
            descriptor=payload.descriptor,
            fallback=payload.fallback,
            epoch=self.epoch,
            holders=self.holders,
        )

    async def pull(
        self, lease_token: str, sink: Sink, *, seconds_max: float, tenant: str = "", form: TransferForm = EXACT_FORM
    ) -> Capabilities:
        """Bring the canonical bytes of a leased payload over; errors as for `Peer.pull`."""
        del tenant  # Whoever has a token may use it.
        assert form.is_exact, "nothing else was offered"
        self.pulled += 1
        self.streaming += 1
        try:
            async with asyncio.timeout(seconds_max), aclosing(self._stream(lease_token)) as chunks:
                async for chunk in chunks:
                    sink.write(chunk)
        except TimeoutError as error:
            raise TransferFailedError("the stream took too long") from error
        finally:
            self.streaming -= 1
        return CAPABILITIES

    async def renew(self, lease_token: str, *, seconds_max: float, tenant: str = "") -> None:
        """Do nothing: leases here last for ever."""
        del lease_token, seconds_max, tenant

    async def release(
        self, lease_token: str, *, seconds_max: float, tenant: str = "", replica: ReplicaNotice | None = None
    ) -> None:
        """Take a lease back."""
        del tenant
        if replica is not None:
            self.notices.append(replica)
        try:
            await self._answer(seconds_max)
        except OwnerUnreachableError:
            return  # Its expiry would mend that.
        finally:
            self.leases.pop(lease_token, None)

    async def close(self) -> None:
        """Do nothing."""

    async def _answer(self, seconds_max: float) -> None:
        if self.behaviour.is_gone:
            raise OwnerUnreachableError(f"node {self.node_id!r} refuses to be connected to")
        if self.behaviour.is_frozen or self.behaviour.answer_seconds > seconds_max:
            await asyncio.sleep(seconds_max)
            raise OwnerUnreachableError(f"node {self.node_id!r} did not answer")
        await asyncio.sleep(self.behaviour.answer_seconds)

    async def _stream(self, lease_token: str) -> AsyncGenerator[memoryview, None]:
        content = self._content(lease_token)
        position = 0
        while position < len(content):
            await asyncio.sleep(self.behaviour.chunk_seconds)
            await self._stumble(position, lease_token)
            end = min(position + self.behaviour.chunk_bytes, len(content))
            yield memoryview(content)[position:end]
            position = end

    def _content(self, lease_token: str) -> bytes:
        if self.behaviour.is_gone or lease_token not in self.leases:
            raise TransferFailedError(f"node {self.node_id!r} knows no such lease")
        content = bytearray(self.leases[lease_token].content)
        if self.behaviour.flips_byte is not None:
            content[self.behaviour.flips_byte % len(content)] ^= 1
        return bytes(content) + self.behaviour.surplus

    async def _stumble(self, position: int, lease_token: str) -> None:
        behaviour = self.behaviour
        stalls, breaks = behaviour.stalls_after_bytes, behaviour.breaks_after_bytes
        if behaviour.is_frozen or (stalls is not None and position >= stalls):
            await asyncio.Event().wait()
        if behaviour.is_gone or lease_token not in self.leases or (breaks is not None and position >= breaks):
            raise TransferFailedError(f"the stream of node {self.node_id!r} broke off")

    def _closed(self, payload: MemoryPayload | None, reason: Reason, detail: str) -> Closed:
        return Closed(
            reason=reason,
            detail=detail,
            fallback=FallbackText() if payload is None else payload.fallback,
            tokens=None if payload is None else payload.descriptor.tokens,
            model=None if payload is None else payload.descriptor.model,
            epoch=self.epoch,
        )


class MemoryPeers:
    """Nodes in memory by name; a `Peers`."""

    def __init__(self, peers: Iterable[MemoryPeer]) -> None:
        """Know these."""
        self._peers = {peer.node_id: peer for peer in peers}

    def __repr__(self) -> str:
        """Show who is known."""
        return f"<MemoryPeers {', '.join(self._peers)}>"

    def find(self, node_id: str) -> MemoryPeer | None:
        """Return the node of this name, or None if nobody knows where it is."""
        return self._peers.get(node_id)

    async def close(self) -> None:
        """Do nothing."""
