"""What nodes tell each other besides payloads: who they are, which keys they own, and orders that hold for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.orders import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What a node says of itself."""

    node_id: str
    """Its name."""
    epoch: int
    """Its boot epoch."""
    draining: bool
    """Whether it is shutting down."""
    orders_digest: bytes
    """Digest of the orders that it knows of; empty if it takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A payload that a node says it owns."""

    reference: PayloadReference
    """Key and generation there."""
    committed_at: float
    """When it was committed, in seconds of the owner's Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderNews:
    """Orders that one node tells another of."""

    orders: tuple[Order, ...] = ()
    """Orders in force."""
    lifted: tuple[str, ...] = ()
    """Names of orders that were lifted."""
    digest: bytes = b""
    """Digest of all orders in force that the teller knows of."""


class Neighbour(Protocol):
    """Another node. Every call takes what time it may use, in seconds, and can be cancelled at any moment.

    All raise `OwnerUnreachableError` if there was no answer in time, another node answered, or it made no sense.
    """

    async def greet(self, *, seconds_max: float) -> Greeting:
        """Return who answers."""

    async def locate(self, tenant: str, keys: Sequence[str], *, seconds_max: float) -> Mapping[str, Owned]:
        """Return what the node owns under those of the keys under which it owns anything."""

    async def exchange(self, news: OrderNews, *, seconds_max: float) -> OrderNews:
        """Tell the node of orders, and return all that it knows of unless its digest is that of `news` then."""


class Neighbours(Protocol):
    """All other nodes."""

    def neighbour(self, node_id: str) -> Neighbour | None:
        """Return the node of this name, or None if nobody knows where it is."""

    def learn(self, targets: Mapping[str, str]) -> None:
        """Take these for the addresses of all other nodes, by their names, besides those that never change."""

    async def greet_at(self, target: str, *, seconds_max: float) -> Greeting:
        """Return who answers at an address; errors as for `Neighbour`."""
