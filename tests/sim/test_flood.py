"""However many names a node is offered, it remembers no more than its limits say."""

from __future__ import annotations

from typing import Any

import pytest

from kvbridge.core.ledger.tombstones import Tombstones
from kvbridge.node.lender import Lender
from kvbridge.server.answers import TenantAnswers
from tests.sim.flood import flood, has_grown

NAMES, NAMES_MANY, NAMES_FEW = 100_000, 2_000_000, 20_000


def look_over(names: int) -> None:
    """Flood a node and look at every structure."""
    node, before, after = flood(names)
    assert after.names >= names
    for name, (count, limit) in after.counts.items():
        assert count <= limit, (name, count, limit)
    count, where = after.largest
    assert count <= node.largest_limit, (count, where)
    assert not has_grown(before, after), (before, after)


def test_a_hundred_thousand_names() -> None:
    """Every structure is at or under its limit, and nothing grows any more."""
    look_over(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_million_names() -> None:
    """The same, with far more."""
    look_over(NAMES_MANY)


@pytest.mark.parametrize(("kind", "name"), [(TenantAnswers, "_make_room"), (Tombstones, "forget_surplus")])
def test_a_structure_that_forgets_nothing_is_found(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has a limit is named."""
    monkeypatch.setattr(kind, name, lambda *_: [])
    with pytest.raises(AssertionError, match=r"answers|tombstones|keys"):
        look_over(NAMES_FEW)


def test_a_structure_that_nobody_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody thought of is found by what can be reached from the node."""
    lend = Lender.lend

    def lend_and_remember(self: Any, client: Any, tenant: str, reference: Any, **named: Any) -> Any:
        self.__dict__.setdefault("asked", {})[reference] = client
        return lend(self, client, tenant, reference, **named)

    monkeypatch.setattr(Lender, "lend", lend_and_remember)
    with pytest.raises(AssertionError):
        look_over(NAMES_FEW)
