"""Arenas as one client maps them: each once, for as long as somebody uses it."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

import grpc

from kvbridge.client.failures import CallFailedError
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.mapping import SharedMapping, SlotMapping
from kvbridge.memory.region import CharArray

_BLOCK_BYTES = 512
"""The unit of `st_blocks`."""


class ArenaView:
    """One arena, mapped, with the descriptor that private windows are made from.

    Nothing closes it: it ends with its last user, so no thread can meet a descriptor whose number has a new owner.
    """

    def __init__(self, arena_id: str, fd: int, *, writable: bool) -> None:
        """Map the arena behind `fd` and take the descriptor over.

        Raises:
            MappingUnavailableError: the kernel refuses.
        """
        self.arena_id = arena_id
        self.fd = fd
        self._close_fd = weakref.finalize(self, _close, fd)
        self._close_fd.atexit = False
        self.mapping = SharedMapping(fd, os.fstat(fd).st_size, writable)
        self._populating = False
        self._apart: weakref.WeakSet[SlotMapping] = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"<ArenaView {self.arena_id}: {self.mapping!r}>"

    def slot(self, offset_bytes: int, length_bytes: int, owner: object) -> CharArray:
        """Return a slot's bytes, which keep `owner` alive.

        Raises:
            CallFailedError: another thread has ended the session meanwhile.
        """
        try:
            self._populate_once()
            return self.mapping.buffer(offset_bytes, length_bytes, owner)
        except MappingUnavailableError as error:
            raise CallFailedError(grpc.StatusCode.UNAVAILABLE, f"the session has ended: {error}") from error

    def apart(self, offset_bytes: int, length_bytes: int) -> SlotMapping:
        """Map a slot apart, to be given to those who may write to it for longer than they may.

        Raises:
            CallFailedError: the kernel refuses.
        """
        try:
            mapping = SlotMapping(self.fd, offset_bytes, length_bytes, self)
        except MappingUnavailableError as error:
            raise CallFailedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        self._apart.add(mapping)
        return mapping

    def part(self) -> None:
        """Let nothing that is written in this process, by whomever and for whatever reason, reach the arena any more.

        Raises:
            MappingUnavailableError: the kernel refuses.
        """
        self.mapping.part_from(self.fd)
        for mapping in list(self._apart):
            mapping.part()

    def has(self, offset_bytes: int, length_bytes: int) -> bool:
        """Tell whether the arena has this range."""
        return offset_bytes >= 0 and 0 < length_bytes <= self.mapping.size_bytes - offset_bytes

    def close(self) -> None:
        """Give no more slots; those that were given out stay."""
        self.mapping.close()

    def _populate_once(self) -> None:
        """Map the arena's pages in the background, once the node has touched them all.

        Touching them before the node does would make this process pay for the node's memory.
        """
        if not self._populating and os.fstat(self.fd).st_blocks * _BLOCK_BYTES >= self.mapping.size_bytes:
            self._populating = True
            self.mapping.populate()


def _close(fd: int) -> None:
    with suppress(OSError):
        os.close(fd)
