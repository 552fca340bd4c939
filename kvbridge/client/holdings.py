"""The memory behind a handoff: leased in the bridge's arena, or downloaded into this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvbridge.client.arenas import ArenaView
from kvbridge.client.references import Reference
from kvbridge.memory import slot_header
from kvbridge.memory.region import CharArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlace:
    """Where a leased slot lies in a file, for those who map pieces of it anew."""

    fd: int
    """Descriptor of the arena; open as long as the holding lives."""
    offset_bytes: int
    """Start of the slot's header."""


class Holding(Protocol):
    """Bytes of one payload that a consumer may read."""

    @property
    def buffer(self) -> CharArray:
        """Return the slot's bytes, header included; what is made from them keeps the holding's reference alive."""

    @property
    def capacity_tokens(self) -> int:
        """Return the capacity that the slot is laid out for."""

    @property
    def place(self) -> ArenaPlace | None:
        """Return where the slot lies in an arena; None in private memory."""

    def valid(self) -> bool:
        """Tell whether the bytes are still those of the payload."""

    def release(self) -> None:
        """Return the reference; the bytes must not be used any more."""


class SharedHolding:
    """A leased slot, read in place."""

    def __init__(
        self,
        lease: Reference,
        arena: ArenaView,
        *,
        offset_bytes: int,
        length_bytes: int,
        epoch: int,
        slot_generation: int,
        capacity_tokens: int,
    ) -> None:
        """Look at the slot through the arena's mapping."""
        self.buffer: CharArray = arena.slot(offset_bytes, length_bytes, lease)
        self.capacity_tokens = capacity_tokens
        self.place: ArenaPlace | None = ArenaPlace(fd=arena.fd, offset_bytes=offset_bytes)
        self._arena = arena
        self._lease = lease
        self._epoch = epoch
        self._slot_generation = slot_generation

    def valid(self) -> bool:
        """Tell whether the lease is live and the slot's header still shows this payload as ready."""
        return self._lease.live and slot_header.check(self.buffer, self._epoch, self._slot_generation)

    def release(self) -> None:
        """Return the lease."""
        self._lease.end()


class PrivateHolding:
    """A downloaded copy, which nobody else can change."""

    def __init__(self, buffer: CharArray, *, capacity_tokens: int) -> None:
        """Take over the copy."""
        self.buffer = buffer
        self.capacity_tokens = capacity_tokens
        self.place: ArenaPlace | None = None
        self._released = False

    def valid(self) -> bool:
        """Tell whether it was not released."""
        return not self._released

    def release(self) -> None:
        """Note that nobody uses it any more; the memory goes with its last user."""
        self._released = True
