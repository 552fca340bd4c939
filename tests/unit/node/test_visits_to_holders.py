"""Bytes of a payload that come from a node with a replica, in virtual time: only what the owner sealed is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.cost.curve import RATES_MIN
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import BridgeError, LimitExceededError, MemoryExhaustedError, UnavailableError
from kvbridge.core.reasons import Reason
from kvbridge.link.memory import MemoryPayload, MemoryPeer
from kvbridge.link.port import ReplicaNotice
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.lending import Lent, Refused
from kvbridge.node.visit import Visit
from tests.unit.node.nodes import KEY, Node, payload, virtual_clock
from tests.unit.node.test_holders import OTHER_NODE
from tests.unit.node.virtual import run_virtually

NBYTES = len(payload().content)
SLOW_SECONDS = 10.0
FAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """A node, a slow owner, and a fast node that has a replica."""

    node: Node
    owner: MemoryPeer
    holder: MemoryPeer

    def measure(self, node_id: str, seconds: float) -> None:
        """Let the node have measured how long the payload's bytes take from another one."""
        for _ in range(RATES_MIN):
            self.node.bridge.costs.record_pull(node_id, NBYTES, seconds)

    def forget(self, *node_ids: str) -> None:
        """Let it have measured nothing of these."""
        for node_id in node_ids:
            del self.node.bridge.costs._pulls._transfer._curves[node_id, "here"]

    async def acquire(self, *, deadline_seconds: float | None = None) -> Leased | Fallback:
        """Ask for the payload."""
        [answer] = await self.node.acquire(deadline_seconds=deadline_seconds)
        return answer

    async def take(self) -> None:
        """Ask for the payload, which has to be had, and give it back."""
        answer = await self.acquire()
        assert self.node.content(answer) == payload().content
        self.node.release(answer)

    @property
    def counts(self) -> tuple[int, int]:
        """Return how many streams the owner and the holder began."""
        return self.owner.pulled, self.holder.pulled


def play(scene: Callable[[Trio], Awaitable[None]], *, replica: MemoryPayload | None = None) -> None:
    """Run a scene in which both are measured; at its end nothing may be left on any side."""

    async def run() -> None:
        with virtual_clock():
            owner, holder = MemoryPeer("owner"), MemoryPeer("holder")
            for peer, seconds in ((owner, SLOW_SECONDS), (holder, FAST_SECONDS)):
                peer.behaviour.chunk_bytes, peer.behaviour.chunk_seconds = NBYTES // 10 + 1, seconds / 10
            trio = Trio(node=Node(owner, holder), owner=owner, holder=holder)
            owner.put(payload())
            owner.holders = ("here", "owner", "nobody knows it", "holder", "holder")
            holder.put_replica(KEY, replica or payload())
            trio.measure("owner", SLOW_SECONDS)
            trio.measure("holder", FAST_SECONDS)
            await scene(trio)
            await trio.node.settled()
            assert holder.leases == {}
            assert holder.streaming == 0
            await trio.node.close()

    run_virtually(run())


def test_bytes_come_from_whoever_is_cheapest() -> None:
    """The owner is asked what the payload is and spared its bytes; records and counters say whose copy it was."""

    async def scene(trio: Trio) -> None:
        await trio.take()
        assert trio.counts == (0, 1)
        assert trio.owner.opened == 1
        bridge = trio.node.bridge
        record = bridge.journal.newest("default")
        assert record is not None
        [part] = record.parts
        assert part.pull is not None
        assert (part.pull.node_id, part.pull.from_replica) == ("holder", True)
        assert bridge.traffic.pulled_from_replicas_bytes == bridge.traffic.pulled_bytes == NBYTES
        assert bridge.traffic.pulled_from_owners_bytes == 0

    play(scene)


def test_the_owner_is_told_of_every_replica_that_stands() -> None:
    """Whoever brought a payload over says so as it gives the lease back; whoever did not, does not."""

    async def scene(trio: Trio) -> None:
        trio.owner.behaviour.breaks_after_bytes = trio.holder.behaviour.breaks_after_bytes = 0
        await trio.acquire()
        await trio.node.settled()
        assert trio.owner.notices == []
        trio.owner.behaviour.breaks_after_bytes = None
        await trio.take()
        await trio.node.settled()
        assert trio.owner.notices == [ReplicaNotice(node_id="here", linger_seconds=300.0)]
        assert trio.holder.notices == []

    play(scene)


def test_while_nothing_is_measured_the_owner_is_asked() -> None:
    """Nobody goes elsewhere by guess; a holder that was not measured is tried where the owner is slow."""

    async def scene(trio: Trio) -> None:
        trio.forget("owner", "holder")
        await trio.take()
        assert trio.counts == (1, 0)

    play(scene)


