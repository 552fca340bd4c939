"""Which generations of which key there are, and which of them a consumer finds.

Generations never repeat while the ledger lives, although keys are forgotten: a key is kept while it has a payload or
a tombstone; when it is forgotten, its last generation raises a *floor* that all keys share, and a key that the ledger
does not know starts right above the floor. So a key's first generation is 1 until some key has been forgotten; later
it may be greater, but it is never one that the key had before. Whoever knows what an earlier life of the node gave out
raises the floor above that, and then the same holds over lives.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.ledger.entries import PayloadEntry
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.ledger.records import Tombstone
from kvbridge.core.ledger.states import PENDING_STATES, PayloadState
from kvbridge.core.ledger.tombstones import Tombstones
from kvbridge.core.transfer_encoding import unmarked_key


@dataclass(slots=True, kw_only=True)
class _Key:
    """What is known of one key."""

    last_generation: int
    """The newest generation that was given out."""
    committed_generation: int = 0
    """The newest generation that was ever committed; 0 if none was."""
    entries: dict[int, PayloadEntry] = field(default_factory=dict)
    """Payloads that occupy memory by generation, in increasing order."""
    pending: list[int] = field(default_factory=list)
    """Generations that may become available, increasing."""
    ended: list[int] = field(default_factory=list)
    """Generations that have a tombstone, increasing."""


class KeyIndex:
    """Payloads and tombstones by key and generation."""

    def __init__(self, limits: LedgerLimits) -> None:
        """Start empty."""
        self.tombstones = Tombstones(limits)
        self._keys: dict[str, _Key] = {}
        self._marked: dict[str, set[str]] = {}
        """The keys of replicas that lost bits, by the handoff reference behind them."""
        self._generation_floor = 0

    def __repr__(self) -> str:
        """Show how many keys are known."""
        return f"<KeyIndex of {len(self._keys)} keys, {len(self.tombstones)} tombstones>"

    def __len__(self) -> int:
        """Return the number of keys that are known."""
        return len(self._keys)

    def number_above(self, generation: int) -> None:
        """Let no key have this generation or a lesser one; none may be known yet."""
        assert not self._keys, self
        self._generation_floor = max(self._generation_floor, generation)

    def next_reference(self, key: str) -> PayloadReference:
        """Give out a new generation. The caller must `add` or `end` it before anything else."""
        known = self._keys.get(key)
        if known is None:
            known = self._keys[key] = _Key(last_generation=self._generation_floor)
            if (unmarked := unmarked_key(key)) != key:
                self._marked.setdefault(unmarked, set()).add(key)
        known.last_generation += 1
        return PayloadReference(key=key, generation=known.last_generation)

    def add(self, entry: PayloadEntry) -> None:
        """Enter a reserved payload."""
        known = self._keys[entry.reference.key]
        known.entries[entry.reference.generation] = entry
        known.pending.append(entry.reference.generation)

    def commit(self, entry: PayloadEntry) -> None:
        """Make a payload available: older generations of its key are superseded, or it is itself if it comes late."""
        known = self._keys[entry.reference.key]
        generation = entry.reference.generation
        _discard(known.pending, generation)
        if generation < known.committed_generation:
            entry.superseded = True
            return
        older = known.entries.get(known.committed_generation)
        if older is not None:
            older.superseded = True
        known.committed_generation = generation

    def end(self, tombstone: Tombstone) -> None:
        """Replace what a consumer finds of this generation by a tombstone; its payload may still occupy memory."""
        known = self._keys[tombstone.reference.key]
        _discard(known.pending, tombstone.reference.generation)
        if self.tombstones.find(tombstone.reference) is None:
            insort(known.ended, tombstone.reference.generation)
        self.tombstones.put(tombstone)
        for reference in self.tombstones.forget_surplus():
            _discard(self._keys[reference.key].ended, reference.generation)
            self._forget_if_empty(reference.key)

    def remove(self, entry: PayloadEntry) -> None:
        """Forget a payload whose memory is free."""
        del self._keys[entry.reference.key].entries[entry.reference.generation]
        self._forget_if_empty(entry.reference.key)

    def find(self, key: str, generation: int) -> PayloadEntry | Tombstone | None:
        """Return what a consumer gets, as `Ledger.find` describes it."""
        known = self._keys.get(key)
        if known is None:
            return None
        if generation == 0:
            return self._newest(key, known)
        entry = known.entries.get(generation)
        if entry is not None and (entry.state in PENDING_STATES or entry.state is PayloadState.COMMITTED):
            return entry
        return self.tombstones.find(PayloadReference(key=key, generation=generation))

    def occupant(self, key: str, generation: int) -> PayloadEntry | None:
        """Return the payload that occupies memory, in whatever state; 0 means the newest."""
        known = self._keys.get(key)
        if known is None or not known.entries:
            return None
        return known.entries.get(generation or next(reversed(known.entries)))

    def occupants(self, key: str) -> list[PayloadEntry]:
        """Return the payloads that occupy memory, in whatever state, oldest first."""
        known = self._keys.get(key)
        return [] if known is None else list(known.entries.values())

    def marked(self, key: str) -> tuple[str, ...]:
        """Return the keys of replicas of the handoff reference `key` that lost bits, as far as any are known."""
        return tuple(sorted(self._marked.get(key, ())))

    def _newest(self, key: str, known: _Key) -> PayloadEntry | Tombstone | None:
        committed = known.entries.get(known.committed_generation)
        if committed is not None and committed.state is PayloadState.COMMITTED:
            return committed
        # What is still pending behind a newer commit will be superseded from the start: nobody should wait for it.
        if known.pending and known.pending[-1] > known.committed_generation:
            return known.entries[known.pending[-1]]
        if known.ended:
            return self.tombstones.find(PayloadReference(key=key, generation=known.ended[-1]))
        return None

    def _forget_if_empty(self, key: str) -> None:
        known = self._keys[key]
        if not known.entries and not known.ended:
            self._generation_floor = max(self._generation_floor, known.last_generation)
            del self._keys[key]
            self._forget_mark(key)

    def _forget_mark(self, key: str) -> None:
        marked = self._marked.get(unmarked_key(key))
        if marked is not None:
            marked.discard(key)
            if not marked:
                del self._marked[unmarked_key(key)]


def _discard(generations: list[int], generation: int) -> None:
    """Remove `generation` from the increasing list, if it is there."""
    index = bisect_left(generations, generation)
    if index < len(generations) and generations[index] == generation:
        del generations[index]
