"""A node among others: it says that it is alive, what it owns and what it was ordered, and finds what others own.

Two things go on side by side, and neither waits for the other. The *directory* hears of this node with every heartbeat
and of its keys and orders as they change. Every other node has a *contact* that compares orders with each heartbeat,
and at once when there is a new one; so orders arrive although the directory is gone, and they arrive by the directory
although two nodes cannot reach each other.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvbridge.core.orders import Order
from kvbridge.directory import Directory, DirectoryUnavailableError, Location, Member
from kvbridge.directory.stopping import stop
from kvbridge.link.neighbour import Neighbours
from kvbridge.node.announcing import Announcer
from kvbridge.node.contact import Contact, Hear
from kvbridge.node.orders import OrderKeeper
from kvbridge.node.standing import Standing

CONTACTS_PER_BEAT = 16
"""With more other nodes than this, each is called less often than once a heartbeat, unless there is something new."""
PUBLISHED_MAX = 256
"""Most orders that are published in one round trip."""
FORGOTTEN_MAX = 5
"""Heartbeats in a row with which a directory that forgot this node is told everything again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourhoodLimits:
    """How often others are called, and whom."""

    heartbeat_seconds: float
    """How often the directory and every other node hear of this one."""
    may_call: Callable[[str], bool]
    """Whether a node may be called at an address that the directory has told."""