def test_a_holder_that_is_not_measured_is_tried_where_the_owner_is_slow() -> None:
    """Its first bytes say how fast it is."""

    async def scene(trio: Trio) -> None:
        trio.forget("holder")
        await trio.take()
        assert trio.counts == (0, 1)

    play(scene)


def test_a_caller_for_whom_only_a_holder_is_fast_enough_is_not_refused() -> None:
    """What the gate takes for the time of the bytes is that of whoever will be asked."""

    async def scene(trio: Trio) -> None:
        answer = await trio.acquire(deadline_seconds=SLOW_SECONDS / 2)
        assert trio.node.content(answer) == payload().content
        trio.node.release(answer)
        assert trio.counts == (0, 1)

    play(scene)


def _lie(holder: MemoryPeer) -> None:
    holder.behaviour.flips_byte = 1234


def _cut(holder: MemoryPeer) -> None:
    holder.behaviour.breaks_after_bytes = 1000


def _stall(holder: MemoryPeer) -> None:
    holder.behaviour.stalls_after_bytes = 1000


def _surplus(holder: MemoryPeer) -> None:
    holder.behaviour.surplus = b"more"


def _drip(holder: MemoryPeer) -> None:
    holder.behaviour.chunk_bytes, holder.behaviour.chunk_seconds = 1, 40.0


def _die(holder: MemoryPeer) -> None:
    holder.behaviour.is_gone = True


def _freeze(holder: MemoryPeer) -> None:
    holder.behaviour.is_frozen = True


def _restart(holder: MemoryPeer) -> None:
    holder.restart()


FAULTS = [_lie, _cut, _stall, _surplus, _drip, _die, _freeze, _restart]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after_seconds", [0.0, FAST_SECONDS / 2])
def test_whatever_goes_wrong_at_a_holder_the_owner_is_asked_in_time(
    fault: Callable[[MemoryPeer], None], after_seconds: float
) -> None:
    """Before and in the middle of its bytes: the caller has them from the owner, within a deadline that allows both."""

    async def scene(trio: Trio) -> None:
        asyncio.get_running_loop().call_later(after_seconds, fault, trio.holder)
        if not after_seconds:
            await asyncio.sleep(0.001)
        began_at = asyncio.get_running_loop().time()
        answer = await trio.acquire(deadline_seconds=1.5 * SLOW_SECONDS)
        assert asyncio.get_running_loop().time() - began_at < 1.5 * SLOW_SECONDS
        assert trio.node.content(answer) == payload().content
        trio.node.release(answer)
        if fault not in {_lie, _surplus} or not after_seconds:  # What is streamed is settled as it begins.
            assert trio.owner.pulled == 1

    play(scene)


def test_a_holder_that_failed_is_not_asked_again_for_a_while() -> None:
    """Its lies cost one transfer; the next payload comes from the owner at once, and later ones from it again."""

    async def scene(trio: Trio) -> None:
        _lie(trio.holder)
        await trio.take()
        assert trio.counts == (1, 1)
        await asyncio.sleep(10.0)
        trio.node.bridge.replicas._epochs.clear()
        trio.measure("owner", SLOW_SECONDS)
        await trio.take()
        assert trio.counts == (2, 1)
        trio.holder.behaviour.flips_byte = None
        await asyncio.sleep(10.0)
        trio.node.bridge.replicas._epochs.clear()
        await trio.take()
        assert trio.counts == (2, 2)

    play(scene)


@pytest.mark.parametrize(
    "refusal",
    [
        LimitExceededError("references_max", 1),
        UnavailableError("the node is shutting down"),
        MemoryExhaustedError(1, 0, 1),
    ],
)
def test_what_the_node_refuses_itself_is_no_fault_of_a_holder(
    monkeypatch: pytest.MonkeyPatch, refusal: BridgeError
) -> None:
    """Nobody else is asked for what there is no place for, and the holder is asked again the next time."""

    async def scene(trio: Trio) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(type(trio.node.bridge), "reserve_for_stream", raising(refusal))
            assert isinstance(await trio.acquire(), Fallback)
        assert trio.counts == (0, 0)
        await trio.take()
        assert trio.counts == (0, 1)

    def raising(error: BridgeError) -> Callable[..., Any]:
        def refuse(*_: Any) -> None:
            raise error

        return refuse

    play(scene)


