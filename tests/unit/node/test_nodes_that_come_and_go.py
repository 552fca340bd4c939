"""Nodes that come and go under names of which none comes twice: no more are remembered than is said."""

from __future__ import annotations

import pytest

from kvbridge.core.cost import CostLimits
from kvbridge.link.port import NoPeers
from kvbridge.node import incarnations, sources
from kvbridge.node.background import Background
from kvbridge.node.costs import CostKeeper
from kvbridge.node.incarnations import Incarnations
from kvbridge.node.sources import Sources


def test_starts_of_nodes_that_were_heard_of_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is forgotten has no epoch, so that its replicas count as not here."""
    monkeypatch.setattr(incarnations, "NODES_MAX", 3)
    known = Incarnations(NoPeers(), clock=lambda: 0.0, seconds_fresh=1.0, background=Background())
    for number in range(3):
        known.hear(f"node-{number}", 1)
    known.hear("node-0", 2)
    known.hear("node-3", 1)
    assert [known.of(f"node-{number}") for number in range(4)] == [2, None, 1, 1]


def test_holders_that_failed_last_are_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is forgotten may be asked again, which costs time at most."""
    monkeypatch.setattr(sources, "AVOIDED_MAX", 2)
    order = Sources(lambda node_id, _: 10.0 if node_id == "owner" else 1.0, clock=lambda: 0.0)
    for holder in ("a", "b", "a", "c"):
        order.failed(holder)
    asked = [candidate.node_id for candidate in order.before_owner("owner", ["a", "b", "c"], 1)]
    assert asked == ["b"]


def test_times_of_the_newest_transfers_are_remembered() -> None:
    """As many as there are figures."""
    costs = CostKeeper("here", CostLimits(pairs_max=2), clock=lambda: 0.0)
    for source in ("a", "b", "a", "c"):
        for _ in range(3):
            costs.record_pull(source, 1000, 1.0)
    measured = [source for source in "abc" if costs.measured_pull_seconds(source, 1000) is not None]
    assert measured == ["a", "c"]
