"""Pulls from other nodes through a whole bridge, in virtual time: whoever comes, goes, is in a hurry, or lies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.core.context import context_digest
from kvbridge.core.cost import CostLimits
from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.quarantine import Quarantine
from kvbridge.core.reasons import Reason
from kvbridge.link.memory import MemoryPayload, MemoryPeer
from kvbridge.node.answers import Fallback, Leased
from tests import builders
from tests.unit.node.nodes import KEY, Node, payload, virtual_clock
from tests.unit.node.virtual import run_virtually

Scene = Callable[[Node], Awaitable[None]]


def play(scene: Scene, *, owned: MemoryPayload | None = None, **settings_: Any) -> None:
    """Run a scene with a node whose neighbour owns a payload; at its end nothing may be left on either side."""

    async def run() -> None:
        with virtual_clock():
            node = Node(**settings_)
            node.owner.put(owned or payload())
            await scene(node)
            await node.close()

    run_virtually(run())


def reason(answer: Leased | Fallback) -> Reason | None:
    """Return why an answer is the text, or None."""
    return answer.finding.reason if isinstance(answer, Fallback) else None


def test_bytes_come_over_once_for_everybody() -> None:
    """Many ask at once: the owner leases once and streams once, and everybody reads exactly its bytes."""

    async def scene(node: Node) -> None:
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 0.1
        answers = [answer for [answer] in await asyncio.gather(*(node.acquire() for _ in range(20)))]
        assert {node.content(answer) for answer in answers} == {payload().content}
        assert (node.owner.opened, node.owner.pulled) == (1, 1)
        for answer in answers:
            node.release(answer)

    play(scene)


def test_a_replica_is_used_without_its_owner() -> None:
    """Whoever comes later is answered from the replica, even if the owner has died."""

    async def scene(node: Node) -> None:
        [first] = await node.acquire()
        node.release(first)
        await node.settled()
        node.owner.behaviour.is_gone = True
        await asyncio.sleep(100)
        [second] = await node.acquire()
        assert node.content(second) == payload().content
        node.release(second)
        assert node.owner.opened == 1

    play(scene)


def test_a_replica_of_an_earlier_start_of_its_owner_is_not_used() -> None:
    """The same name means something else once the owner has started again, and nobody is given the old bytes."""

    async def scene(node: Node) -> None:
        [first] = await node.acquire()
        node.release(first)
        node.owner.restart()
        await asyncio.sleep(2)
        [second] = await node.acquire()
        assert reason(second) is Reason.PAYLOAD_UNKNOWN
        other = builders.spec(fallback=FallbackText(text="another text"))
        node.owner.put(replace(payload(other), content=payload().content))
        [third] = await node.acquire()
        assert isinstance(third, Leased)
        assert third.grant.reference.generation == 2
        node.release(third)

    play(scene)


def test_an_owner_that_starts_again_between_lease_and_stream_fails_the_transfer() -> None:
    """A lease of an earlier start is worth nothing."""

    async def scene(node: Node) -> None:
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0
        asking = asyncio.ensure_future(node.acquire())
        await asyncio.sleep(3.5)
        node.owner.restart()
        [answer] = await asking
        assert reason(answer) is Reason.TRANSFER_FAILED
        assert isinstance(answer, Fallback)
        assert answer.fallback.text == "the text"
        assert answer.tokens == builders.tokens()

    play(scene)


def _flip(owner: MemoryPeer) -> None:
    owner.behaviour.flips_byte = 1234


def _cut(owner: MemoryPeer) -> None:
    owner.behaviour.chunk_bytes, owner.behaviour.breaks_after_bytes = 100, 1000


def _stall(owner: MemoryPeer) -> None:
    owner.behaviour.chunk_bytes, owner.behaviour.stalls_after_bytes = 100, 1000


def _surplus(owner: MemoryPeer) -> None:
    owner.behaviour.surplus = b"more"


def _drip(owner: MemoryPeer) -> None:
    owner.behaviour.chunk_bytes, owner.behaviour.chunk_seconds = 1, 40.0


def _die(owner: MemoryPeer) -> None:
    owner.behaviour.is_gone = True


def _freeze(owner: MemoryPeer) -> None:
    owner.behaviour.is_frozen = True


def _dawdle(owner: MemoryPeer) -> None:
    owner.behaviour.answer_seconds = 3.0


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_flip, Reason.TRANSFER_FAILED),
        (_cut, Reason.TRANSFER_FAILED),
        (_stall, Reason.TRANSFER_FAILED),
        (_surplus, Reason.TRANSFER_FAILED),
        (_drip, Reason.TRANSFER_FAILED),
        (_die, Reason.OWNER_UNREACHABLE),
        (_freeze, Reason.OWNER_UNREACHABLE),
        (_dawdle, Reason.OWNER_UNREACHABLE),
    ],
)
def test_each_fault_is_an_answer_and_the_next_try_may_succeed(
    fault: Callable[[MemoryPeer], None], expected: Reason
) -> None:
    """Whatever goes wrong on the way is told; the text comes where the owner could still tell it; nothing is left."""

    async def scene(node: Node) -> None:
        before = node.usage().free_bytes
        well = replace(node.owner.behaviour)
        fault(node.owner)
        [answer] = await node.acquire()
        assert reason(answer) is expected
        assert isinstance(answer, Fallback)
        assert answer.finding.problem
        assert (answer.fallback.text == "the text") == (expected is Reason.TRANSFER_FAILED)
        assert (await node.settled()).free_bytes == before
        node.owner.behaviour = well
        [again] = await node.acquire()
        assert node.content(again) == payload().content
        node.release(again)

    play(scene)


@pytest.mark.parametrize(
    "said",
    [
        Reason.PAYLOAD_EXPIRED,
        Reason.PAYLOAD_NOT_READY,
        Reason.PAYLOAD_CORRUPT,
        Reason.VALUES_NOT_FINITE,
        Reason.PROBE_BELOW_THRESHOLD,
        Reason.MEMORY_EXHAUSTED,
        Reason.QUARANTINED,
        Reason.DRAINING,
    ],
)
def test_what_the_owner_says_is_what_the_consumer_hears(said: Reason) -> None:
    """The owner's reason, its detail, its text and its tokens arrive as they are."""

    async def scene(node: Node) -> None:
        node.owner.end(PayloadReference(key="conversation/1", generation=1), said, "the owner's words")
        [answer] = await node.acquire()
        assert isinstance(answer, Fallback)
        assert reason(answer) is said
        assert answer.fallback.text == "the text"
        assert answer.tokens == builders.tokens()
        assert (answer.retry_after_seconds is not None) == (said is Reason.PAYLOAD_NOT_READY)

    play(scene)


