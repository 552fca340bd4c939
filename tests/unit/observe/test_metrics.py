"""Metrics: the whole set of series from the start, and what each handoff adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbridge.core.journal import HandoffQuality, HandoffUse, Outcome
from kvbridge.core.ledger import Usage
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.observe.metrics import REASONS, Metrics, NodeSample
from kvbridge.v1 import types_pb2
from tests import records

USAGE = Usage(
    arena_bytes=100,
    reserved_bytes=10,
    committed_bytes=20,
    draining_bytes=30,
    quarantined_bytes=5,
    free_bytes=35,
    largest_free_bytes=35,
    evictable_bytes=0,
    payloads=3,
    reservations=1,
    holds=2,
    leases=4,
    residues=0,
    payload_text_bytes=0,
    tombstones=0,
    tombstone_bytes=0,
)
SAMPLE = NodeSample(
    usages=[USAGE, USAGE],
    sessions=6,
    draining=False,
    kill_switch=True,
    catalog_version=2,
    catalog_file_good=True,
    published_bytes=1,
    uploaded_bytes=2,
    downloaded_bytes=3,
    pulled_bytes=10,
    pulled_from_owners_bytes=6,
    pulled_from_replicas_bytes=4,
    sent_bytes=11,
    prefetches={"started": 3, "used": 2},
    journal_records=7,
    journal_dropped=8,
    journal_write_errors=9,
)


@pytest.fixture
def metrics() -> Metrics:
    """Return the metrics of a node that has done nothing."""
    return Metrics(lambda: SAMPLE, limits={"payloads_max": 5.0}, started_at=1000.0)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """Return the value of one series; None if there is none."""
    return metrics.registry.get_sample_value(name, labels)


def test_the_reasons_are_those_that_a_node_sends() -> None:
    """Label, core and API have one list of reasons."""
    sent = {name.removeprefix("REASON_") for name in dict(types_pb2.Reason.items())} - {"UNSPECIFIED"}
    assert set(REASONS) == set(Reason) - SDK_ONLY_REASONS
    assert {reason.value for reason in REASONS} == sent - {reason.value for reason in SDK_ONLY_REASONS}


def test_every_series_is_there_from_the_start(metrics: Metrics) -> None:
    """A rate can be taken of a reason that was never given, and no reason comes without its directive."""
    for name in ("kvbridge_handoffs_total", "kvbridge_parts_total"):
        assert value(metrics, name, directive="kv", reason="") == 0
        for reason in REASONS:
            assert value(metrics, name, directive="text", reason=reason) == 0
    for use in ("used", "discarded", "text"):
        for quality in ("good", "bad", "unknown"):
            assert value(metrics, "kvbridge_reports_total", use=use, quality=quality) == 0


def test_a_mixed_handoff_counts_once_and_its_parts_each(metrics: Metrics) -> None:
    """A handoff counts as text for its first part that fell back."""
    metrics.observe(records.record(records.leased(), records.refused(Reason.PAYLOAD_CORRUPT), seconds=0.0004))
    metrics.observe(records.record(seconds=0.002))
    assert value(metrics, "kvbridge_handoffs_total", directive="text", reason="PAYLOAD_CORRUPT") == 1
    assert value(metrics, "kvbridge_handoffs_total", directive="kv", reason="") == 1
    assert value(metrics, "kvbridge_parts_total", directive="kv", reason="") == 2
    assert value(metrics, "kvbridge_parts_total", directive="text", reason="PAYLOAD_CORRUPT") == 1
    assert value(metrics, "kvbridge_handoff_seconds_count") == 2
    assert value(metrics, "kvbridge_handoff_seconds_bucket", le="0.0005") == 1
    assert value(metrics, "kvbridge_handoff_seconds_sum") == pytest.approx(0.0024)
    assert value(metrics, "kvbridge_gate_seconds_count") == 3
    assert value(metrics, "kvbridge_payload_bytes_total", direction="leased") == 2 * 2560


def test_a_report_is_not_a_handoff(metrics: Metrics) -> None:
    """What is told again with an outcome counts as a report alone."""
    outcome = Outcome(use=HandoffUse.USED, quality=HandoffQuality.BAD)
    metrics.observe(replace(records.record(), outcome=outcome))
    metrics.observe(replace(records.record(), outcome=Outcome(use=HandoffUse.TEXT)))
    assert value(metrics, "kvbridge_reports_total", use="used", quality="bad") == 1
    assert value(metrics, "kvbridge_reports_total", use="text", quality="unknown") == 1
    assert value(metrics, "kvbridge_handoffs_total", directive="kv", reason="") == 0


def test_the_node_is_asked_at_every_scrape(metrics: Metrics) -> None:
    """Gauges are what the node says at that moment, over all tenants."""
    assert value(metrics, "kvbridge_arena_size_bytes") == 200
    states = {"reserved": 20, "committed": 40, "draining": 60, "quarantined": 10, "free": 70}
    assert {state: value(metrics, "kvbridge_arena_bytes", state=state) for state in states} == states
    for name, expected in {"leases": 8, "holds": 4, "reservations": 2, "payloads": 6, "sessions": 6}.items():
        assert value(metrics, f"kvbridge_{name}") == expected
    assert value(metrics, "kvbridge_draining") == 0
    assert value(metrics, "kvbridge_kill_switch") == 1
    assert value(metrics, "kvbridge_journal_dropped_total") == 8
    assert value(metrics, "kvbridge_limit", setting="payloads_max") == 5


def test_two_bridges_of_one_process_count_apart() -> None:
    """Nothing is kept in the process's own registry."""
    first, second = (Metrics(lambda: SAMPLE, limits={}, started_at=0.0) for _ in range(2))
    first.observe(records.record())
    assert value(first, "kvbridge_handoffs_total", directive="kv", reason="") == 1
    assert value(second, "kvbridge_handoffs_total", directive="kv", reason="") == 0


def test_names_and_units_follow_the_conventions(metrics: Metrics) -> None:
    """Every family has the project's prefix, a sentence of help and a base unit."""
    for family in metrics.collect():
        assert not any(sample.name.endswith("_created") for sample in family.samples)
        assert family.name.startswith("kvbridge_")
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_milliseconds", "_mib", "_total"))
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
