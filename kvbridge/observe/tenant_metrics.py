"""What every limit is and how much of it is used, and what each tenant's calls were refused for.

Use and limit have the same labels, so that one rule warns of all of them: `used / max > 0.9`. Limits that nothing is
refused for, because the oldest makes room, are not among them. The label `tenant` has as many values as the node has
tenants, and is empty for limits of the node as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvbridge.core.ledger import Usage

BYTE_STATES = ("reserved", "committed", "draining", "quarantined", "free")
"""Where a byte of an arena can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How far a limit is used."""

    used: float
    """How much of it, in the unit of the limit."""
    limit: float
    """The limit in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSample:
    """A tenant at the moment of a scrape."""

    tenant: str
    """Its name."""
    usage: Usage
    """Where its bytes are."""
    levels: Mapping[str, Level]
    """Each of its limits, by the name of the setting."""
    refusals: Mapping[str, int]
    """How many calls were refused since the start, by the limit's name; every limit is there."""


def tenant_families(tenants: Sequence[TenantSample], node_levels: Mapping[str, Level]) -> Iterator[Metric]:
    """Yield every family that has the label `tenant`."""
    yield _arenas(tenants)
    levels = [("", name, level) for name, level in node_levels.items()]
    levels += [(sample.tenant, name, level) for sample in tenants for name, level in sample.levels.items()]
    used = GaugeMetricFamily("kvbridge_limit_used", "How much of a limit is used.", labels=["setting", "tenant"])
    most = GaugeMetricFamily("kvbridge_limit_max", "The limit in force.", labels=["setting", "tenant"])
    for tenant, name, level in levels:
        used.add_metric([name, tenant], level.used)
        most.add_metric([name, tenant], level.limit)
    yield used
    yield most
    yield _refusals(tenants)


def _arenas(tenants: Sequence[TenantSample]) -> Metric:
    family = GaugeMetricFamily(
        "kvbridge_tenant_arena_bytes", "Bytes of a tenant's arena by state.", labels=["tenant", "state"]
    )
    for sample in tenants:
        for state in BYTE_STATES:
            family.add_metric([sample.tenant, state], getattr(sample.usage, f"{state}_bytes"))
    return family


def _refusals(tenants: Sequence[TenantSample]) -> Metric:
    family = CounterMetricFamily(
        "kvbridge_limit_refusals", "Calls that were refused because of a limit.", labels=["setting", "tenant"]
    )
    for sample in tenants:
        for name, count in sample.refusals.items():
            family.add_metric([name, sample.tenant], count)
    return family
