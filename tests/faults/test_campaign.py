"""Campaigns of kills under load; the long ones are `make campaign`."""

from __future__ import annotations

import secrets

import pytest

from tests.faults.campaign import kill_clients, restart_bridge, table

SEED_BITS = 32


def test_a_few_clients_are_killed_under_load() -> None:
    """No wrong byte, no leak, nobody hangs, and everybody else is served."""
    findings = kill_clients(4, secrets.randbits(SEED_BITS))
    assert not findings.violations, table(findings)
    assert findings.kills.total() == 4
    assert findings.accepted


@pytest.mark.slow
def test_many_clients_are_killed_under_load() -> None:
    """The same at every stage, in all likelihood."""
    findings = kill_clients(60, secrets.randbits(SEED_BITS))
    assert not findings.violations, table(findings)


@pytest.mark.slow
def test_the_bridge_is_killed_under_load() -> None:
    """Every client goes on by itself each time."""
    findings = restart_bridge(5, secrets.randbits(SEED_BITS))
    assert not findings.violations, table(findings)
    assert len(findings.back_seconds) == 5
