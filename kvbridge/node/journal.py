"""The handoff journal: the newest records, found by their names, by their reasons, or as the last one.

Everything is O(1): beside the records an index holds, for each tenant and reason, the newest record that has it. A
record that is forgotten is the oldest of all, so if an index entry still names it, no other record has that reason.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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


class Journal:
    """A bounded ring of records."""

    def __init__(self, records_max: int) -> None:
        """Start empty."""
        self._records_max = records_max
        self._parts_max = records_max * PARTS_PER_RECORD_MEAN_MAX
        self._parts = 0
        self._records: OrderedDict[str, HandoffRecord] = OrderedDict()
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
        return JournalSnapshot(records=len(self._records), parts=self._parts, reported=reported)

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` for every record that is added or reported on from now on; what it raises is logged."""
        self._listeners.append(listener)

    def add(self, record: HandoffRecord) -> None:
        """Remember a handoff, and forget the oldest if there are too many."""
        self._records[record.handoff_id] = record
        self._parts += len(record.parts)
        for name in _index_names(record):
            self._newest[name] = record.handoff_id
        while len(self._records) > self._records_max or (self._parts > self._parts_max and len(self._records) > 1):
            self._forget_oldest()
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

    def _forget_oldest(self) -> None:
        handoff_id, record = self._records.popitem(last=False)
        self._parts -= len(record.parts)
        for name in _index_names(record):
            if self._newest.get(name) == handoff_id:
                del self._newest[name]


def _index_names(record: HandoffRecord) -> Iterator[tuple[str, Reason | None]]:
    yield record.tenant, None
    for part in record.parts:
        if part.reason is not None:
            yield record.tenant, part.reason
