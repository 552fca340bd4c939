"""Handoffs between nodes through the SDK, as an orchestrator sees them: one string from agent to agent."""

from __future__ import annotations

import pytest

from kvbridge import ArgumentValueError, PrefetchState, Reason, connect
from tests.harness import wait_for
from tests.integration.client.kv import Contents
from tests.network.nodes import Pair


@pytest.mark.parametrize("by_value", [False, True])
def test_the_reference_of_a_publication_is_a_key_on_every_node(pair: Pair, by_value: bool) -> None:
    """What one agent publishes at its node another acquires at its own, knowing nothing but the reference."""
    targets = [node.tcp_target if by_value else node.target for node in (pair.owner, pair.puller)]
    with connect(targets[0]) as here, connect(targets[1]) as there:
        contents = Contents(seed=1 + by_value)
        publication = contents.publish(here, f"sdk/{by_value}")
        reference = publication.handoff_reference
        assert reference == f"kvb://owner/sdk/{by_value}@1"
        for bridge in (there, here):
            with contents.acquire(bridge, reference) as handoff:
                contents.assert_in(handoff)


def test_what_was_prefetched_is_acquired_without_its_owner(pair: Pair) -> None:
    """The node says what it begins, later that it is here, and why something cannot be had."""
    with connect(pair.owner.target) as here, connect(pair.puller.target) as there:
        contents = Contents(seed=3)
        reference = contents.publish(here, "sdk/prefetched").handoff_reference
        assert reference is not None
        begun, unknown = there.prefetch(reference, "kvb://owner/sdk/never@1", within=30.0, timeout=30.0)
        assert (begun.key, begun.state, bool(begun)) == (reference, PrefetchState.STARTED, True)
        assert (unknown.reason, bool(unknown)) == (Reason.PAYLOAD_UNKNOWN, False)
        wait_for(lambda: there.prefetch(reference)[0].state is PrefetchState.HERE)
        with contents.acquire(there, reference) as handoff:
            contents.assert_in(handoff)
        record = there.explain(handoff.handoff_id)
        assert record is not None
        assert not record.parts[0].HasField("pull")


def test_a_prefetch_never_raises_for_what_is_not_the_callers_mistake(pair: Pair) -> None:
    """A bridge that is away, and an object that was closed, are answers."""
    bridge = connect("unix:/nowhere/at/all.sock")
    [away] = bridge.prefetch("kvb://owner/key@1")
    bridge.close()
    [closed] = bridge.prefetch("kvb://owner/key@1")
    assert (away.reason, closed.reason) == (Reason.BRIDGE_UNREACHABLE, Reason.BRIDGE_UNREACHABLE)
    with connect(pair.puller.target) as there, pytest.raises(ArgumentValueError, match="key"):
        there.prefetch("kvb://owner/key")


def test_what_was_not_published_has_no_reference(pair: Pair) -> None:
    """A publication that failed can be asked for by nobody."""
    with connect(pair.owner.target) as bridge:
        publication = Contents().publish(bridge, "too large", capacity_tokens=1 << 20)
    assert publication.reason is Reason.MEMORY_EXHAUSTED
    assert publication.handoff_reference is None
