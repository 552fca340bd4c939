"""Orders: what holds on every node, until it is lifted. Quarantines, the kill switch, and payloads that were found bad.

1. An order has a name of its own and never changes. It is given once, on any node, and lifted on any node. A node
   knows a set of orders in force and a set of names that were lifted; it joins those of others to its own, in any
   order and as often as it likes, and **lifted wins**. So nodes that were told of the same things know the same,
   whatever was lost, repeated or overtaken on the way, and no clock decides anything.
2. The kill switch is on while any order for it is in force. Turning it off lifts those that the node knows of. If one
   side of a broken network turns it on and the other off, it is **on** when they meet again: nobody who turned it off
   knew of that order.
3. Names of lifted orders are forgotten in the end. An order comes back if a node that was away for longer still has it:
   its payloads are text until somebody lifts it again.
4. A revocation matters to replicas that exist when it is given. It runs out.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from kvbridge.core.bounds import require_unix_time
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import LimitExceededError
from kvbridge.core.quarantine import Quarantine
from kvbridge.core.reasons import Reason

ORDER_ID_CHARACTERS_MAX = 64
"""Longest name of an order."""
DIGEST_BYTES = 16
"""Length of the digest of all orders in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineOrder:
    """A quarantine of one tenant's payloads."""

    tenant: str
    """The tenant."""
    quarantine: Quarantine
    """The quarantine, under the order's name; a payload goes by its handoff reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillSwitchOrder:
    """Every handoff is text."""

    why: str
    """Why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevocationOrder:
    """A payload was found bad after other nodes were lent it."""

    tenant: str
    """The tenant."""
    reference: PayloadReference
    """The handoff reference as a key; generation 1."""
    epoch: int
    """The owner's boot epoch: what came from another start is another payload."""
    reason: Reason
    """What was found."""
    detail: str
    """The same for people."""


OrderContent: TypeAlias = QuarantineOrder | KillSwitchOrder | RevocationOrder
"""What an order says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What holds on every node."""

    order_id: str
    """Its name, unique for ever."""
    origin: str
    """The node on which it was given."""
    issued_at: float
    """When, in seconds of that node's Unix time; decides nothing but when a revocation runs out."""
    content: OrderContent
    """What it says."""

    def __post_init__(self) -> None:
        """Refuse a time that could not be told to others.

        Raises:
            InvalidFieldError: naming `issued_at`.
        """
        require_unix_time("issued_at", self.issued_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderLimits:
    """How much is remembered."""

    orders_max: int = 4096
    """Most quarantines and orders for the kill switch in force."""
    revocations_max: int = 4096
    """Most revocations; of more the oldest are forgotten."""
    revocation_seconds: float = 3600.0
    """How long a revocation holds."""
    lifted_max: int = 4096
    """Most names of lifted orders."""


class OrderBook:
    """The orders that one node knows of."""

    def __init__(self, limits: OrderLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._in_force: dict[str, Order] = {}
        self._revocations: OrderedDict[str, Order] = OrderedDict()
        self._lifted: OrderedDict[str, None] = OrderedDict()
        self._digest = 0

    def __repr__(self) -> str:
        """Show how much is known."""
        return f"<OrderBook: {len(self)} in force, {len(self._lifted)} lifted>"

    def __len__(self) -> int:
        """Return how many orders are in force."""
        return len(self._in_force) + len(self._revocations)

    def __contains__(self, order_id: str) -> bool:
        """Tell whether an order is in force."""
        return order_id in self._in_force or order_id in self._revocations

    @property
    def digest(self) -> bytes:
        """Return what two books with the same orders in force have in common."""
        return self._digest.to_bytes(DIGEST_BYTES, "big")

    def in_force(self) -> tuple[Order, ...]:
        """Return every order in force."""
        return (*self._in_force.values(), *self._revocations.values())

    def lifted(self) -> tuple[str, ...]:
        """Return the names of lifted orders, those lifted first first."""
        return tuple(self._lifted)

    def was_lifted(self, order_id: str) -> bool:
        """Tell whether an order is remembered to have been lifted."""
        return order_id in self._lifted

    def kill_switch(self) -> Order | None:
        """Return the newest order by which every handoff is text, or None."""
        engaged = [order for order in self._in_force.values() if isinstance(order.content, KillSwitchOrder)]
        return max(engaged, key=lambda order: (order.issued_at, order.order_id), default=None)

    def add(self, order: Order, *, now: float) -> bool:
        """Put an order into force and tell whether that is news; `now` is Unix time.

        Raises:
            LimitExceededError: there are too many.
        """
        if order.order_id in self or order.order_id in self._lifted:
            return False
        if isinstance(order.content, RevocationOrder):
            if now - order.issued_at > self._limits.revocation_seconds:
                return False
            self._revocations[order.order_id] = order
            self._digest ^= _digest(order.order_id)
            if len(self._revocations) > self._limits.revocations_max:
                self._forget(next(iter(self._revocations)))
            return True
        if len(self._in_force) >= self._limits.orders_max:
            raise LimitExceededError("orders_max", self._limits.orders_max)
        self._in_force[order.order_id] = order
        self._digest ^= _digest(order.order_id)
        return True

    def lift(self, order_ids: Iterable[str]) -> tuple[Order, ...]:
        """Lift orders, those that are yet to be heard of, too, and return those that were in force."""
        ended = []
        for order_id in order_ids:
            order = self._in_force.get(order_id) or self._revocations.get(order_id)
            if order is not None:
                self._forget(order_id)
                ended.append(order)
            self._lifted[order_id] = None
            self._lifted.move_to_end(order_id)
        while len(self._lifted) > self._limits.lifted_max:
            self._lifted.popitem(last=False)
        return tuple(ended)

    def advance(self, *, now: float) -> None:
        """Forget revocations that have run out; `now` is Unix time."""
        oldest_at = now - self._limits.revocation_seconds
        for order in [order for order in self._revocations.values() if order.issued_at < oldest_at]:
            self._forget(order.order_id)

    def _forget(self, order_id: str) -> None:
        if self._in_force.pop(order_id, None) is None:
            del self._revocations[order_id]
        self._digest ^= _digest(order_id)


def _digest(order_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(order_id.encode(), digest_size=DIGEST_BYTES).digest(), "big")
