"""Entries in the order of their keys."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Generic, TypeAlias, TypeVar

EntryKey: TypeAlias = tuple[str, ...]
"""What tells entries apart and orders them; the name comes first."""

_Entry = TypeVar("_Entry")


class EntryTable(Generic[_Entry]):
    """Entries by key. Never changed; only followed by another."""

    __slots__ = ("_by_key", "_keys")

    def __init__(self, by_key: Mapping[EntryKey, _Entry], keys: Iterable[EntryKey] | None = None) -> None:
        """Take over entries; `keys`, if given, are theirs in order."""
        self._by_key = by_key
        self._keys = tuple(sorted(by_key) if keys is None else keys)

    def __len__(self) -> int:
        """Return how many entries there are."""
        return len(self._by_key)

    def __eq__(self, other: object) -> bool:
        """Tell whether the entries are the same."""
        return isinstance(other, EntryTable) and self._by_key == other._by_key

    def __hash__(self) -> int:
        """Return what equal tables have in common."""
        return hash(self._keys)

    @property
    def entries(self) -> tuple[_Entry, ...]:
        """Return all entries in order."""
        return tuple(self._by_key[key] for key in self._keys)

    def get(self, key: EntryKey) -> _Entry | None:
        """Return the entry under `key`."""
        return self._by_key.get(key)

    def first_named(self, name: str) -> _Entry | None:
        """Return the first entry whose key begins with `name`."""
        index = bisect_left(self._keys, (name,))
        if index < len(self._keys) and self._keys[index][0] == name:
            return self._by_key[self._keys[index]]
        return None

    def after(self, key: EntryKey, count_max: int) -> list[tuple[EntryKey, _Entry]]:
        """Return at most `count_max` entries that follow `key`, whether or not that is still there."""
        start = bisect_right(self._keys, key)
        return [(found, self._by_key[found]) for found in self._keys[start : start + count_max]]

    def put(self, key: EntryKey, entry: _Entry) -> EntryTable[_Entry]:
        """Return a table in which `entry` stands under `key`."""
        keys = self._keys
        if key not in self._by_key:
            index = bisect_left(keys, key)
            keys = (*keys[:index], key, *keys[index:])
        return EntryTable({**self._by_key, key: entry}, keys)

    def remove(self, key: EntryKey) -> EntryTable[_Entry]:
        """Return a table without the entry under `key`, which is in this one."""
        index = bisect_left(self._keys, key)
        by_key = {**self._by_key}
        del by_key[key]
        return EntryTable(by_key, (*self._keys[:index], *self._keys[index + 1 :]))