@pytest.mark.parametrize("said", [Reason.TOO_SHORT_TO_PAY, Reason.BRIDGE_UNREACHABLE, Reason.TRANSFER_TIMEOUT])
def test_an_owner_cannot_say_what_is_not_its_own_to_say(said: Reason) -> None:
    """Anything but an owner's reasons is no answer."""

    async def scene(node: Node) -> None:
        node.owner.end(PayloadReference(key="conversation/1", generation=1), said, "the owner's words")
        [answer] = await node.acquire()
        assert reason(answer) is Reason.OWNER_UNREACHABLE

    play(scene)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"reference": PayloadReference(key="another", generation=1)}, Reason.PAYLOAD_UNKNOWN),
        ({"valid_length": 11}, Reason.OWNER_UNREACHABLE),
        ({"valid_length": 0}, Reason.OWNER_UNREACHABLE),
        ({"valid_length": 1 << 62}, Reason.OWNER_UNREACHABLE),
        ({"first_position": -1}, Reason.OWNER_UNREACHABLE),
        ({"layer_digests": (b"x" * 16,)}, Reason.OWNER_UNREACHABLE),
        ({"layer_digests": (b"x", b"y")}, Reason.OWNER_UNREACHABLE),
        ({"layer_digests": ()}, Reason.TRANSFER_FAILED),
        ({"derived_from": (PayloadReference(key="k", generation=1),) * 65}, Reason.OWNER_UNREACHABLE),
        ({"geometry": builders.geometry(kv_heads=4)}, Reason.GEOMETRY_MISMATCH),
        ({"format_version": 2}, Reason.FORMAT_UNSUPPORTED),
    ],
)
def test_a_descriptor_that_lies_is_not_believed(changes: dict[str, Any], expected: Reason) -> None:
    """What no node can have sealed is no answer, and nothing is reserved or leased for it."""

    async def scene(node: Node) -> None:
        [answer] = await node.acquire()
        assert reason(answer) is expected
        assert node.owner.pulled == 0

    play(scene, owned=payload(**changes))


