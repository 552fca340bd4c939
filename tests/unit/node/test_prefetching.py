"""Payloads that are brought over before anybody acquires them, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.prefetch import PrefetchState
from kvbridge.core.reasons import Reason
from kvbridge.link.memory import MemoryPayload
from kvbridge.node.identity import Client
from kvbridge.node.prefetching import PrefetchCounts, Prefetched
from tests import builders
from tests.unit.node.nodes import KEY, Node, payload, virtual_clock
from tests.unit.node.virtual import run_virtually

STARTED = Prefetched(state=PrefetchState.STARTED)
HERE = Prefetched(state=PrefetchState.HERE)
OTHER_KEY = "kvb://owner/conversation/2@1"
Scene = Callable[[Node], Awaitable[None]]


def play(scene: Scene, **settings: Any) -> None:
    """Run a scene with a node whose neighbour owns two payloads; at its end nothing may be left on either side."""

    async def run() -> None:
        with virtual_clock():
            node = Node(**settings)
            for key in ("conversation/1", "conversation/2"):
                node.owner.put(payload(builders.spec(key=key)))
            await scene(node)
            await node.bridge.prefetching.stop()
            await node.close()
            assert not node.owner.leases
            assert not node.bridge.replicas

    run_virtually(run())


async def prefetch(
    node: Node, *keys: str, within: float | None = None, client: Client | None = None
) -> list[Prefetched]:
    """Ask for payloads by their keys."""
    references = [PayloadReference(key=key, generation=0) for key in keys or (KEY,)]
    return await node.bridge.prefetch(client or node.client, references, within_seconds=within)


def counted(node: Node, **expected: int) -> None:
    """Require these counts, and 0 of everything else."""
    node.bridge.prefetching.sweep()
    assert node.bridge.prefetching.counts == PrefetchCounts(**expected)


async def arrived(node: Node) -> None:
    """Wait until nothing is under way."""
    await asyncio.sleep(100)
    await node.settled()


def slow(node: Node) -> None:
    """Let bytes take half a minute."""
    node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0


def test_what_was_prefetched_is_there_when_it_is_acquired() -> None:
    """The answer comes before the bytes; the acquire finds a replica, and the owner is not asked again."""

    async def scene(node: Node) -> None:
        slow(node)
        assert await prefetch(node) == [STARTED]
        assert node.owner.streaming <= 1
        await arrived(node)
        assert await prefetch(node) == [HERE]
        [answer] = await node.acquire()
        assert node.content(answer) == payload().content
        assert node.owner.opened == 1
        counted(node, started=1, used=1)
        node.release(answer)

    play(scene)


def test_a_consumer_that_comes_meanwhile_waits_for_the_same_transfer() -> None:
    """There is one visit for a prefetch, its repetition and an acquire."""

    async def scene(node: Node) -> None:
        slow(node)
        assert await prefetch(node, KEY, KEY) == [STARTED, STARTED]
        [answer] = await node.acquire()
        assert node.content(answer) == payload().content
        assert (node.owner.opened, node.owner.pulled) == (1, 1)
        counted(node, started=1, used=1)
        node.release(answer)

    play(scene)


def test_it_goes_on_without_the_one_who_asked() -> None:
    """An orchestrator that hangs up has its payload brought over all the same."""

    async def scene(node: Node) -> None:
        slow(node)
        node.owner.behaviour.answer_seconds = 1.0
        asking = asyncio.ensure_future(prefetch(node))
        await asyncio.sleep(0.5)
        asking.cancel()
        await arrived(node)
        assert await prefetch(node) == [HERE]

    play(scene)


def test_a_replica_lingers_as_long_as_replicas_do_and_is_wasted_then() -> None:
    """Its own setting holds, not that of the node's own payloads."""

    async def scene(node: Node) -> None:
        assert await prefetch(node) == [STARTED]
        await asyncio.sleep(9)
        assert await prefetch(node) == [HERE]
        counted(node, started=1)
        await asyncio.sleep(2)
        counted(node, started=1, wasted=1)
        assert await prefetch(node) == [STARTED]
        await arrived(node)

    play(scene, replica_linger_seconds=10.0, linger_seconds=1000.0, peer_check_seconds=1000.0)


@pytest.mark.parametrize(
    "said", [Reason.PAYLOAD_EXPIRED, Reason.QUARANTINED, Reason.DRAINING, Reason.PAYLOAD_NOT_READY]
)
def test_what_the_owner_does_not_give_is_refused_with_its_reason(said: Reason) -> None:
    """Each payload is answered for itself."""

    async def scene(node: Node) -> None:
        node.owner.end(PayloadReference(key="conversation/1", generation=1), said, "the owner's words")
        refused, begun, unknown = await prefetch(node, KEY, OTHER_KEY, "kvb://owner/never@1")
        assert refused == Prefetched(state=PrefetchState.REFUSED, reason=said, detail="the owner's words")
        assert begun == STARTED
        assert unknown.reason is Reason.PAYLOAD_UNKNOWN
        await arrived(node)
        counted(node, started=1, refused=2)

    play(scene)


