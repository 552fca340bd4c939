"""What is remembered of payloads that ended; bounded, the oldest is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.core.ledger.records import Tombstone
from kvbridge.core.tokens import TOKEN_DIGEST_BYTES, TokenSequence

DETAIL_CHARACTERS_MAX = 1024
"""Longest detail that is remembered; the rest is cut off."""


class Tombstones:
    """Tombstones by key and generation, in the order of their payloads' ends."""

    def __init__(self, limits: LedgerLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._stones: OrderedDict[PayloadReference, tuple[Tombstone, int]] = OrderedDict()  # with their bytes
        self.bytes = 0

    def __repr__(self) -> str:
        """Show how much is remembered."""
        return f"<Tombstones of {len(self._stones)} payloads in {self.bytes} bytes>"

    def __len__(self) -> int:
        """Return how many payloads are remembered."""
        return len(self._stones)

    def find(self, reference: PayloadReference) -> Tombstone | None:
        """Return the tombstone of exactly this key and generation."""
        stone = self._stones.get(reference)
        return None if stone is None else stone[0]

    def put(self, tombstone: Tombstone) -> None:
        """Remember a payload as the one that ended last, in place of what was remembered of it before.

        A tombstone that is larger than the limit on bytes alone keeps its reason and loses its text and tokens.
        """
        self.discard(tombstone.reference)
        if len(tombstone.detail) > DETAIL_CHARACTERS_MAX:
            tombstone = replace(tombstone, detail=tombstone.detail[:DETAIL_CHARACTERS_MAX])
        size = _size(tombstone)
        if size > self._limits.tombstone_bytes_max:
            tombstone = replace(tombstone, fallback=FallbackText(), tokens=None)
            size = _size(tombstone)
        self._stones[tombstone.reference] = tombstone, size
        self.bytes += size

    def discard(self, reference: PayloadReference) -> None:
        """Forget one tombstone, if it is there."""
        stone = self._stones.pop(reference, None)
        if stone is not None:
            self.bytes -= stone[1]

    def forget_surplus(self) -> list[PayloadReference]:
        """Forget the oldest until both limits are kept, and return which were forgotten."""
        forgotten = []
        while len(self._stones) > self._limits.tombstones_max or self.bytes > self._limits.tombstone_bytes_max:
            reference, (_, size) = self._stones.popitem(last=False)
            self.bytes -= size
            forgotten.append(reference)
        return forgotten


def text_bytes(fallback: FallbackText, tokens: TokenSequence | None) -> int:
    """Return the bytes that a payload's text and tokens take, in UTF-8."""
    text = sum(len(part.encode("utf-8")) for part in (fallback.text, fallback.text_uri, fallback.summary) if part)
    return text + (0 if tokens is None else TOKEN_DIGEST_BYTES + len(tokens.packed_ids or b""))


def _size(tombstone: Tombstone) -> int:
    words = len(tombstone.reference.key.encode("utf-8")) + len(tombstone.detail.encode("utf-8", "surrogatepass"))
    return words + text_bytes(tombstone.fallback, tombstone.tokens)