def test_the_digests_are_what_refuses_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a holder believed on purpose its other bytes would be leased, so that these tests do look at them."""
    monkeypatch.setattr(Visit, "_is_as_sealed", lambda *_: True)

    async def scene(trio: Trio) -> None:
        _lie(trio.holder)
        answer = await trio.acquire()
        assert trio.node.content(answer) != payload().content
        trio.node.release(answer)

    play(scene)


@pytest.mark.parametrize("changes", [{"layer_digests": (b"x" * 16, b"y" * 16)}, {"layer_digests": ()}])
def test_a_replica_of_other_bytes_is_not_even_brought_over(changes: dict[str, Any]) -> None:
    """Whoever says that it has other digests than the owner told has something else."""

    async def scene(trio: Trio) -> None:
        await trio.take()
        assert trio.counts == (1, 0)

    play(scene, replica=payload(**changes))


def test_a_replica_from_an_earlier_start_of_the_owner_is_not_lent() -> None:
    """A holder is told which start of the owner is meant."""

    async def scene(trio: Trio) -> None:
        trio.owner.restart()
        trio.owner.put(payload())
        await trio.take()
        assert trio.counts == (1, 0)

    play(scene)


def test_the_owner_alone_says_whether_there_is_anything_to_be_had() -> None:
    """What it has ended, or does not answer for, nobody brings over from elsewhere."""

    async def scene(trio: Trio) -> None:
        trio.owner.end(PayloadReference(key="conversation/1", generation=1), Reason.QUARANTINED, "poison")
        answer = await trio.acquire()
        assert isinstance(answer, Fallback)
        assert answer.finding.reason is Reason.QUARANTINED
        trio.owner.behaviour.is_gone = True
        answer = await trio.acquire()
        assert isinstance(answer, Fallback)
        assert answer.finding.reason is Reason.OWNER_UNREACHABLE
        assert trio.counts == (0, 0)

    play(scene)


# Lending replicas


def lent(node: Node, *, key: str = KEY, owner_epoch: int = 1, tenant: str = "default") -> Lent | Refused:
    """Ask a node for its replica."""
    reference = PayloadReference(key=key, generation=1)
    answer = node.bridge.lender.lend(OTHER_NODE, tenant, reference, owner_epoch=owner_epoch)
    if isinstance(answer, Lent):
        node.bridge.release(OTHER_NODE, [answer.grant.token])
    return answer


def test_a_replica_is_lent_if_it_stands_and_none_is_brought_over_for_that() -> None:
    """Of the start of the owner that was named, to the tenant whose it is, and as what the owner sealed."""

    async def scene(trio: Trio) -> None:
        node = trio.node
        assert isinstance(lent(node), Refused)
        assert trio.owner.opened == 0
        await trio.take()
        answer = lent(node)
        assert isinstance(answer, Lent)
        assert answer.descriptor.layer_digests == payload().descriptor.layer_digests
        assert answer.holders == ()
        for refused in (lent(node, owner_epoch=2), lent(node, tenant="other"), lent(node, key="kvb://owner/x@1")):
            assert isinstance(refused, Refused)
            assert refused.reason is Reason.PAYLOAD_UNKNOWN
        node.bridge.replicas.hear("owner", 2)
        assert isinstance(lent(node), Refused)

    play(scene)


def test_a_quarantined_replica_is_not_lent() -> None:
    """Orders hold where the bytes are, too."""

    async def scene(trio: Trio) -> None:
        await trio.take()
        quarantines = trio.node.bridge.containment.quarantines
        target = PayloadReference(key=KEY, generation=1)
        await quarantines.quarantine(trio.node.client, target, why="poison", dry_run=False)
        answer = lent(trio.node)
        assert isinstance(answer, Refused)
        assert answer.reason is Reason.QUARANTINED

    play(scene)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.sampled_from(FAULTS), st.booleans()), max_size=4),
    st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(0.01, 40)), min_size=1, max_size=5),
    st.lists(st.none() | st.floats(0, 30), min_size=5, max_size=5),
)
def test_whatever_happens_only_sealed_bytes_are_leased_and_nothing_is_left(
    happens: list[tuple[float, Callable[[MemoryPeer], None], bool]],
    crowd: list[tuple[float, float | None]],
    gives_up: list[float | None],
) -> None:
    """Faults of owner and holder at any moments, and callers who come, hurry and go."""

    async def visit(trio: Trio, arrives_at: float, seconds_max: float | None) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(arrives_at)
        began_at = loop.time()
        answer = await trio.acquire(deadline_seconds=seconds_max)
        assert seconds_max is None or loop.time() - began_at < seconds_max
        if isinstance(answer, Leased):
            assert trio.node.content(answer) == payload().content
            trio.node.release(answer)

    async def scene(trio: Trio) -> None:
        loop = asyncio.get_running_loop()
        for at, fault, is_owner in happens:
            loop.call_later(at, fault, trio.owner if is_owner else trio.holder)
        visits = [asyncio.ensure_future(visit(trio, *caller)) for caller in crowd]
        for (arrives_at, _), after, task in zip(crowd, gives_up, visits, strict=False):
            if after is not None:
                loop.call_later(arrives_at + after, task.cancel)
        for outcome in await asyncio.gather(*visits, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

    play(scene)
