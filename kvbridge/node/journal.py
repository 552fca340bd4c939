"""The handoff journal: the newest records, by their names."""

from __future__ import annotations

from collections import OrderedDict

from kvbridge.core.journal import HandoffRecord


class Journal:
    """A bounded ring of records."""

    def __init__(self, records_max: int) -> None:
        """Start empty."""
        self._records_max = records_max
        self._records: OrderedDict[str, HandoffRecord] = OrderedDict()

    def __repr__(self) -> str:
        """Show how many records there are."""
        return f"<Journal of {len(self._records)} of at most {self._records_max} handoffs>"

    def __len__(self) -> int:
        """Return how many records there are."""
        return len(self._records)

    def add(self, record: HandoffRecord) -> None:
        """Remember a handoff, and forget the oldest if there are too many."""
        self._records[record.handoff_id] = record
        if len(self._records) > self._records_max:
            self._records.popitem(last=False)

    def find(self, handoff_id: str) -> HandoffRecord | None:
        """Return the record of this name, if it is remembered."""
        return self._records.get(handoff_id)
