"""Ordinary clients in a loop, which judge every byte that they are given and note how long they had to wait."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvbridge import Bridge, Publication
from tests.faults import contents

TIMEOUT_SECONDS = 5.0
"""What every call of theirs may take."""
_HELD_MAX = 3
_PUBLISHED_SHARE = 0.3
_PAUSE_SECONDS = 0.002
_SEEDS_EACH = 1_000_000

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Done:
    """What one client has done."""

    published: int = 0
    """Payloads that it published."""
    unpublished: int = 0
    """Payloads that the bridge did not take."""
    accepted: int = 0
    """Handoffs of which it accepted the cache, every byte of it right."""
    text: int = 0
    """Handoffs that were answered with the text."""
    bytes_verified: int = 0
    """Bytes that it accepted and compared."""
    seconds_max: float = 0.0
    """Its longest call."""
    last_published: bool = False
    """Whether the bridge took what it published at the very end."""


class Load:
    """One client that never rests."""

    def __init__(self, bridge: Bridge, *, seed: int, keys: list[str]) -> None:
        """Work on `keys`, which others work on, too."""
        self.done = Done()
        self._bridge, self._keys, self._first_seed = bridge, keys, seed * _SEEDS_EACH
        self._draw = random.Random(seed)
        self._held: deque[Publication] = deque()

    def until(self, enough: threading.Event) -> None:
        """Work until it is enough."""
        while not enough.wait(_PAUSE_SECONDS):
            if self._draw.random() < _PUBLISHED_SHARE:
                self.publish()
            else:
                self._ask()

    def publish(self) -> bool:
        """Publish something, hold it for a while, and tell whether the bridge took it."""
        seed = self._first_seed + self.done.published + self.done.unpublished
        key = self._draw.choice(self._keys)
        slot = self._timed(lambda: contents.publish(self._bridge, key, seed, timeout=TIMEOUT_SECONDS))
        self.done.published += slot.published
        self.done.unpublished += not slot.published
        self._held.append(slot)
        if len(self._held) > _HELD_MAX:
            self._held.popleft().release()
        return slot.published

    def let_go(self) -> None:
        """Give back what is held."""
        for slot in self._held:
            slot.release()

    def _ask(self) -> None:
        key = self._draw.choice(self._keys)
        found = self._timed(lambda: contents.ask_and_read(self._bridge, key, timeout=TIMEOUT_SECONDS))
        self.done.accepted += found.accepted
        self.done.text += not found.accepted
        self.done.bytes_verified += found.accepted * contents.PAYLOAD_BYTES

    def _timed(self, call: Callable[[], T]) -> T:
        began_at = time.monotonic()
        result = call()
        self.done.seconds_max = max(self.done.seconds_max, time.monotonic() - began_at)
        return result