def test_a_descriptor_of_another_payload_is_not_believed() -> None:
    """An owner that leases something else than it was asked for gave no answer."""

    async def scene(node: Node) -> None:
        other = payload(builders.spec(key="another"))
        node.owner._payloads[PayloadReference(key="conversation/1", generation=1)] = other
        [answer] = await node.acquire()
        assert reason(answer) is Reason.OWNER_UNREACHABLE

    play(scene)


def test_a_format_that_the_consumer_reads_but_the_node_does_not_is_not_brought_over() -> None:
    """The node writes slots in its own format, so it takes no other."""

    async def scene(node: Node) -> None:
        [answer] = await node.acquire(format_version_max=2)
        assert reason(answer) is Reason.TRANSFER_FAILED
        assert node.owner.pulled == 0

    play(scene, owned=payload(format_version=2))


def test_what_the_gate_refuses_is_not_brought_over() -> None:
    """The owner is asked, for only it knows the payload; no byte moves for a consumer that could not use it."""

    async def scene(node: Node) -> None:
        [answer] = await node.acquire(model=builders.model_tag(revision="another"))
        assert reason(answer) is Reason.MODEL_VERSION_MISMATCH
        assert (node.owner.opened, node.owner.pulled) == (1, 0)

    play(scene)


def test_memory_that_is_exhausted_here_is_told() -> None:
    """A payload that does not fit is refused before a byte moves."""
    spec = builders.spec(capacity_tokens=4096, tokens=builders.tokens(4096))

    async def scene(node: Node) -> None:
        [answer] = await node.acquire(spec=spec)
        assert reason(answer) is Reason.MEMORY_EXHAUSTED
        assert node.owner.pulled == 0

    play(scene, owned=payload(spec), arena_bytes=1 << 16)


def test_a_deadline_answers_in_time_and_frees_both_sides() -> None:
    """The last one who waits takes the transfer along; what was reserved and leased for it is given back."""

    async def scene(node: Node) -> None:
        loop = asyncio.get_running_loop()
        before = node.usage().free_bytes
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0
        began_at = loop.time()
        [answer] = await node.acquire(deadline_seconds=5.0)
        assert reason(answer) is Reason.TRANSFER_TIMEOUT
        assert isinstance(answer, Fallback)
        assert answer.fallback.text == "the text"
        assert 4.5 < loop.time() - began_at < 5.0
        assert (await node.settled()).free_bytes == before
        assert node.owner.streaming == 0

    play(scene)


def test_what_could_not_be_in_time_is_refused_at_once_until_it_is_tried_again() -> None:
    """Slow transfers are remembered, but not for ever: who is refused measures nothing."""

    async def scene(node: Node) -> None:
        loop = asyncio.get_running_loop()
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0
        for _ in range(3):
            await node.acquire(deadline_seconds=5.0)
        began_at, pulled = loop.time(), node.owner.pulled
        [answer] = await node.acquire(deadline_seconds=5.0)
        assert reason(answer) is Reason.TRANSFER_TIMEOUT
        assert loop.time() == began_at
        assert node.owner.pulled == pulled == 3
        await asyncio.sleep(CostLimits().fresh_seconds + 1)
        node.owner.behaviour.chunk_seconds = 0.0
        [answer] = await node.acquire(deadline_seconds=5.0)
        assert reason(answer) is None
        node.release(answer)

    play(scene)


def test_a_check_that_takes_long_does_not_end_the_transfer() -> None:
    """Only the bytes have to come in time; what their check ends with is given back by the visit like any other."""

    async def scene(node: Node) -> None:
        check = node.bridge._verifier.check

        async def slowly(*terms: Any, **named: Any) -> Any:
            await asyncio.sleep(20.0)
            return await check(*terms, **named)

        node.bridge._verifier.check = slowly  # type: ignore[method-assign]
        [answer] = await node.acquire()
        assert node.content(answer) == payload().content
        node.release(answer)

    play(scene, peer_pull_seconds=5.0, lease_ttl_seconds=1000.0)


def test_a_patient_caller_keeps_a_transfer_that_a_hurried_one_gave_up() -> None:
    """One caller's end is not the others'."""

    async def scene(node: Node) -> None:
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0
        patient = asyncio.ensure_future(node.acquire())
        [hurried] = await node.acquire(deadline_seconds=3.0)
        cancelled = asyncio.ensure_future(node.acquire())
        await asyncio.sleep(1)
        cancelled.cancel()
        [answer] = await patient
        assert reason(hurried) is Reason.TRANSFER_TIMEOUT
        assert node.content(answer) == payload().content
        assert node.owner.pulled == 1
        node.release(answer)

    play(scene)


