"""Bytes of a payload that are on their way here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypedDict, Unpack

from kvbridge.link.pieces import split
from kvbridge.link.port import Sink
from kvbridge.node.decoding import FrameReader


class ArrivalTerms(TypedDict):
    """What every arrival is given."""

    stall_seconds_max: float
    by: str
    node_id: str
    note: Callable[[int], None]


class Arrival:
    """A target whose bytes must keep coming and are told of as they do; a `Sink`."""

    def __init__(
        self,
        target: Sink,
        also: Callable[[memoryview], object],
        *,
        stall_seconds_max: float,
        by: str,
        node_id: str,
        note: Callable[[int], None],
    ) -> None:
        """Count from now on and tell `note`; bytes will try to come `by` this way from `node_id` to `target`.

        `also` is told of them, too.
        """
        self.by = by
        self.node_id = node_id
        self._note = note
        self._also = also
        self._target = target
        self._began_at = time.perf_counter()
        self._ended_at: float | None = None
        self._room: list[memoryview] = []
        self.nbytes = 0
        self._stall_seconds_max = stall_seconds_max
        self._loop = asyncio.get_running_loop()
        self.stall = asyncio.timeout(stall_seconds_max)
        """Ends what happens in it when no bytes come."""

    @property
    def remaining_bytes(self) -> int:
        """Return how many bytes are missing."""
        return self._target.remaining_bytes

    @property
    def seconds(self) -> float:
        """Return how long bytes have been on their way, or were."""
        return (time.perf_counter() if self._ended_at is None else self._ended_at) - self._began_at

    def end(self) -> None:
        """Expect nothing more."""
        self._ended_at = time.perf_counter()

    def write(self, chunk: memoryview) -> None:
        """Copy the next bytes to their places; errors as for `Upload.write`."""
        self._target.write(chunk)
        self._also(chunk)
        self._came(chunk.nbytes)

    def room(self) -> list[memoryview]:
        """Return the places of the next bytes; errors as for `Upload.room`."""
        self._room = list(self._target.room())
        return self._room

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes were written to where `room` said."""
        self._target.advance(nbytes)
        self._came(nbytes)
        arrived, self._room = split(self._room, nbytes)
        for piece in arrived:
            self._also(piece)

    def _came(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._note(nbytes)
        if not self.stall.expired():
            self.stall.reschedule(self._loop.time() + self._stall_seconds_max)


class ArrivingFrames(Arrival):
    """The same for frames, which take a while; a `Sink` with a `Pace`."""

    def __init__(self, reader: FrameReader, **terms: Unpack[ArrivalTerms]) -> None:
        """Count from now on; the terms are those of every arrival."""
        super().__init__(reader, lambda _: None, **terms)
        self._reader = reader

    @property
    def is_ready(self) -> bool:
        """Tell whether more bytes are taken at the moment."""
        return self._reader.is_ready

    async def ready(self) -> None:
        """Wait until they are, which is no stall of the owner's."""
        await self._reader.ready()
        self._came(0)
