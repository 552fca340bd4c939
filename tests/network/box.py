"""Memory that bytes are pulled into, which notices whoever touches it too late."""

from __future__ import annotations

import asyncio

from kvbridge.core.errors import InvalidFieldError

_ROOM_BYTES = (3, 4093, 65_521, 262_139)
"""Sizes of the pieces of room that are offered, in turn; none fits a page."""


class Box:
    """Room for a number of bytes; a `Sink`."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        """Take so many bytes, or break behind `fails_at`."""
        self._memory = bytearray(count)
        self._view = memoryview(self._memory)
        self._fails_at = fails_at
        self._began = asyncio.Event()
        self.received = 0
        self.is_shut = False
        self.touched_late = False

    @property
    def remaining_bytes(self) -> int:
        """Return how many bytes are missing."""
        return len(self._memory) - self.received

    async def began(self, count: int = 1) -> None:
        """Wait until so many bytes, or more, are here."""
        while self.received < count:
            self._began.clear()
            await self._began.wait()

    def holds(self, content: memoryview) -> bool:
        """Tell whether these bytes, and nothing else, are here."""
        return self._memory == content

    def shut(self) -> None:
        """Want nothing more."""
        self.is_shut = True

    def write(self, chunk: memoryview) -> None:
        """Copy the next bytes to their places."""
        self._require_open()
        if chunk.nbytes > self.remaining_bytes:
            raise InvalidFieldError("chunk", "goes beyond the end")
        self._view[self.received : self.received + chunk.nbytes] = chunk
        self._note(chunk.nbytes)

    def room(self) -> list[memoryview]:
        """Return the places of the next bytes."""
        self._require_open()
        room, start = [], self.received
        for size in _ROOM_BYTES:
            if start < len(self._memory):
                room.append(self._view[start : start + size])
                start += size
        return room

    def advance(self, nbytes: int) -> None:
        """Note that so many bytes were written."""
        self._require_open()
        self._note(nbytes)

    def _note(self, nbytes: int) -> None:
        self.received += nbytes
        self._began.set()

    def _require_open(self) -> None:
        if self.is_shut:
            self.touched_late = True
        if self._fails_at is not None and self.received >= self._fails_at:
            raise InvalidFieldError("box", "is broken")
