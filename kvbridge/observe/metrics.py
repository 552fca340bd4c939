"""What a node measures about itself, for Prometheus: in a registry of its own, never the process's.

Handoffs are counted as the journal tells of them; everything else is asked of the node when somebody scrapes. Labels
have few values, all known beforehand, and every series of a counter is there from the start, so that rates can be
taken of what has not happened yet.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbridge.core.journal import HandoffQuality, HandoffRecord, HandoffUse
from kvbridge.core.ledger import Usage
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.observe.directory_metrics import DirectorySample, directory_families
from kvbridge.observe.tallies import Distribution, Tally
from kvbridge.observe.tenant_metrics import BYTE_STATES, Level, TenantSample, tenant_families
from kvbridge.version import VERSION

REASONS: tuple[Reason, ...] = tuple(reason for reason in Reason if reason not in SDK_ONLY_REASONS)
"""Reasons that a node gives, each a value of the label `reason`."""
GATE_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1)
HANDOFF_BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_UNKNOWN = "unknown"
_COUNTS = {
    "payloads": "Payloads that occupy memory, in all states.",
    "leases": "Live leases of consumers.",
    "holds": "Live holds of producers.",
    "reservations": "Live reservations, those under verification included.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """The store of texts at the moment of a scrape; all 0 if there is none."""

    rows: int = 0
    """Payloads of which there is something."""
    bytes: int = 0
    """What that takes."""
    dropped: int = 0
    """What was not written and never will be."""
    failures: int = 0
    """How often the file could not be written or read, or not in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """A node at the moment of a scrape."""

    usages: Sequence[Usage]
    """Where the bytes are, for each tenant."""
    sessions: int
    """Live local clients."""
    draining: bool
    """Whether the node is shutting down."""
    kill_switch: bool
    """Whether every handoff is text."""
    catalog_version: int
    """Version of the running catalog."""
    catalog_file_good: bool
    """Whether the catalog's file, if there is one, is what is running."""
    published_bytes: int
    """Canonical bytes that were committed since the start."""
    uploaded_bytes: int
    """Bytes that came in by value from clients since the start."""
    downloaded_bytes: int
    """Bytes that went out by value to clients since the start."""
    pulled_bytes: int
    """Bytes that came in from other nodes since the start."""
    pulled_from_owners_bytes: int
    """Of these, bytes that came from the nodes that own them."""
    pulled_from_replicas_bytes: int
    """Of these, bytes that came from other nodes that had a replica."""
    sent_bytes: int
    """Bytes that went out to other nodes since the start."""
    prefetches: Mapping[str, int]
    """Prefetches since the start by what became of them."""
    journal_records: int
    """Handoffs that are remembered."""
    journal_dropped: int
    """Records that will never be in the journal's file."""
    journal_write_errors: int
    """Writes to that file that failed."""
    directory: DirectorySample = field(default_factory=DirectorySample)
    """The directory and the other nodes."""
    access_file_good: bool = True
    """Whether all of the access file, if there is one, is in force."""
    texts: TextSample = TextSample()
    """The store of texts."""
    tenants: Sequence[TenantSample] = ()
    """Each tenant's memory and limits."""
    levels: Mapping[str, Level] = field(default_factory=dict)
    """Limits of the node as a whole, by the name of the setting."""


Sample: TypeAlias = Callable[[], NodeSample]


