"""A directory that nobody keeps: nodes at known addresses, or behind one name, are asked themselves.

Each look-up asks every other node at once and takes what those know that answer in time. One that did not is left out
for a moment, so that a frozen node costs one look-up its time and not all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvbridge.core.orders import Order
from kvbridge.directory.port import MEMBERS_MAX, Beat, DirectoryUnavailableError, Entry, Hear, Location, Member
from kvbridge.link.neighbour import Neighbours, Owned
from kvbridge.link.port import OwnerUnreachableError

SILENT_SECONDS = 2.0
"""How long a node that did not answer a look-up is not asked again."""


class Roll(Protocol):
    """Who is there."""

    @property
    def kind(self) -> str:
        """Return what people call it."""

    async def call(self, me: Member) -> Mapping[str, Member]:
        """Return the other nodes by name.

        Raises:
            DirectoryUnavailableError: it cannot be told; those of the last time may still be there.
        """

    async def close(self) -> None:
        """Stop."""


class StaticRoll:
    """Nodes at addresses that never change."""

    def __init__(self, targets: Mapping[str, str]) -> None:
        """Know each node's address."""
        self._members = {name: Member(node_id=name, target=target, epoch=0) for name, target in targets.items()}

    def __repr__(self) -> str:
        """Show who is there."""
        return f"<StaticRoll {', '.join(self._members)}>"

    @property
    def kind(self) -> str:
        """Return what people call it."""
        return "static"

    async def call(self, me: Member) -> Mapping[str, Member]:
        """Return the other nodes."""
        del me
        return self._members

    async def close(self) -> None:
        """Do nothing."""


class AskingDirectory:
    """Asks the nodes themselves; a `Directory`. Orders go from node to node, so there is nobody to publish them to."""

    def __init__(self, roll: Roll, neighbours: Neighbours, *, timeout_seconds: float) -> None:
        """Ask `neighbours` who are on the `roll`, for `timeout_seconds` at most."""
        self._roll = roll
        self._neighbours = neighbours
        self._timeout_seconds = timeout_seconds
        self._members: Mapping[str, Member] = {}
        self._silent_until: dict[str, float] = {}

    def __repr__(self) -> str:
        """Show who is asked."""
        return f"<AskingDirectory of {self._roll!r}>"

    @property
    def kind(self) -> str:
        """Return what people call it."""
        return self._roll.kind

    @property
    def keeps_keys(self) -> bool:
        """Tell whether there is any use in announcing keys and orders to it."""
        return False

    async def start(self, hear: Hear) -> None:
        """Do nothing: nodes tell each other of orders."""
        del hear

    async def beat(self, me: Member) -> Beat:
        """Find out who is there; errors as for `Directory`."""
        self._members = await self._roll.call(me)
        return Beat(members=self._members, is_forgetful=False)

    async def announce(self, me: Member, entries: Sequence[Entry]) -> None:
        """Do nothing: whoever wants to know asks."""
        del me, entries

    async def locate(self, tenant: str, keys: Sequence[str]) -> Mapping[str, Sequence[Location]]:
        """Ask every node; errors as for `Directory`, if none of them answers."""
        now = time.monotonic()
        everybody = list(self._members)[:MEMBERS_MAX]
        # If all were silent, one of them may be back: whoever has given up on the directory does not come here.
        asked = [name for name in everybody if self._silent_until.get(name, 0.0) <= now] or everybody
        answers = await asyncio.gather(*(self._ask(name, tenant, keys) for name in asked))
        if self._members and not any(answer is not None for answer in answers):
            raise DirectoryUnavailableError("no other node answers")
        found: dict[str, list[Location]] = {}
        for name, answer in zip(asked, answers, strict=True):
            for key, owned in (answer or {}).items():
                found.setdefault(key, []).append(_location(name, owned))
        return found

    async def publish(self, orders: Sequence[Order], lifted: Sequence[str]) -> None:
        """Do nothing: nodes tell each other of orders."""
        del orders, lifted

    async def close(self) -> None:
        """Stop finding out who is there."""
        await self._roll.close()

    async def _ask(self, name: str, tenant: str, keys: Sequence[str]) -> Mapping[str, Owned] | None:
        neighbour = self._neighbours.neighbour(name)
        if neighbour is None:
            return None
        try:
            return await neighbour.locate(tenant, keys, seconds_max=self._timeout_seconds)
        except OwnerUnreachableError:
            self._silent_until[name] = time.monotonic() + SILENT_SECONDS
            return None


def _location(name: str, owned: Owned) -> Location:
    return Location(node_id=name, epoch=0, generation=owned.reference.generation, committed_at=owned.committed_at)
