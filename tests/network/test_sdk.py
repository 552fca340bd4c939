"""Handoffs between nodes through the SDK, as an orchestrator sees them: one string from agent to agent."""

from __future__ import annotations

import pytest

from kvbridge import Reason, connect
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


def test_what_was_not_published_has_no_reference(pair: Pair) -> None:
    """A publication that failed can be asked for by nobody."""
    with connect(pair.owner.target) as bridge:
        publication = Contents().publish(bridge, "too large", capacity_tokens=1 << 20)
    assert publication.reason is Reason.MEMORY_EXHAUSTED
    assert publication.handoff_reference is None
