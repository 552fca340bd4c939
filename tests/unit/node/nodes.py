"""A whole bridge in virtual time, among other nodes in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import xxhash

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Usage
from kvbridge.link.memory import MemoryPayload, MemoryPeer, MemoryPeers
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.wire import Seal
from tests import builders

CONTENT_SEED = 7
KEY = "kvb://owner/conversation/1@1"
"""How other nodes name what `payload` returns."""


class AtOnce(Executor):
    """Does work where it is asked for, because threads know nothing of virtual time."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - that is what an executor does
            future.set_exception(error)
        return future


@contextmanager
def virtual_clock() -> Iterator[None]:
    """Let the node's performance counter be the loop's clock."""
    loop = asyncio.get_running_loop()
    with patch.object(time, "perf_counter", loop.time):
        yield


def payload(spec: PayloadSpec | None = None, **changes: Any) -> MemoryPayload:
    """Return what another node owns: random bytes under a true descriptor, of which some fields may be changed."""
    spec = spec or builders.spec()
    assert spec.tokens is not None
    layout = slot_layout(spec.geometry, spec.capacity_tokens)
    length = layout.canonical_bytes(spec.tokens.count)
    content = np.random.default_rng(CONTENT_SEED).standard_normal(length // 4).astype(np.float32).tobytes()
    layers = len(spec.geometry.layers)
    share = length // layers
    digests = tuple(xxhash.xxh3_128_digest(content[i * share : (i + 1) * share]) for i in range(layers))
    fields: dict[str, Any] = {"layer_digests": digests, **changes}
    descriptor = seal(
        spec,
        generation=fields.pop("generation", 1),
        valid_length=None,
        tokens=None,
        layer_digests=digests,
        verification=Verification.DIGEST,
    )
    for name, value in fields.items():
        object.__setattr__(descriptor, name, value)  # What a hostile node sends is checked by nobody but us.
    return MemoryPayload(descriptor=descriptor, content=content, fallback=spec.fallback)


class Node:
    """A bridge, one other node `owner`, and a client of the bridge."""

    def __init__(self, *peers: MemoryPeer, **settings: Any) -> None:
        """Know `peers`, or one that behaves well."""
        loop = asyncio.get_running_loop()
        self.owner = peers[0] if peers else MemoryPeer("owner")
        config = BridgeConfig(
            **{
                "node_id": "here",
                "arena_bytes": 1 << 20,
                "pretouch": False,
                "huge_pages": False,
                "unmeasured_tokens_min": 1,
                "verify_threads": 1,
                "peer_pull_seconds": 1000.0,
                "peer_stall_seconds": 50.0,
                **settings,
            }
        )
        self.bridge = Bridge(config, peers=MemoryPeers(peers or (self.owner,)), clock=loop.time)
        self.bridge._verifier.close()
        self.bridge._verifier._executor = AtOnce()  # type: ignore[assignment]
        self.client = Client(client_id="client-of-this-test", tenant="default", attached=False)

    async def publish(self, spec: PayloadSpec) -> None:
        """Publish zeroes under the bridge's own key."""
        grant = self.bridge.reserve_for_stream(self.client, spec)
        await self.bridge.commit(self.client, grant.token, Seal())

    async def acquire(
        self, *keys: str, deadline_seconds: float | None = None, spec: PayloadSpec | None = None, **terms: Any
    ) -> list[Leased | Fallback]:
        """Ask for a plan of `keys` with everything else as `spec` has it."""
        spec = spec or builders.spec()
        fields: dict[str, Any] = {"model": spec.model, "geometry": spec.geometry, "tokens": spec.tokens, **terms}
        references = [PayloadReference(key=key, generation=0) for key in keys or (KEY,)]
        parts = tuple(AcquireTerms(reference=reference, **fields) for reference in references)
        asked = Acquisition(
            client=self.client,
            parts=parts,
            verification=Verification.NONE,
            deadline_seconds=deadline_seconds,
            arrived_at=time.perf_counter(),  # The field's own default was bound before the clock was replaced.
        )
        return list((await self.bridge.acquire(asked)).parts)

    def content(self, answer: Leased | Fallback) -> bytes:
        """Return the canonical bytes of a leased part."""
        assert isinstance(answer, Leased), answer
        slot = self.bridge.slot_of(self.client, answer.grant)
        layout = slot_layout(answer.descriptor.geometry, answer.descriptor.capacity_tokens)
        places = layout.canonical(answer.descriptor.valid_length)
        return b"".join(bytes(slot[p.offset_bytes : p.offset_bytes + p.length_bytes]) for p in places)

    def release(self, answer: Leased | Fallback) -> None:
        """Give a lease back."""
        if isinstance(answer, Leased):
            self.bridge.release(self.client, [answer.grant.token])

    def usage(self) -> Usage:
        """Return where the bytes are."""
        return self.bridge.stock.usages()[0]

    async def settled(self) -> Usage:
        """Wait until nothing is under way, and return where the bytes are."""
        await self.bridge._background.settle()
        return self.usage()

    async def close(self) -> None:
        """Stop, with nothing left on either side."""
        usage = await self.settled()
        assert (usage.reservations, usage.holds, usage.leases) == (0, 0, 0), usage
        assert self.owner.leases == {}
        assert self.owner.streaming == 0
        assert len(self.bridge.replicas) == 0
        await self.bridge.close()
