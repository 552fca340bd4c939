"""Limits beside their use, for each tenant and for the node."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.metrics_core import Metric

from kvbridge.observe.tenant_metrics import Level, TenantSample, tenant_families
from tests.unit.observe.test_metrics import USAGE


def samples() -> list[TenantSample]:
    """Return two tenants, one of which has a limit that the other has not."""
    first = TenantSample(
        tenant="team-a",
        usage=USAGE,
        levels={"payloads_max": Level(used=3, limit=4), "requests_per_second": Level(used=0.5, limit=10)},
        refusals={"payloads_max": 7, "other": 0},
    )
    levels = {"payloads_max": Level(used=0, limit=9)}
    return [first, replace(first, tenant="team-b", levels=levels, refusals={"payloads_max": 0, "other": 1})]


def series(families: list[Metric]) -> dict[tuple[str, ...], float]:
    """Return every sample by its name and the values of its labels in order."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in families
        for sample in family.samples
    }


def test_use_and_limit_have_the_same_labels() -> None:
    """One rule divides the one by the other, whichever limit it is."""
    found = series(list(tenant_families(samples(), {"sessions_max": Level(used=1, limit=8)})))
    used = {key[1:]: value for key, value in found.items() if key[0] == "kvbridge_limit_used"}
    most = {key[1:]: value for key, value in found.items() if key[0] == "kvbridge_limit_max"}
    assert used.keys() == most.keys()
    assert {key: used[key] / most[key] for key in used} == {
        ("sessions_max", ""): 0.125,
        ("payloads_max", "team-a"): 0.75,
        ("requests_per_second", "team-a"): 0.05,
        ("payloads_max", "team-b"): 0,
    }


def test_bytes_and_refusals_are_told_for_each_tenant() -> None:
    """Every state and every limit, those at 0 too."""
    found = series(list(tenant_families(samples(), {})))
    states = {key[1]: value for key, value in found.items() if key[0] == "kvbridge_tenant_arena_bytes"}
    assert states == {"reserved": 10, "committed": 20, "draining": 30, "quarantined": 5, "free": 35}
    assert found["kvbridge_limit_refusals_total", "payloads_max", "team-a"] == 7
    assert found["kvbridge_limit_refusals_total", "other", "team-b"] == 1
    assert found["kvbridge_limit_refusals_total", "payloads_max", "team-b"] == 0
