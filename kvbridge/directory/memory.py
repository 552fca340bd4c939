"""A directory in memory: for one node on its own, for simulations, and as the measure of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbridge.core.orders import Order
from kvbridge.directory.port import Beat, DirectoryUnavailableError, Entry, Hear, Location, Member


@dataclass(slots=True, kw_only=True)
class HubBehaviour:
    """What goes wrong; may be changed at any moment."""

    is_gone: bool = False
    """Refuses everything at once."""
    is_frozen: bool = False
    """Takes calls and never answers."""


class MemoryHub:
    """What all nodes of one process share."""

    def __init__(self, *, ttl_seconds: float, clock: Callable[[], float]) -> None:
        """Forget nodes that said nothing for `ttl_seconds` of `clock`."""
        self.behaviour = HubBehaviour()
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self.members: dict[str, tuple[Member, float]] = {}
        self.locations: dict[tuple[str, str], dict[str, Location]] = {}
        self.orders: dict[str, Order] = {}
        self._listeners: list[Hear] = []

    def __repr__(self) -> str:
        """Show how much is known."""
        return f"<MemoryHub: {len(self.members)} nodes, {len(self.locations)} keys, {len(self.orders)} orders>"

    def flush(self) -> None:
        """Forget everything."""
        self.members.clear()
        self.locations.clear()
        self.orders.clear()

    def listen(self, hear: Hear) -> None:
        """Tell of all orders from now on, those of before first."""
        self._listeners.append(hear)
        for order in self.orders.values():
            hear(order)

    def leave(self, hear: Hear) -> None:
        """Tell no more."""
        if hear in self._listeners:
            self._listeners.remove(hear)

    def alive(self) -> dict[str, Member]:
        """Return the nodes that said something lately."""
        oldest = self._clock() - self._ttl_seconds
        self.members = {name: (member, at) for name, (member, at) in self.members.items() if at >= oldest}
        return {name: member for name, (member, _) in self.members.items()}

    def see(self, member: Member) -> bool:
        """Note that a node is alive, and tell whether it was known."""
        known = self.alive().get(member.node_id)
        self.members[member.node_id] = member, self._clock()
        return known == member

    def tell(self, order: Order) -> None:
        """Keep an order and tell all of it."""
        self.orders[order.order_id] = order
        for hear in list(self._listeners):
            hear(order)


class MemoryDirectory:
    """One node's view of a hub; a `Directory`."""

    def __init__(self, hub: MemoryHub, *, timeout_seconds: float = 0.25) -> None:
        """Wait for a frozen hub for `timeout_seconds`."""
        self._hub = hub
        self._timeout_seconds = timeout_seconds
        self._hear: Hear | None = None
        self._me: Member | None = None

    def __repr__(self) -> str:
        """Show what is shared."""
        return f"<MemoryDirectory on {self._hub!r}>"

    @property
    def kind(self) -> str:
        """Return what people call it."""
        return "memory"

    @property
    def keeps_keys(self) -> bool:
        """Tell whether there is any use in announcing keys and orders to it."""
        return True

    async def start(self, hear: Hear) -> None:
        """Begin to listen."""
        self._hear = hear
        self._hub.listen(hear)

    async def beat(self, me: Member) -> Beat:
        """Say that this node is alive; errors as for `Directory`."""
        await self._answer()
        self._me = me
        was_known = self._hub.see(me)
        return Beat(members=self._hub.alive(), is_forgetful=not was_known)

    async def announce(self, me: Member, entries: Sequence[Entry]) -> None:
        """Tell what this node owns; errors as for `Directory`."""
        await self._answer()
        for entry in entries:
            owners = self._hub.locations.setdefault((entry.tenant, entry.key), {})
            owners.pop(me.node_id, None)
            if entry.generation:
                owners[me.node_id] = Location(
                    node_id=me.node_id,
                    epoch=me.epoch,
                    generation=entry.generation,
                    committed_at=entry.committed_at,
                )

    async def locate(self, tenant: str, keys: Sequence[str]) -> Mapping[str, Sequence[Location]]:
        """Return where each key may be had; errors as for `Directory`."""
        await self._answer()
        found = {key: tuple(self._hub.locations.get((tenant, key), {}).values()) for key in keys}
        return {key: locations for key, locations in found.items() if locations}

    async def publish(self, orders: Sequence[Order], lifted: Sequence[str]) -> None:
        """Tell all nodes of orders; errors as for `Directory`."""
        await self._answer()
        for order in orders:
            self._hub.tell(order)
        for order_id in lifted:
            self._hub.orders.pop(order_id, None)

    async def close(self) -> None:
        """Leave."""
        if self._hear is not None:
            self._hub.leave(self._hear)
        if self._me is not None:
            self._hub.members.pop(self._me.node_id, None)

    async def _answer(self) -> None:
        if self._hub.behaviour.is_frozen:
            await asyncio.sleep(self._timeout_seconds)
            raise DirectoryUnavailableError("the hub did not answer in time")
        if self._hub.behaviour.is_gone:
            raise DirectoryUnavailableError("the hub is gone")
