"""Copying the tensors of some layers, and digesting them while they are hot in the processor's cache.

1. The tensors are cut into blocks, in canonical order. Each block is claimed once, and copied by whoever claimed it.
2. The caller's thread digests whatever comes next in that order and is copied. While nothing is, it claims a block.
3. If they are large together, a helper thread claims blocks, too. Nobody waits for it to begin, so that on a machine
   without an idle processor the caller does everything, as it would alone.
4. When no block is left, the caller waits for the one that the helper may still be copying.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from itertools import count

from kvbridge.client.copy_helper import copy_helper
from kvbridge.client.sources import Source

HELPED_BYTES_MIN = 4 << 20
"""Fewest bytes that are worth waking another thread."""


def copy_all(sources: Sequence[Source]) -> None:
    """Copy `sources`, in canonical order, and digest those that are to be.

    When this returns or raises, nobody copies any more.
    """
    if _worth_help(sources):
        work = Copying(sources)
        copy_helper().offer(work)
        work.run()
        return
    for source in sources:
        for block in source.blocks:
            source.copy(block)
            source.digest(block)


class Copying:
    """The copy of some tensors, at which two threads may work."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Prepare to copy `sources`."""
        self._steps = [(source, block) for source in sources for block in source.blocks]
        self._claims = count()
        self._copied = bytearray(len(self._steps))
        self._digested = 0
        self._ending = False
        self._helping = threading.Lock()
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"<Copying {sum(self._copied)} of {len(self._copied)} blocks>"

    def run(self) -> None:
        """Copy, with or without help, and digest."""
        try:
            while self._copy_next():
                self._digest()
        finally:
            self._end()
        self._digest()

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

    def _digest(self) -> None:
        """Digest as far as everything is copied."""
        while self._digested < len(self._steps) and self._copied[self._digested]:
            source, block = self._steps[self._digested]
            source.digest(block)
            self._digested += 1

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