class Metrics(Collector):
    """The metrics of one node; all but scrapes of `registry` happen on the event loop's thread."""

    def __init__(self, sample: Sample, *, limits: Mapping[str, float], started_at: float) -> None:
        """Ask `sample` at every scrape; `limits` are the settings in force; started at so many seconds of the epoch."""
        self._sample = sample
        self._limits = dict(limits)
        self._started_at = started_at
        self._leased_bytes = 0
        self._handoffs = _by_reason("kvbridge_handoffs", "Handoffs that were answered.")
        self._parts = _by_reason("kvbridge_parts", "Parts of handoffs that were answered.")
        self._reports = _reports()
        self._gate_seconds = Distribution(
            "kvbridge_gate_seconds",
            "Time that the gate's checks took for one part, checks of bytes excluded.",
            GATE_BUCKETS,
        )
        self._handoff_seconds = Distribution(
            "kvbridge_handoff_seconds", "Time from the arrival of an Acquire to its answer.", HANDOFF_BUCKETS
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def __repr__(self) -> str:
        """Show what was counted."""
        return f"<Metrics: {self._handoffs!r}, {self._handoff_seconds!r}>"

    def observe(self, record: HandoffRecord) -> None:
        """Count a handoff, or what is reported of it if it has an outcome."""
        if record.outcome is not None:
            self._reports.add((record.outcome.use, record.outcome.quality))
            return
        reasons = [part.reason for part in record.parts]
        self._handoffs.add(next((reason for reason in reasons if reason is not None), None))
        self._handoff_seconds.add(record.seconds)
        for part, reason in zip(record.parts, reasons, strict=True):
            self._parts.add(reason)
            self._gate_seconds.add(sum([finding.seconds for finding in part.verdict.findings]))
            if part.leased:
                self._leased_bytes += part.payload_bytes

    def collect(self) -> Iterator[Metric]:
        """Yield every family as it is now."""
        sample = self._sample()
        for tally in (self._handoffs, self._parts, self._reports):
            yield tally.family()
        yield self._gate_seconds.family()
        yield self._handoff_seconds.family()
        yield _payload_bytes(sample, self._leased_bytes)
        yield _pulled(sample)
        yield _prefetches(sample.prefetches)
        yield from _memory(sample.usages)
        yield from directory_families(sample.directory)
        yield from tenant_families(sample.tenants, sample.levels)
        yield from _node(sample)
        yield from self._constants()

    def _constants(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("kvbridge_build_info", "1, with what is running.", labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1)
        yield build
        yield _gauge(
            "kvbridge_start_time_seconds", "When the node started, in seconds since the epoch.", self._started_at
        )
        limits = GaugeMetricFamily(
            "kvbridge_limit", "Numeric settings in force, each in the unit that its name says.", labels=["setting"]
        )
        for name, value in self._limits.items():
            limits.add_metric([name], value)
        yield limits


def _by_reason(name: str, text: str) -> Tally[Reason | None]:
    """Return counts of caches, under None, and of each reason to take the text."""
    values: dict[Reason | None, tuple[str, str]] = {None: ("kv", "")}
    values |= {reason: ("text", reason.value) for reason in REASONS}
    return Tally(name, text, ["directive", "reason"], values)


def _reports() -> Tally[tuple[HandoffUse, HandoffQuality | None]]:
    qualities = (*HandoffQuality, None)
    values = {
        (use, quality): (use.value.lower(), _UNKNOWN if quality is None else quality.value.lower())
        for use in HandoffUse
        for quality in qualities
    }
    return Tally("kvbridge_reports", "Reports of consumers.", ["use", "quality"], values)


def _node(sample: NodeSample) -> Iterator[Metric]:
    yield _gauge("kvbridge_sessions", "Live local clients.", sample.sessions)
    yield _gauge("kvbridge_draining", "1 while the node is shutting down, else 0.", sample.draining)
    yield _gauge(
        "kvbridge_kill_switch", "1 while the kill switch makes every handoff text, else 0.", sample.kill_switch
    )
    yield _gauge("kvbridge_catalog_version", "Version of the running catalog.", sample.catalog_version)
    yield _gauge(
        "kvbridge_catalog_file_good", "0 while the catalog's file cannot run, else 1.", sample.catalog_file_good
    )
    yield _gauge(
        "kvbridge_access_file_good", "0 while not all of the access file is in force, else 1.", sample.access_file_good
    )
    yield _gauge("kvbridge_journal_records", "Handoffs that the journal remembers.", sample.journal_records)
    yield _counter("kvbridge_journal_dropped", "Records that the journal's file lacks.", sample.journal_dropped)
    yield _counter(
        "kvbridge_journal_write_errors",
        "Writes to the journal's file that failed and were tried again.",
        sample.journal_write_errors,
    )
    yield from _texts(sample.texts)


def _texts(texts: TextSample) -> Iterator[Metric]:
    yield _gauge("kvbridge_text_store_rows", "Payloads of which the text store has something.", texts.rows)
    yield _gauge("kvbridge_text_store_bytes", "What they take in the text store.", texts.bytes)
    yield _counter("kvbridge_text_store_dropped", "What the text store was told and does not have.", texts.dropped)
    yield _counter(
        "kvbridge_text_store_failures",
        "Times that the text store could not be written or read, or not in time.",
        texts.failures,
    )


def _memory(usages: Sequence[Usage]) -> Iterator[Metric]:
    """Yield where the bytes of all arenas together are, and how much of each thing there is."""
    yield _gauge("kvbridge_arena_size_bytes", "Size of the arenas.", sum(usage.arena_bytes for usage in usages))
    arena = GaugeMetricFamily("kvbridge_arena_bytes", "Bytes of the arenas by state.", labels=["state"])
    for state in BYTE_STATES:
        arena.add_metric([state], sum(getattr(usage, f"{state}_bytes") for usage in usages))
    yield arena
    for name, text in _COUNTS.items():
        yield _gauge(f"kvbridge_{name}", text, sum(getattr(usage, name) for usage in usages))


def _payload_bytes(sample: NodeSample, leased_bytes: int) -> Metric:
    family = CounterMetricFamily("kvbridge_payload_bytes", "Canonical bytes of payloads.", labels=["direction"])
    family.add_metric(["published"], sample.published_bytes)
    family.add_metric(["uploaded"], sample.uploaded_bytes)
    family.add_metric(["leased"], leased_bytes)
    family.add_metric(["downloaded"], sample.downloaded_bytes)
    family.add_metric(["pulled"], sample.pulled_bytes)
    family.add_metric(["sent"], sample.sent_bytes)
    return family


def _pulled(sample: NodeSample) -> Metric:
    family = CounterMetricFamily(
        "kvbridge_pulled_bytes",
        "Canonical bytes that came in from other nodes.",
        labels=["source"],
    )
    family.add_metric(["owner"], sample.pulled_from_owners_bytes)
    family.add_metric(["replica"], sample.pulled_from_replicas_bytes)
    return family


def _prefetches(counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        "kvbridge_prefetches", "Payloads of other nodes that were to be brought over beforehand.", labels=["outcome"]
    )
    for outcome, count in counts.items():
        family.add_metric([outcome], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
