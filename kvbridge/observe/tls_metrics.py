"""How certificate files stand, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvbridge.tls import TlsStanding


class TlsMetrics(Collector):
    """One series for each set of files."""

    def __init__(self, standings: Callable[[], Sequence[TlsStanding]]) -> None:
        """Ask `standings` at every scrape."""
        self._standings = standings

    def collect(self) -> Iterator[Metric]:
        """Yield every family as it is now."""
        expires = GaugeMetricFamily(
            "kvbridge_tls_certificate_expires_seconds",
            "When the certificate in use expires, in seconds since the epoch.",
            labels=["files"],
        )
        good = GaugeMetricFamily(
            "kvbridge_tls_files_good", "0 while the newest certificate files cannot be used, else 1.", labels=["files"]
        )
        reloads = CounterMetricFamily(
            "kvbridge_tls_reloads", "How often other certificate files were taken into use.", labels=["files"]
        )
        failures = CounterMetricFamily(
            "kvbridge_tls_reload_failures", "How often new certificate files could not be used.", labels=["files"]
        )
        for standing in self._standings():
            labels = [standing.purpose]
            if standing.expires_at is not None:
                expires.add_metric(labels, standing.expires_at)
            good.add_metric(labels, float(not standing.problem))
            reloads.add_metric(labels, standing.reloads)
            failures.add_metric(labels, standing.failures)
        yield from (expires, good, reloads, failures)