def _part(key: str, position: int) -> MemoryPayload:
    """Return ten tokens that stand at `position` of one long prompt."""
    before = builders.tokens(position).packed_ids if position else None
    spec = builders.spec(
        key=key,
        first_position=position,
        tokens=builders.tokens(10, first=position),
        context_digest=b"" if before is None else context_digest([before]),
    )
    return payload(spec)


def test_local_parts_stay_while_others_are_brought_over() -> None:
    """What comes from elsewhere does not push out what the same plan has here already."""
    local = builders.spec(key="local", tokens=builders.tokens(), linger_seconds=None)
    prompt = builders.tokens(20)

    async def scene(node: Node) -> None:
        await node.publish(local)
        node.owner.behaviour.chunk_seconds = 1.0
        answers = await node.acquire("local", KEY, tokens=prompt)
        assert [reason(answer) for answer in answers] == [None, Reason.MEMORY_EXHAUSTED]
        for answer in answers:
            node.release(answer)

    # Room for one slot of nine pages and no more.
    play(scene, owned=_part("conversation/1", 10), arena_bytes=40_960 + 4096 * 4)


def test_what_fails_lets_another_pass_that_was_one_too_many() -> None:
    """Of four parts only the nearest three may be caches; if one of them cannot be had, the fourth is brought over."""

    async def scene(node: Node) -> None:
        for n in range(4):
            node.owner.put(_part(f"part {n}", 10 * n))
        lost = node.owner._payloads[PayloadReference(key="part 2", generation=1)]
        node.owner._payloads[PayloadReference(key="part 2", generation=1)] = replace(lost, content=lost.content[:-1])
        keys = [f"kvb://owner/part {n}@1" for n in range(4)]
        answers = await node.acquire(*keys, tokens=builders.tokens(40))
        assert [reason(answer) for answer in answers] == [None, None, Reason.TRANSFER_FAILED, None]
        for answer in answers:
            node.release(answer)

    play(scene)


def test_nobody_publishes_under_a_name_of_other_nodes() -> None:
    """A producer that could would hand out bytes in another node's name."""

    async def scene(node: Node) -> None:
        with pytest.raises(InvalidFieldError, match="key"):
            await node.publish(builders.spec(key=KEY))

    play(scene)


def test_a_quarantine_on_a_replica_holds_when_it_would_be_brought_over_again() -> None:
    """A replica may come and go, each time as another generation; what it is called in quarantine is one payload."""

    async def scene(node: Node) -> None:
        [first] = await node.acquire()
        node.release(first)
        quarantines = node.bridge.containment.quarantines
        target = PayloadReference(key=KEY, generation=5)
        report = await quarantines.quarantine(node.client, target, why="poison", dry_run=False)
        assert [one.reference.key for one in report.payloads] == [KEY]
        [second] = await node.acquire()
        assert reason(second) is Reason.QUARANTINED
        assert isinstance(second, Fallback)
        assert second.fallback.text == "the text"
        assert node.owner.pulled == 1

    play(scene)


def test_what_derives_from_a_quarantined_replica_is_refused() -> None:
    """Its generation here, which is of no meaning elsewhere, is not looked at."""
    derived = builders.spec(key="derived", derived_from=(PayloadReference(key=KEY, generation=7),))

    async def scene(node: Node) -> None:
        [first] = await node.acquire()
        node.release(first)
        await node.publish(derived)
        target = PayloadReference(key=KEY, generation=1)
        await node.bridge.containment.quarantines.quarantine(node.client, target, why="poison", dry_run=False)
        [answer] = await node.acquire("derived")
        assert reason(answer) is Reason.QUARANTINED

    play(scene)


def test_what_derives_from_the_unknown_elsewhere_is_refused_while_anything_is_quarantined() -> None:
    """Nobody here can tell that it does not come from what is quarantined; and it is told as what it is."""
    spec = builders.spec(derived_from=(PayloadReference(key="source", generation=3),))

    async def scene(node: Node) -> None:
        quarantines = node.bridge.containment.quarantines
        target = PayloadReference(key="unrelated", generation=1)
        await quarantines.quarantine(node.client, target, why="poison", dry_run=False)
        for _ in range(2):
            [answer] = await node.acquire()
            assert reason(answer) is Reason.QUARANTINED
        assert node.owner.pulled == 1
        assert isinstance(quarantines.in_force(node.client)[0], Quarantine)

    play(scene, owned=payload(spec))


