"""What a node needs of a directory, whatever keeps it.

Whatever a directory says is a hint. A located owner is asked as for any handoff reference, and its answer counts; an
order that a directory tells of is taken, because the worst that it can do is text; and no directory can lift one. So a
directory that is lost, flushed, frozen or lying costs text fallbacks and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbridge.core.errors import BridgeError
from kvbridge.core.orders import Order

MEMBERS_MAX = 1024
"""Most nodes that are looked at."""
OWNERS_MAX = 64
"""Most owners of one key that are looked at."""
ORDERS_MAX = 16_384
"""Most orders that are read at once."""


class DirectoryUnavailableError(BridgeError):
    """The directory did not answer in time, or not so that it makes sense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node."""

    node_id: str
    """Its name."""
    target: str
    """Where other nodes call it, `HOST:PORT`; empty if nowhere."""
    epoch: int
    """Its boot epoch; 0 if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What this node says of one of its keys."""

    tenant: str
    """Whose key it is."""
    key: str
    """The key as its producer chose it."""
    generation: int
    """The newest generation of which there is anything, be it the text alone; 0 if there is none any more."""
    committed_at: float = 0.0
    """When that was committed, in seconds of Unix time; 0 if the text alone is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a key may be had."""

    node_id: str
    """The node that owns it."""
    epoch: int
    """The boot epoch in which the node said so; 0 if it is not known."""
    generation: int
    """The generation, at least 1."""
    committed_at: float
    """When it was committed, in seconds of the owner's Unix time; 0 if the text alone is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a directory says to a node that says it is alive."""

    members: Mapping[str, Member]
    """Every node, this one perhaps included, by name."""
    is_forgetful: bool
    """Whether the directory knew nothing of this node, so that everything has to be told again."""


Hear = Callable[[Order], None]
"""Is called in the event loop for every order that the directory tells of, as often as it does."""


class Directory(Protocol):
    """Members, owners of keys, and orders. Nothing takes longer than the directory's timeout for each round trip."""

    @property
    def kind(self) -> str:
        """Return what people call it."""

    @property
    def keeps_keys(self) -> bool:
        """Tell whether there is any use in announcing keys and orders to it."""

    async def start(self, hear: Hear) -> None:
        """Begin to listen; whether anybody answers is found out by `beat`."""

    async def beat(self, me: Member) -> Beat:
        """Say that this node is alive.

        Raises:
            DirectoryUnavailableError: there was no answer.
        """

    async def announce(self, me: Member, entries: Sequence[Entry]) -> None:
        """Tell what this node owns, or no longer owns; errors as for `beat`."""

    async def locate(self, tenant: str, keys: Sequence[str]) -> Mapping[str, Sequence[Location]]:
        """Return where each key may be had, those left out that nobody owns; errors as for `beat`."""

    async def publish(self, orders: Sequence[Order], lifted: Sequence[str]) -> None:
        """Tell all nodes of orders in force, and forget those that were lifted; errors as for `beat`."""

    async def close(self) -> None:
        """Say that this node is leaving, if that can be said, and stop."""
