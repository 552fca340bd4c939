"""Copying the tensors of one layer, and digesting them while they are hot in the processor's cache.

1. The tensors are cut into blocks, in canonical order. Each block is claimed once, and copied by whoever claimed it.
2. The caller's thread digests whatever comes next in that order and is copied. While nothing is, it claims a block.
3. If the layer is large, a helper thread claims blocks, too. Nobody waits for it to begin, so that on a machine without
   an idle processor the caller does everything, as it would alone.
4. When no block is left, the caller waits for the one that the helper may still be copying.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count

from kvbridge.client.copy_helper import copy_helper
from kvbridge.client.digests import LayerDigest
from kvbridge.client.sources import Source

HELPED_BYTES_MIN = 4 << 20
"""Fewest bytes of a layer that are worth waking another thread."""


def copy_layer(sources: Sequence[Source], digest: LayerDigest | None) -> None:
    """Copy `sources`, in canonical order, and digest them if there is a `digest`.

    When this returns or raises, nobody copies any more.
    """
    if _worth_help(sources):
        work = LayerCopy(sources)
        copy_helper().offer(work)
        work.run(digest)
        return
    for source in sources:
        for block in source.blocks:
            source.copy(block)
            if digest is not None:
                digest.add(block.places, offset_bytes=source.offset_bytes)


class LayerCopy:
    """The copy of one layer, at which two threads may work."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Prepare to copy `sources`."""
        self._steps = [(source, block) for source in sources for block in source.blocks]
        self._claims = count()
        self._copied = bytearray(len(self._steps))
        self._ending = False
        self._helping = threading.Lock()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<LayerCopy {sum(self._copied)} of {len(self._copied)} blocks>"

    def run(self, digest: LayerDigest | None) -> None:
        """Copy, with or without help, and digest."""
        digested = 0
        try:
            while self._copy_next():
                digested = self._digest(digest, digested)
        finally:
            self._end()
        self._digest(digest, digested)

    def help(self) -> None:
        """Copy what nobody else has claimed, until nothing is left."""
        with self._helping:
            try:
                while self._copy_next():
                    pass
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                self._error = error
                self._ending = True

    def _copy_next(self) -> bool:
        """Claim and copy one block, and tell whether there was one."""
        claimed = next(self._claims)
        if self._ending or claimed >= len(self._steps):
            return False
        source, block = self._steps[claimed]
        source.copy(block)
        self._copied[claimed] = True
        return True

    def _digest(self, digest: LayerDigest | None, first: int) -> int:
        """Digest from block `first` on as far as everything is copied, and return how far that was."""
        while digest is not None and first < len(self._steps) and self._copied[first]:
            source, block = self._steps[first]
            digest.add(block.places, offset_bytes=source.offset_bytes)
            first += 1
        return first

    def _end(self) -> None:
        """Let nobody begin a block, and wait for the helper's last one, whatever interrupts the wait.

        Raises:
            BaseException: what broke off the helper's copy, or what interrupted the wait, once that is over.
        """
        self._ending = True
        waiting = True
        while waiting:
            try:
                with self._helping:
                    waiting = False
            except BaseException as error:  # noqa: BLE001 - raised below
                self._error = error
        if self._error is not None:
            raise self._error


def _worth_help(sources: Sequence[Source]) -> bool:
    if not all(source.shared for source in sources):
        return False
    length_bytes = sum(source.length_bytes for source in sources)
    return length_bytes >= HELPED_BYTES_MIN and len(os.sched_getaffinity(0)) > 1