def test_sources_keep_their_names_on_every_node() -> None:
    """A source of the owner's own gets its name on every node; what was a replica there keeps its name."""
    replica = PayloadReference(key="kvb://third/x@4", generation=9)
    spec = builders.spec(derived_from=(PayloadReference(key="source", generation=3), replica))

    async def scene(node: Node) -> None:
        [answer] = await node.acquire()
        assert isinstance(answer, Leased)
        assert answer.descriptor.derived_from == (
            PayloadReference(key="kvb://owner/source@3", generation=1),
            PayloadReference(key="kvb://third/x@4", generation=1),
        )
        node.release(answer)

    play(scene, owned=payload(spec))


def test_a_drain_during_a_transfer_is_what_the_consumer_hears() -> None:
    """A node that began to shut down gives no lease on what has just arrived."""

    async def scene(node: Node) -> None:
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 1.0
        asking = asyncio.ensure_future(node.acquire())
        await asyncio.sleep(2)
        node.bridge.draining = True
        [answer] = await asking
        assert reason(answer) is Reason.DRAINING

    play(scene)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One who asks for the payload."""

    arrives_at: float
    seconds_max: float | None
    gives_up_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happens to the owner."""

    at: float
    what: Callable[[MemoryPeer], None]


moments = st.floats(0, 60)
callers = st.builds(
    Caller, arrives_at=moments, seconds_max=st.none() | st.floats(0.001, 60), gives_up_after=st.none() | moments
)
events = st.builds(
    Event,
    at=moments,
    what=st.sampled_from([_flip, _cut, _stall, _surplus, _drip, _die, _freeze, _dawdle, MemoryPeer.restart]),
)


@settings(max_examples=150)
@given(
    st.lists(callers, min_size=1, max_size=8),
    st.lists(events, max_size=3),
    st.floats(0, 3),
    st.sampled_from([100, 1000, 10_000]),
)
def test_everybody_gets_one_answer_in_time_and_nothing_is_left(
    crowd: list[Caller], happens: list[Event], chunk_seconds: float, chunk_bytes: int
) -> None:
    """Whatever callers and owner do, each that stays is answered before its deadline, and both sides are left empty."""

    async def visit(node: Node, caller: Caller) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(caller.arrives_at)
        began_at = loop.time()
        [answer] = await node.acquire(deadline_seconds=caller.seconds_max)
        assert caller.seconds_max is None or loop.time() - began_at < caller.seconds_max
        if isinstance(answer, Leased):
            assert node.content(answer) == payload().content
            node.release(answer)
        else:
            assert reason(answer) in {
                Reason.OWNER_UNREACHABLE,
                Reason.TRANSFER_FAILED,
                Reason.TRANSFER_TIMEOUT,
                Reason.PAYLOAD_UNKNOWN,
            }

    async def scene(node: Node) -> None:
        loop = asyncio.get_running_loop()
        node.owner.behaviour.chunk_seconds, node.owner.behaviour.chunk_bytes = chunk_seconds, chunk_bytes
        for event in happens:
            loop.call_later(event.at, event.what, node.owner)
        visits = [asyncio.ensure_future(visit(node, caller)) for caller in crowd]
        for caller, task in zip(crowd, visits, strict=True):
            if caller.gives_up_after is not None:
                loop.call_later(caller.arrives_at + caller.gives_up_after, task.cancel)
        for caller, outcome in zip(crowd, await asyncio.gather(*visits, return_exceptions=True), strict=True):
            gave_up = isinstance(outcome, asyncio.CancelledError)
            assert outcome is None or (gave_up and caller.gives_up_after is not None), outcome
        assert node.owner.pulled <= len(crowd)

    play(scene)


def test_two_hundred_who_wait_for_one_slow_transfer_are_all_in_time() -> None:
    """The answers come one after another, the last one before the deadline."""

    async def scene(node: Node) -> None:
        loop = asyncio.get_running_loop()
        node.owner.behaviour.chunk_bytes, node.owner.behaviour.chunk_seconds = 100, 10.0
        began_at = loop.time()

        async def ask() -> float:
            [answer] = await node.acquire(deadline_seconds=2.0)
            assert reason(answer) is Reason.TRANSFER_TIMEOUT
            return loop.time() - began_at

        took = await asyncio.gather(*(ask() for _ in range(200)))
        assert max(took) < 2.0
        assert min(took) >= 0.8
        assert node.owner.pulled == 1

    play(scene)
