"""Crowds: worlds in which several nodes want the payloads of one, so that they bring them over from one another.

1. The *library* publishes, and its wires are slow; clients of all other nodes ask for what it has published lately.
2. In most crowds one of the others is a *liar*: owners have heard that every node has replicas of everything. Whoever
   asks the liar is sent other bytes, or is leased a replica whatever start of the owner that came from.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvbridge.core.cost.curve import RATES_MIN

if TYPE_CHECKING:
    from kvbridge.node.bridge import Bridge

CROWDED_SHARE = 0.1
"""In how many worlds there is a crowd."""
HOSTS = ("node-0", "node-1", "node-2")
LIBRARY = HOSTS[0]
_SLOWNESS = 2.5
"""How much longer everything takes on the wires of the library."""
_MEASURED = (8000, 1.5)
"""Bytes that came from the library before, and seconds."""
LONGER = 1.6
"""How much longer a crowd is looked at than other worlds."""
ROOM: Mapping[str, Any] = MappingProxyType(
    {
        "arena_bytes": 1 << 20,
        "linger_seconds": 20.0,
        "ttl_seconds": 30.0,
        "payloads_max": 1000,
        "references_per_client_max": 1000,
        "tombstones_max": 1000,
        "peer_open_seconds": 5.0,
    }
)
"""Settings with which payloads stay long enough to be wanted by several."""
DEADLINES_SECONDS = (None, 1.0, 3.0, 10.0)
"""How long those who want them wait."""


class Lie(StrEnum):
    """What a liar does when it is asked for a replica."""

    RUMOUR = "rumour"
    """It has only spread that everybody has what they have not."""
    BYTES = "bytes"
    """It sends other bytes."""
    START = "start"
    """It leases whatever it has, or once had, under this name."""


class Crowd:
    """Who wants what of whom."""

    def __init__(self, seed: str) -> None:
        """Draw who lies, and how."""
        self._chance = random.Random(f"{seed} crowd")
        self.liar = self._chance.choice(("", *HOSTS[1:], *HOSTS[1:]))
        """The node that lies; empty if none does."""
        self.restarts_after_seconds = self._chance.choice((None, self._chance.uniform(4.0, 12.0)))
        """When the library crashes for certain, so that other starts of it publish under the same names."""
        [self._lie] = self._chance.choices(list(Lie), (1, 2, 2))

    def slowness(self, one: str, other: str) -> float:
        """Return how much longer a message takes between two nodes."""
        return _SLOWNESS if LIBRARY in (one, other) else 1.0

    def publishes(self, host: str) -> bool:
        """Tell whether a node's clients mostly publish; others mostly acquire."""
        return host == LIBRARY

    def is_wanted(self, host: str) -> bool:
        """Tell whether a payload is published well, so that it can be brought over."""
        return host == LIBRARY and self._chance.random() < 0.7

    def wants(self, host: str) -> str:
        """Return of which node the clients of a node want something, or nothing if of any."""
        return "" if host == LIBRARY or self._chance.random() < 0.1 else LIBRARY

    def prepare(self, host: str, bridge: Bridge) -> None:
        """Let a node know that the library is slow, and a liar that does so lease replicas of any start."""
        if host != LIBRARY:
            for _ in range(RATES_MIN):
                bridge.costs.record_pull(LIBRARY, *_MEASURED)
        if host == self.liar and self._lie is Lie.START:
            bridge.replicas.is_from = lambda *_: True  # type: ignore[method-assign]

    def tells_of(self, caller: str, owner: str) -> tuple[str, ...]:
        """Return of whom an owner has heard that they have what a node asks it for, whether they have or not."""
        return tuple(host for host in HOSTS if self.liar and host not in (caller, owner))

    def sends(self, host: str, chunk: bytes) -> bytes:
        """Return what a node sends of a replica."""
        if host != self.liar or self._lie is not Lie.BYTES or self._chance.random() < 0.5:
            return chunk
        return chunk[:-1] + bytes([chunk[-1] ^ 1])
