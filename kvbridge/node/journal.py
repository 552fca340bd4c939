"""The handoff journal: the newest records, found by their names, by their reasons, or as the last one.

Everything is O(1): beside the records an index holds, for each tenant and reason, the newest record that has it. A
record that is forgotten is the oldest of its tenant, so if an index entry still names it, no other one has that reason.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.journal import HandoffRecord, Outcome
from kvbridge.core.reasons import Reason

_log = logging.getLogger(__name__)

PARTS_PER_RECORD_MEAN_MAX = 4
"""Parts that are remembered for each record that may be; a plan may have 64, and they are what takes memory."""
OUTCOME_DETAIL_CHARACTERS_MAX = 1024
"""Longest detail of a report that is remembered; the rest is cut off."""

Listener: TypeAlias = Callable[[HandoffRecord], None]
"""Told of a record when it is added, without an outcome, and again when its outcome is reported; must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSnapshot:
    """A journal at one moment."""

    records: int
    """Handoffs that are remembered."""
    parts: int
    """Parts of all of them."""
    reported: int
    """Those of which the consumer has reported."""


@dataclass(slots=True)
class _Ring:
    """One tenant's records."""

    handoff_ids: deque[str] = field(default_factory=deque)
    """Their names, the oldest first."""
    parts: int = 0
    """Parts of all of them."""


class Journal:
    """A bounded ring of records for each tenant, so that nobody's handoffs make another's forgotten."""

    def __init__(self, records_max: int, *, tenants: int = 1) -> None:
        """Start empty; each of `tenants` has an even share of `records_max`."""
        self._records_each = max(records_max // tenants, 1)
        self._records_max = records_max
        self._parts_each = self._records_each * PARTS_PER_RECORD_MEAN_MAX
        self._rings: defaultdict[str, _Ring] = defaultdict(_Ring)
        self._records: dict[str, HandoffRecord] = {}
        self._newest: dict[tuple[str, Reason | None], str] = {}
        self._listeners: list[Listener] = []

    def __repr__(self) -> str:
        """Show how many records there are."""
        return f"<Journal of {len(self._records)} of at most {self._records_max} handoffs>"

    def __len__(self) -> int:
        """Return how many records there are."""
        return len(self._records)

    def snapshot(self) -> JournalSnapshot:
        """Return what is remembered."""
        reported = sum(record.outcome is not None for record in self._records.values())
        return JournalSnapshot(
            records=len(self._records), parts=sum(ring.parts for ring in self._rings.values()), reported=reported
        )

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` for every record that is added or reported on from now on; what it raises is logged."""
        self._listeners.append(listener)

    def add(self, record: HandoffRecord) -> None:
        """Remember a handoff, and forget the oldest of its tenant if there are too many."""
        ring = self._rings[record.tenant]
        self._records[record.handoff_id] = record
        ring.handoff_ids.append(record.handoff_id)
        ring.parts += len(record.parts)
        for name in _index_names(record):
            self._newest[name] = record.handoff_id
        count = len(ring.handoff_ids)
        while count > self._records_each or (ring.parts > self._parts_each and count > 1):
            self._forget_oldest(ring)
            count -= 1
        self._tell(record)

    def report(self, handoff_id: str, client_id: str, outcome: Outcome) -> HandoffRecord:
        """Attach what the consumer says became of its handoff, in place of what it said before.

        Raises:
            UnknownReferenceError: no such handoff of this client is remembered.
        """
        record = self._records.get(handoff_id)
        if record is None or record.client_id != client_id:
            raise UnknownReferenceError("handoff_id", "no handoff of this name is remembered")
        outcome = replace(outcome, detail=outcome.detail[:OUTCOME_DETAIL_CHARACTERS_MAX])
        if record.outcome == outcome:
            return record
        record = self._records[handoff_id] = replace(record, outcome=outcome)
        self._tell(record)
        return record

    def find(self, handoff_id: str) -> HandoffRecord | None:
        """Return the record of this name, if it is remembered."""
        return self._records.get(handoff_id)

    def newest(self, tenant: str, reason: Reason | None = None) -> HandoffRecord | None:
        """Return a tenant's newest record, or the newest one with a part that fell back for `reason`, if any."""
        handoff_id = self._newest.get((tenant, reason))
        return None if handoff_id is None else self._records[handoff_id]

    def _tell(self, record: HandoffRecord) -> None:
        for listener in self._listeners:
            try:
                listener(record)
            except Exception:  # noqa: BLE001 - an outermost boundary: who only looks on takes no answer away
                _log.error("a listener of the journal failed", exc_info=True)

    def _forget_oldest(self, ring: _Ring) -> None:
        handoff_id = ring.handoff_ids.popleft()
        record = self._records.pop(handoff_id)
        ring.parts -= len(record.parts)
        for name in _index_names(record):
            if self._newest.get(name) == handoff_id:
                del self._newest[name]


def _index_names(record: HandoffRecord) -> Iterator[tuple[str, Reason | None]]:
    yield record.tenant, None
    for part in record.parts:
        if part.reason is not None:
            yield record.tenant, part.reason