class Neighbourhood:
    """The other nodes, as far as they are known."""

    def __init__(
        self,
        directory: Directory,
        neighbours: Neighbours,
        *,
        orders: OrderKeeper,
        announcer: Announcer,
        limits: NeighbourhoodLimits,
        hear: Hear,
        clock: Callable[[], float],
    ) -> None:
        """Find other nodes by `directory`, call them by `neighbours`, and tell `hear` of their boot epochs."""
        self.directory = directory
        self.standing = Standing(clock)
        self.contacts: dict[str, Contact] = {}
        self.orders = orders
        self._neighbours = neighbours
        self._announcer = announcer
        self._limits = limits
        self._hear = hear
        self._clock = clock
        self._me: Member | None = None
        self._members: Mapping[str, Member] = {}
        self._unpublished: dict[str, Order] = {}
        self._ended: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._looking: set[asyncio.Task[Mapping[str, Sequence[Location]]]] = set()
        self._beaten_at = float("-inf")
        self._forgotten = 0
        self._has_missed = True
        orders.add_listener(self._ordered)
        announcer.on_change = self._woken.set

    def __repr__(self) -> str:
        """Show who is known."""
        return f"<Neighbourhood by {self.directory!r}: {list(self.contacts.values())}>"

    # Life

    async def start(self, me: Member) -> None:
        """Say that this node is `me`, and begin."""
        self._me = me
        await self.directory.start(self._told)
        self._task = asyncio.get_running_loop().create_task(self._live(me), name="kvbridge-directory")
        self._task.add_done_callback(_report_failure)

    async def close(self) -> None:
        """Leave."""
        await stop(self._task)
        contacts = [contact.close() for contact in self.contacts.values()]
        await asyncio.gather(*contacts, *self._closing, *self._looking, return_exceptions=True)
        await self.directory.close()

    # Looking up

    async def locate(self, tenant: str, keys: Sequence[str], *, seconds_max: float) -> Mapping[str, Location]:
        """Return where each key may best be had; those are left out of which nothing is known.

        Raises:
            TimeoutError: nobody answered in time.
        """
        if not self.standing.is_up or not keys:
            return {}
        with self.standing.timed_look_up():
            # What is given up is not cancelled: others may wait for the same round trip, and its connection stays good.
            looking = asyncio.get_running_loop().create_task(self._look_up(tenant, keys))
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
            done, _ = await asyncio.wait({looking}, timeout=seconds_max)
            if not done:
                raise TimeoutError
            found = looking.result()
        best = {key: self._best(locations) for key, locations in found.items()}
        return {key: location for key, location in best.items() if location is not None}

    # Inside

    async def _look_up(self, tenant: str, keys: Sequence[str]) -> Mapping[str, Sequence[Location]]:
        try:
            return await self.directory.locate(tenant, keys)
        except DirectoryUnavailableError as error:
            self._lose(error)
            return {}

    def _best(self, locations: Sequence[Location]) -> Location | None:
        """Return the newest of those that are by nodes as they are now; nobody else need be asked."""
        return max(filter(self._may_be, locations), key=lambda location: location.committed_at, default=None)

    def _may_be(self, location: Location) -> bool:
        member = self._members.get(location.node_id)
        if member is None or location.node_id not in self.contacts:
            return False
        return not (location.epoch and member.epoch) or location.epoch == member.epoch

    def _ordered(self, order: Order | None, ended: tuple[str, ...]) -> None:
        """Tell of news: all others at once if it was made here, and a few if it was learned, as its origin tells all.

        Were all to tell all of what they learn, each order would cost calls by the square of the nodes. Whoever is
        missed differs from those whom it calls next, and hears of it within a heartbeat.
        """
        is_learned = self.orders.is_learning
        if self.directory.keeps_keys:
            if order is not None:
                self._unpublished[order.order_id] = order
            for order_id in ended:
                self._unpublished.pop(order_id, None)
                self._ended[order_id] = None
            if not is_learned:  # What was learned waits for the next beat: the directory may tell of it itself.
                self._woken.set()
        contacts = list(self.contacts.values())
        if is_learned and len(contacts) > CONTACTS_PER_BEAT:
            contacts = random.sample(contacts, CONTACTS_PER_BEAT)
        for contact in contacts:
            contact.wake(with_news=not is_learned)

    def _told(self, order: Order) -> None:
        """Take an order from the directory, which then need not be told of it."""
        self.orders.hear(order)
        self._unpublished.pop(order.order_id, None)

    async def _live(self, me: Member) -> None:
        while True:
            self._woken.clear()
            more = await self._tell(me)
            if not more:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._until_next_beat()):
                        await self._woken.wait()
                if not self.standing.is_up:
                    await asyncio.sleep(self._until_next_beat())  # What woke this has to wait until it is back.

    def _until_next_beat(self) -> float:
        return max(self._beaten_at + self._limits.heartbeat_seconds - self._clock(), 0.0)

    async def _tell(self, me: Member) -> bool:
        """Tell the directory what there is to be told, and return whether there is more."""
        try:
            if self._until_next_beat() <= 0:
                self._beaten_at = self._clock()
                self.orders.advance()
                await self._beat(me)
            await self._publish()
            return await self._announce(me)
        except DirectoryUnavailableError as error:
            self._has_missed = True
            self._lose(error)
            return False

    async def _beat(self, me: Member) -> None:
        beat = await self.directory.beat(me)
        self._forgotten = self._forgotten + 1 if beat.is_forgetful else 0
        if self._forgotten == FORGOTTEN_MAX:
            _log.error("the directory forgets this node again and again: does another one have its name?")
        if self._has_missed or (beat.is_forgetful and self._forgotten < FORGOTTEN_MAX):
            self._has_missed = False
            self._announcer.tell_everything()
            self._unpublished = {order.order_id: order for order in self.orders.in_force()}
        self._meet({name: one for name, one in beat.members.items() if name != me.node_id and self._may_call(one)})
        if self._is_alone():
            if not any(contact.was_called for contact in self.contacts.values()):
                return  # Nobody can have answered yet: neither is it lost, nor found.
            raise DirectoryUnavailableError("no other node answers")
        if self.standing.found():
            _log.info("the directory answers", extra={"kind": self.directory.kind, "nodes": len(beat.members)})

    def _is_alone(self) -> bool:
        """Tell whether those who would have to be asked in a directory's stead are all silent."""
        asked = () if self.directory.keeps_keys else tuple(self.contacts.values())
        return bool(asked) and not any(contact.is_reachable for contact in asked)

    def _may_call(self, member: Member) -> bool:
        return bool(member.target) and self._limits.may_call(member.target)

    async def _publish(self) -> None:
        while self.directory.keeps_keys and (self._unpublished or self._ended):
            orders = [self._unpublished[name] for name in list(self._unpublished)[:PUBLISHED_MAX]]
            ended = list(self._ended)[:PUBLISHED_MAX]
            await self.directory.publish(orders, ended)
            for order in orders:
                self._unpublished.pop(order.order_id, None)
            for order_id in ended:
                self._ended.pop(order_id, None)

    async def _announce(self, me: Member) -> bool:
        if not self.directory.keeps_keys:
            return False
        entries, more = self._announcer.batch()
        if entries:
            try:
                await self.directory.announce(me, entries)
            except DirectoryUnavailableError:
                self._announcer.tell_everything()
                raise
        return more

    def _meet(self, members: Mapping[str, Member]) -> None:
        """Begin to call nodes that are new, and stop calling those that have gone."""
        self._neighbours.learn({name: member.target for name, member in members.items()})
        self._members = members
        for name in self.contacts.keys() - members.keys():
            self._close(self.contacts.pop(name))
        for name, member in members.items():
            contact = self.contacts.get(name)
            if contact is not None and contact.member.target != member.target:
                self._close(contact)
                contact = None
            if contact is None:
                contact = Contact(member, neighbours=self._neighbours, orders=self.orders, hear=self._hear)
                self.contacts[name] = contact
                contact.start(self._contact_seconds)
            contact.member = member

    def _contact_seconds(self) -> float:
        return self._limits.heartbeat_seconds * max(len(self.contacts) / CONTACTS_PER_BEAT, 1.0)

    def _close(self, contact: Contact) -> None:
        task = asyncio.get_running_loop().create_task(contact.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _lose(self, error: DirectoryUnavailableError) -> None:
        if self.standing.lost(str(error)):
            extra = {"kind": self.directory.kind, "problem": str(error)}
            _log.warning("the directory does not answer; keys are not looked up on other nodes", extra=extra)


def _report_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.critical("the directory is not told anything any more", exc_info=error)
