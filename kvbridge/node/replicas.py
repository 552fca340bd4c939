"""Payloads of other nodes: ask the owner, bring the bytes over, keep the replica.

1. A replica is an ordinary payload of this node, published by the node itself under the handoff reference as its key.
   It ends by its own linger and time to live; it never changes, because a reference names one generation.
2. However many consumers wait, the owner is asked once and the bytes come once: all of them share one *visit*.
3. The visit holds one lease at the owner, renewed while bytes flow and given back when the last one leaves.
4. The bytes go straight into the slot and are checked against the owner's digests before anybody can lease them. What
   cannot be checked is not taken.
5. Nobody waits longer than its deadline allows. A transfer once begun goes on for the others, within its own limit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference, PayloadSpec, Verification
from kvbridge.core.errors import BridgeError, MemoryExhaustedError, UnknownReferenceError
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.core.ledger import Grant, Rejected
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.link.port import Closed, Opened, OwnerUnreachableError, Peer, Peers
from kvbridge.node.background import Background
from kvbridge.node.byte_checks import NODE_CLIENT_ID, Failure, patience
from kvbridge.node.check_costs import canonical_bytes
from kvbridge.node.costs import CostKeeper
from kvbridge.node.identity import Client
from kvbridge.node.upload import Upload
from kvbridge.wire import Seal

_Result = TypeVar("_Result")

_RELEASE_SECONDS_MAX = 2.0
_RENEWALS_PER_TTL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLimits:
    """How long other nodes may take."""

    open_seconds_max: float
    """An owner's answer."""
    pull_seconds_max: float
    """The bytes of one payload."""
    stall_seconds_max: float
    """The wait for the next bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """What another node said of a payload of its own."""

    reference: PayloadReference
    """The handoff reference as a key; generation 0."""
    owner: str
    """The node that owns it."""
    model: ModelTag | None = None
    """Who computed the cache; None if that is not known."""
    descriptor: PayloadDescriptor | None = None
    """What was sealed; absent if it cannot be had."""
    ended: Reason | None = None
    """Why it cannot be had, if so."""
    detail: str = ""
    """The same for people."""
    fallback: FallbackText = field(default_factory=FallbackText)
    """What consumers take instead."""
    tokens: TokenSequence | None = None
    """The payload's tokens, if they are known."""

    @property
    def known(self) -> bool:
        """Tell whether its owner knows, or remembers, anything of it."""
        return self.ended is not Reason.PAYLOAD_UNKNOWN

    def lost(self, failure: Failure) -> Foreign:
        """Return the same with the reason for which its bytes are not here."""
        reason, detail = failure
        return replace(self, descriptor=None, ended=reason, detail=detail)


class NewUpload(Protocol):
    """Begins a payload that arrives by value."""

    def __call__(self, client: Client, spec: PayloadSpec, valid_length: int) -> Upload:
        """Reserve a slot; errors as for `Upload`."""


