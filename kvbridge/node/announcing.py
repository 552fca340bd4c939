"""What a node tells the directory of its own keys: what changes, as it changes, and everything once in a while."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping

from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.ledger import Payload, PayloadEnded, PayloadState, Tombstone
from kvbridge.directory import Entry
from kvbridge.node.tenancy import Tenancy

BATCH_MAX = 500
"""Most keys that are told in one round trip."""
PENDING_MAX = 65_536
"""Most changes that wait to be told; if there are more, everything is told instead."""
_TIMES_PER_TTL = 3
_JITTER = 0.25
"""By up to this share a round begins early, so that nodes that started together do not go on telling together."""


class Announcer:
    """Knows what the directory has yet to be told."""

    def __init__(
        self,
        tenancies: Mapping[str, Tenancy],
        *,
        key_ttl_seconds: float,
        clock: Callable[[], float],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Tell of the keys of these tenants; `clock` is the ledgers', and `draw` gives chance, from 0 to 1."""
        self._tenancies = tenancies
        self._clock = clock
        self._draw = draw
        self._round_seconds = key_ttl_seconds / _TIMES_PER_TTL
        self._changed: dict[tuple[str, str], None] = {}
        self._walk: Iterator[tuple[str, str]] | None = None
        self._walk_at = clock() + self._pause()
        self.on_change: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        """Show how much waits."""
        return f"<Announcer with {len(self._changed)} changes to tell>"

    def committed(self, tenant: str, key: str) -> None:
        """Note that a payload can be had from now on."""
        self._note(tenant, key)

    def ended(self, tenant: str, ended: PayloadEnded) -> None:
        """Note a payload of which nothing but its text can be had any more."""
        self._note(tenant, ended.reference.key)

    def tell_everything(self) -> None:
        """Begin to tell everything, because the directory may know nothing."""
        self._walk = None
        self._walk_at = float("-inf")

    def batch(self) -> tuple[list[Entry], bool]:
        """Return what is to be told next, and whether there is more; what is returned counts as told."""
        entries = [self._entry(*name) for name in self._take_changed()]
        if len(entries) < BATCH_MAX:
            entries += self._take_walked(BATCH_MAX - len(entries))
        return entries, bool(self._changed) or self._walk is not None

    # Inside

    def _note(self, tenant: str, key: str) -> None:
        if is_handoff_reference(key):
            return
        self._changed[tenant, key] = None
        if len(self._changed) > PENDING_MAX:
            self._changed.clear()
            self.tell_everything()
        self.on_change()

    def _take_changed(self) -> list[tuple[str, str]]:
        names = list(self._changed)[:BATCH_MAX]
        for name in names:
            del self._changed[name]
        return names

    def _take_walked(self, count: int) -> list[Entry]:
        if self._walk is None:
            if self._clock() < self._walk_at:
                return []
            self._walk_at = self._clock() + self._pause()
            self._walk = self._everything()
        entries = []
        for name in self._walk:
            entries.append(self._entry(*name))
            if len(entries) == count:
                return entries
        self._walk = None
        return entries

    def _pause(self) -> float:
        return self._round_seconds * (1 - _JITTER * self._draw())

    def _everything(self) -> Iterator[tuple[str, str]]:
        """Yield every key under which there is something, page by page, so that the ledger is not held meanwhile."""
        for tenant, tenancy in self._tenancies.items():
            cursor: int | None = None
            while True:
                with tenancy.ledger() as ledger:
                    page = ledger.payloads(page_size=BATCH_MAX, cursor=cursor)
                yield from ((tenant, payload.reference.key) for payload in page.payloads if _is_own(payload))
                cursor = page.next_cursor
                if cursor is None:
                    break

    def _entry(self, tenant: str, key: str) -> Entry:
        """Return what holds for a key at this moment."""
        owned = newest(self._tenancies[tenant], key, now=self._clock())
        if owned is None:
            return Entry(tenant=tenant, key=key, generation=0)
        generation, committed_at = owned
        return Entry(tenant=tenant, key=key, generation=generation, committed_at=committed_at)


def newest(tenancy: Tenancy, key: str, *, now: float) -> tuple[int, float] | None:
    """Return the newest generation of a key of which anything can be told, and when it was committed in Unix time.

    What has ended still has its text, and why it ended is to be told; so it can be found, behind all that has not.
    """
    with tenancy.ledger() as ledger:
        found = ledger.find(now=now, key=key)
    if isinstance(found, Tombstone):
        return found.reference.generation, 0.0
    if found is None or found.committed_at is None:
        return None
    return found.reference.generation, max(time.time() - max(now - found.committed_at, 0.0), 0.0)


def _is_own(payload: Payload) -> bool:
    is_newest = payload.state is PayloadState.COMMITTED and not payload.superseded
    return is_newest and not is_handoff_reference(payload.reference.key)