def test_what_this_node_knows_better_is_refused_here() -> None:
    """An owner that nobody knows, a dead one, a quarantine of this node's own, its own payloads, and its end."""

    async def scene(node: Node) -> None:
        [nobody] = await prefetch(node, "kvb://nobody/key@1")
        assert nobody.reason is Reason.OWNER_UNREACHABLE
        await node.publish(builders.spec(key="mine"))
        own, by_reference, unknown = await prefetch(node, "mine", "kvb://here/mine@1", "not mine")
        assert (own, by_reference, unknown.reason) == (HERE, HERE, Reason.PAYLOAD_UNKNOWN)
        target = PayloadReference(key=KEY, generation=1)
        await node.bridge.containment.quarantines.quarantine(node.client, target, why="a test", dry_run=False)
        [poisoned] = await prefetch(node)
        assert poisoned.reason is Reason.QUARANTINED
        node.owner.behaviour.is_gone = True
        [dead] = await prefetch(node, OTHER_KEY)
        assert dead.reason is Reason.OWNER_UNREACHABLE
        node.bridge.draining = True
        [late] = await prefetch(node, OTHER_KEY)
        assert late.reason is Reason.DRAINING

    play(scene)


def test_what_cannot_be_here_in_time_is_refused_at_once() -> None:
    """Once the way is measured, nothing is begun that would come too late."""

    async def scene(node: Node) -> None:
        slow(node)
        for _ in range(3):
            await node.acquire(deadline_seconds=5.0)
        [late] = await prefetch(node, OTHER_KEY, within=1.0)
        assert late.reason is Reason.TRANSFER_TIMEOUT
        assert await prefetch(node, OTHER_KEY, within=1000.0) == [STARTED]
        await arrived(node)
        counted(node, started=1, refused=1)

    play(scene)


@pytest.mark.parametrize(
    "limit", [{"prefetches_max": 1}, {"prefetches_per_client_max": 1}, {"prefetch_bytes_max": 3000}]
)
def test_what_is_under_way_is_bounded(limit: dict[str, int]) -> None:
    """One more than allowed is refused, and may be tried again when there is room."""

    async def scene(node: Node) -> None:
        slow(node)
        begun, refused = await prefetch(node, KEY, OTHER_KEY)
        assert begun == STARTED
        assert refused.reason is Reason.MEMORY_EXHAUSTED
        await arrived(node)
        assert await prefetch(node, OTHER_KEY) == [STARTED]
        await arrived(node)
        assert await prefetch(node, KEY, OTHER_KEY) == [HERE, HERE]

    play(scene, **limit)


def test_one_client_leaves_room_for_another() -> None:
    """The limit of one client is not the limit of the others."""

    async def scene(node: Node) -> None:
        slow(node)
        other = Client(client_id="another client", tenant="default", attached=False)
        assert await prefetch(node) == [STARTED]
        assert await prefetch(node, OTHER_KEY, client=other) == [STARTED]
        await arrived(node)

    play(scene, prefetches_per_client_max=1)


@pytest.mark.parametrize("fault", ["stall", "slow", "stop"])
def test_one_that_does_not_arrive_leaves_nothing(fault: str) -> None:
    """A stream that stops, one that takes too long, and a node that ends."""

    async def scene(node: Node) -> None:
        before = node.usage().free_bytes
        slow(node)
        if fault == "stall":
            node.owner.behaviour.stalls_after_bytes = 1000
        assert await prefetch(node) == [STARTED]
        await asyncio.sleep(5)
        if fault == "stop":
            await node.bridge.prefetching.stop()
        await arrived(node)
        counted(node, started=1, failed=1)
        assert node.usage().free_bytes == before

    play(scene, prefetch_seconds=10.0 if fault == "slow" else 1000.0)


def test_many_are_under_way_without_mixing() -> None:
    """Each replica holds its own bytes."""

    async def scene(node: Node) -> None:
        slow(node)
        assert await prefetch(node, KEY, OTHER_KEY) == [STARTED, STARTED]
        await arrived(node)
        answers = [*await node.acquire(KEY), *await node.acquire(OTHER_KEY)]
        owned: list[MemoryPayload] = [payload(), payload(builders.spec(key="conversation/2"))]
        assert [node.content(answer) for answer in answers] == [one.content for one in owned]
        for answer in answers:
            node.release(answer)
        counted(node, started=2, used=2)

    play(scene)