class Visit:
    """One payload of another node, for as long as somebody waits for it."""

    def __init__(self, key: str, peer: Peer | None, host: Replicas, tenant: str) -> None:
        """Ask `peer` when the first one comes."""
        self._reference = HandoffReference.parse(key)
        self._key = key
        self._nothing = Foreign(reference=PayloadReference(key=key, generation=0), owner=self._reference.node_id)
        self._peer = peer
        self._host = host
        self._tenant = tenant
        self._opened: Opened | None = None
        self._looking: asyncio.Task[Foreign] | None = None
        self._pulling: asyncio.Task[Failure | None] | None = None
        self._client = Client(client_id=NODE_CLIENT_ID, tenant=tenant, attached=False)
        self._hold: Grant | None = None
        self.users = 0

    async def look(self, seconds_left: float | None) -> Foreign:
        """Return what the owner says."""
        if self._looking is None:
            self._looking = self._host.background.start(self._look())
        if await _in_time(self._looking, patience(seconds_left)):
            return self._looking.result()
        detail = f"node {self._reference.node_id!r} did not answer before the caller's deadline"
        return self._nothing.lost((Reason.OWNER_UNREACHABLE, detail))

    async def pull(self, seconds_left: float | None) -> Failure | None:
        """Bring the bytes over and return why that failed, or None."""
        if self._pulling is None:
            self._pulling = self._host.background.start(self._pull())
        if await _in_time(self._pulling, patience(seconds_left)):
            return self._pulling.result()
        return Reason.TRANSFER_TIMEOUT, "the bytes did not arrive before the caller's deadline"

    async def end(self) -> None:
        """Give back the owner's lease and the hold on the replica once nothing needs them any more."""
        for task in (self._looking, self._pulling):
            if task is not None:
                await asyncio.wait({task})
        if self._hold is not None:
            with suppress(UnknownReferenceError):
                self._host.release(self._client, [self._hold.token])
        if self._opened is not None and self._peer is not None:
            await self._peer.release(self._opened.lease_token, seconds_max=_RELEASE_SECONDS_MAX)

    async def _look(self) -> Foreign:
        if self._peer is None:
            return self._nothing.lost(
                (Reason.OWNER_UNREACHABLE, f"nobody knows where node {self._reference.node_id!r} is")
            )
        try:
            answer = await self._peer.open(
                self._tenant, self._reference.payload, seconds_max=self._host.limits.open_seconds_max
            )
        except OwnerUnreachableError as error:
            return self._nothing.lost((Reason.OWNER_UNREACHABLE, str(error)))
        return self._closed(answer) if isinstance(answer, Closed) else self._open(answer)

    def _closed(self, answer: Closed) -> Foreign:
        return replace(
            self._nothing,
            model=answer.model,
            ended=answer.reason,
            detail=answer.detail,
            fallback=answer.fallback,
            tokens=answer.tokens,
        )

    def _open(self, answer: Opened) -> Foreign:
        self._opened = answer
        descriptor = replace(answer.descriptor, reference=PayloadReference(key=self._key, generation=1))
        return replace(
            self._nothing,
            model=descriptor.model,
            descriptor=descriptor,
            fallback=answer.fallback,
            tokens=descriptor.tokens,
        )

    async def _pull(self) -> Failure | None:
        assert self._opened is not None, self._key
        opened = self._opened
        if not opened.descriptor.layer_digests:
            return Reason.TRANSFER_FAILED, "the owner sealed no digests, so that what arrives cannot be checked"
        started_at = time.perf_counter()
        try:
            async with asyncio.timeout(self._host.limits.pull_seconds_max):
                failure = await self._receive(opened)
        except TimeoutError:
            return Reason.TRANSFER_FAILED, "the bytes stopped coming, or came too slowly"
        except MemoryExhaustedError as error:
            return Reason.MEMORY_EXHAUSTED, str(error)
        except BridgeError as error:
            return Reason.TRANSFER_FAILED, str(error)
        if failure is None:
            self._host.costs.record_pull(
                self._reference.node_id, canonical_bytes(opened.descriptor), time.perf_counter() - started_at
            )
        return failure

    async def _receive(self, opened: Opened) -> Failure | None:
        descriptor = opened.descriptor
        with self._host.new_upload(
            self._client, _spec(self._key, opened, self._reference.node_id), descriptor.valid_length
        ) as upload:
            await self._write(upload, opened)
            outcome = await upload.finish(
                Seal(
                    valid_length=descriptor.valid_length,
                    layer_digests=descriptor.layer_digests,
                    verification=Verification.DIGEST,
                    hold=True,
                )
            )
        if isinstance(outcome, Rejected):
            return Reason.TRANSFER_FAILED, outcome.detail
        self._hold = outcome.hold
        return None

    async def _write(self, upload: Upload, opened: Opened) -> None:
        assert self._peer is not None, self._key
        limits = self._host.limits
        renewed_at = time.monotonic()
        async with aclosing(self._peer.pull(opened.lease_token, seconds_max=limits.pull_seconds_max)) as chunks:
            while True:
                async with asyncio.timeout(limits.stall_seconds_max):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                upload.write(chunk)
                if time.monotonic() - renewed_at > opened.ttl_seconds / _RENEWALS_PER_TTL:
                    renewed_at = time.monotonic()
                    await self._peer.renew(opened.lease_token, seconds_max=limits.stall_seconds_max)


class Replicas:
    """Visits to other nodes that are under way."""

    def __init__(
        self,
        *,
        node_id: str,
        peers: Peers,
        limits: ReplicaLimits,
        new_upload: NewUpload,
        release: Callable[[Client, Sequence[str]], object],
        costs: CostKeeper,
        background: Background,
    ) -> None:
        """Visit `peers` on behalf of the node `node_id`, which takes uploads and releases from itself."""
        self.node_id = node_id
        self.limits = limits
        self.new_upload = new_upload
        self.release = release
        self.costs = costs
        self.background = background
        self._peers = peers
        self._visits: dict[tuple[str, str], Visit] = {}

    def __repr__(self) -> str:
        """Show how many visits are under way."""
        return f"<Replicas of {self.node_id}: {len(self._visits)} visits to {self._peers!r}>"

    def enter(self, tenant: str, key: str) -> Visit:
        """Join or begin the visit to the owner of `key`, a handoff reference of another node; `leave` it in the end."""
        visit = self._visits.get((tenant, key))
        if visit is None:
            peer = self._peers.find(HandoffReference.parse(key).node_id)
            visit = self._visits[tenant, key] = Visit(key, peer, self, tenant)
        visit.users += 1
        return visit

    def leave(self, tenant: str, key: str) -> None:
        """Leave a visit; the last one to leave ends it."""
        visit = self._visits[tenant, key]
        visit.users -= 1
        if not visit.users:
            del self._visits[tenant, key]
            self.background.begin(visit.end())

    async def close(self) -> None:
        """Hang up on all nodes."""
        await self._peers.close()


def _everywhere(owner: str, reference: PayloadReference) -> PayloadReference:
    """Return the name by which this node knows a payload of `owner`."""
    if is_handoff_reference(reference.key):
        return reference
    return PayloadReference(key=str(HandoffReference(node_id=owner, payload=reference)), generation=1)


def _spec(key: str, opened: Opened, owner: str) -> PayloadSpec:
    descriptor = opened.descriptor
    return PayloadSpec(
        key=key,
        model=descriptor.model,
        geometry=descriptor.geometry,
        capacity_tokens=descriptor.valid_length,
        first_position=descriptor.first_position,
        tokens=descriptor.tokens,
        fallback=opened.fallback,
        derived_from=tuple(_everywhere(owner, reference) for reference in descriptor.derived_from),
        aligner=descriptor.aligner,
        media=descriptor.media,
    )


async def _in_time(task: asyncio.Task[_Result], seconds_max: float | None) -> bool:
    done, _ = await asyncio.wait({task}, timeout=seconds_max)
    return bool(done)
