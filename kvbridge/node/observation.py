"""How a node shows what it does: records for people, the journal's file, and metrics, all fed by the journal."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvbridge.config import BridgeConfig
from kvbridge.node.prefetching import Prefetching
from kvbridge.observe.journal_file import JournalFile
from kvbridge.observe.metrics import Metrics, NodeSample, TextSample
from kvbridge.observe.rotating_file import RotatingFile
from kvbridge.observe.tenant_metrics import Level
from kvbridge.wire.journal import RecordEncoder

if TYPE_CHECKING:
    from kvbridge.node.bridge import Bridge

_log = logging.getLogger(__name__)


class Observation:
    """What listens to a node's journal."""

    def __init__(self, bridge: Bridge) -> None:
        """Listen to the journal of `bridge`, and ask it how it is at every scrape."""
        config = bridge.config
        self.records = RecordEncoder(config.node_id)
        self.file = _journal_file(config, self.records) if config.journal_file else None
        self.metrics = Metrics(lambda: _sample(bridge, self.file), limits=config.limits(), started_at=time.time())
        bridge.journal.add_listener(self.metrics.observe)
        if self.file is not None:
            bridge.journal.add_listener(self.file.put)

    def __repr__(self) -> str:
        """Show where records go."""
        return f"<Observation: {self.metrics!r}, {self.file!r}>"

    def start(self) -> None:
        """Begin to write the journal's file, if there is one."""
        if self.file is not None:
            self.file.start()

    async def close(self) -> None:
        """Write what waits to be written, within a bounded time."""
        if self.file is not None and not await asyncio.to_thread(self.file.close):
            _log.warning("the journal's file was not written to its end in time")


def _journal_file(config: BridgeConfig, records: RecordEncoder) -> JournalFile:
    file = RotatingFile(
        config.journal_file, bytes_max=config.journal_file_bytes_max, files_max=config.journal_files_max
    )
    return JournalFile(file, records)


def _texts(bridge: Bridge) -> TextSample:
    store = bridge.texts.store
    if store is None:
        return TextSample()
    return TextSample(rows=store.rows, bytes=store.bytes, dropped=store.dropped, failures=store.failures)


def _prefetches(prefetching: Prefetching) -> dict[str, int]:
    prefetching.sweep()
    return asdict(prefetching.counts)


def _sample(bridge: Bridge, file: JournalFile | None) -> NodeSample:
    return NodeSample(
        usages=bridge.stock.usages(),
        sessions=len(bridge.sessions),
        draining=bridge.draining,
        kill_switch=bridge.catalog.kill_switch_reason() is not None,
        catalog_version=bridge.catalog.version,
        catalog_file_good=not bridge.catalog.file_problem,
        published_bytes=bridge.traffic.published_bytes,
        uploaded_bytes=bridge.traffic.uploaded_bytes,
        downloaded_bytes=bridge.traffic.downloaded_bytes,
        pulled_bytes=bridge.traffic.pulled_bytes,
        pulled_from_owners_bytes=bridge.traffic.pulled_from_owners_bytes,
        pulled_from_replicas_bytes=bridge.traffic.pulled_from_replicas_bytes,
        sent_bytes=bridge.traffic.sent_bytes,
        prefetches=_prefetches(bridge.prefetching),
        journal_records=len(bridge.journal),
        journal_dropped=0 if file is None else file.dropped,
        journal_write_errors=0 if file is None else file.write_errors,
        directory=bridge.cluster.sample(),
        access_file_good=not bridge.access.file_problem,
        texts=_texts(bridge),
        tenants=bridge.quotas.samples(),
        levels={
            "sessions_max": Level(used=len(bridge.sessions), limit=bridge.config.sessions_max),
            "concurrent_calls_max": Level(used=bridge.quotas.calls, limit=bridge.config.concurrent_calls_max),
            "watches_max": Level(used=len(bridge.containment.watchers), limit=bridge.config.watches_max),
        },
    )
