"""Orders at work: what is given on this node is told to all others, and what others give is done here.

1. What people do on this node takes effect first and becomes an order second.
2. An order of another node is carried out as if it had been given here, once, however often it is told.
3. An order that cannot be carried out, because there are too many, must not be passed over in silence: every handoff is
   text until it can be.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import LimitExceededError
from kvbridge.core.handoff_reference import everywhere
from kvbridge.core.ledger import PayloadEnded
from kvbridge.core.orders import (
    KillSwitchOrder,
    Order,
    OrderBook,
    OrderContent,
    OrderLimits,
    QuarantineOrder,
    RevocationOrder,
)
from kvbridge.core.quarantine import Quarantine
from kvbridge.link.neighbour import OrderNews
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.quarantines import QuarantineKeeper

_ID_BYTES = 8
_WITHOUT_WHY = "it was set without a reason"

_log = logging.getLogger(__name__)


class OrderKeeper:
    """The orders that this node knows of; a `QuarantineListener`."""

    def __init__(
        self,
        *,
        node_id: str,
        epoch: int,
        quarantines: QuarantineKeeper,
        catalog: CatalogKeeper,
        limits: OrderLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Carry orders out by `quarantines` and `catalog`; `clock` gives Unix time."""
        self._node_id = node_id
        self._epoch = epoch
        self._quarantines = quarantines
        self._catalog = catalog
        self._clock = clock
        self._book = OrderBook(limits or OrderLimits())
        self._revoked: dict[tuple[str, str, int], Order] = {}
        self.on_ended: Callable[[str, PayloadEnded], None] = lambda _, __: None
        self._listeners: list[Callable[[Order | None, tuple[str, ...]], None]] = []
        self.is_learning = False
        """Whether what listeners are being told was learned from others, who tell of it, too."""
        quarantines.listener = self
        catalog.on_kill_switch = self.switched

    def __repr__(self) -> str:
        """Show what is known."""
        return f"<OrderKeeper of {self._node_id}: {self._book!r}>"

    def __len__(self) -> int:
        """Return how many orders are in force."""
        return len(self._book)

    @property
    def digest(self) -> bytes:
        """Return what two nodes with the same orders have in common."""
        return self._book.digest

    def begin(self) -> None:
        """Take what was in force from the start, as this node's files have it, for orders."""
        for tenant, quarantine in self._quarantines.everything():
            self.imposed(tenant, quarantine)
        restored = self._catalog.restored_kill_switch()
        if restored is not None:
            order_id, why = restored
            self._give(KillSwitchOrder(why=why), order_id=order_id)
            self._follow_kill_switch()

    def news(self) -> OrderNews:
        """Return everything that this node knows."""
        return OrderNews(orders=self._book.in_force(), lifted=self._book.lifted(), digest=self.digest)

    def in_force(self) -> tuple[Order, ...]:
        """Return the orders in force."""
        return self._book.in_force()

    def add_listener(self, listener: Callable[[Order | None, tuple[str, ...]], None]) -> None:
        """Call `listener` for every order that is news, and for the names of those that end."""
        self._listeners.append(listener)

    # What others say

    def take(self, news: OrderNews) -> None:
        """Join what another node knows to what this one does."""
        with self._learning():
            self._lift(news.lifted)
        for order in news.orders:
            self.hear(order)

    def hear(self, order: Order) -> None:
        """Take an order, whoever tells of it."""
        with self._learning():
            self._hear(order)

    def _hear(self, order: Order) -> None:
        if order.order_id in self._book:
            return
        if self._book.was_lifted(order.order_id):
            self._tell(None, (order.order_id,))  # Whoever keeps it does not know yet.
            return
        try:
            is_news = self._book.add(order, now=self._clock())
        except LimitExceededError as error:
            self._fail_closed(error)
            return
        if is_news:
            _log.warning("order taken", extra={"order": order.order_id, "origin": order.origin})
            self._carry_out(order)
            self._tell(order, ())

    def is_revoked(self, tenant: str, key: str, epoch: int) -> Order | None:
        """Return the order that revokes a replica from this start of its owner, or None."""
        return self._revoked.get((tenant, key, epoch))

    def end_if_revoked(self, tenant: str, key: str, epoch: int) -> None:
        """End a replica that was brought over while its owner revoked it."""
        order = self._revoked.get((tenant, key, epoch))
        if order is not None:
            self._carry_out(order)

    def advance(self) -> None:
        """Forget revocations that have run out."""
        before = {order.order_id for order in self._revoked.values()}
        self._book.advance(now=self._clock())
        ended = tuple(order_id for order_id in before if order_id not in self._book)
        if ended:
            self._revoked = {where: order for where, order in self._revoked.items() if order.order_id not in ended}
            self._tell(None, ended)

    # What happens on this node

    def imposed(self, tenant: str, quarantine: Quarantine) -> None:
        """Tell all of a quarantine."""
        target = quarantine.target
        if isinstance(target, PayloadReference):
            target = everywhere(self._node_id, target)
        content = QuarantineOrder(tenant=tenant, quarantine=replace(quarantine, target=target))
        self._give(content, order_id=quarantine.quarantine_id, issued_at=quarantine.since)

    def replaced(self, tenant: str, quarantine: Quarantine, before: Sequence[str]) -> None:
        """Tell all of a quarantine and then of the end of those before it, so that no node is ever without one.

        If there is no room for it those before it stay: what others were not told of must not be all that holds.
        """
        self.imposed(tenant, quarantine)
        if quarantine.quarantine_id in self._book:
            self._lift(before)

    def lifted(self, quarantine_id: str) -> None:
        """Tell all of the end of a quarantine."""
        self._lift([quarantine_id])

    def ended(self, tenant: str, ended: PayloadEnded) -> None:
        """Pass on that a payload can no longer be had."""
        self.on_ended(tenant, ended)

    def found_bad(self, tenant: str, ended: PayloadEnded) -> None:
        """Tell all of a payload that was found bad after others were lent it."""
        content = RevocationOrder(
            tenant=tenant,
            reference=everywhere(self._node_id, ended.reference),
            epoch=self._epoch,
            reason=ended.reason,
            detail=ended.detail,
        )
        self._give(content)

    def switched(self, why: str | None) -> str:
        """Tell all why the kill switch is on, or that it is off, and return the name of the order, if there is one.

        Turning it off lifts what this node knows of; an order that it does not know of stays in force.
        """
        engaged = [order.order_id for order in self._book.in_force() if isinstance(order.content, KillSwitchOrder)]
        order_id = "" if why is None else self._give(KillSwitchOrder(why=why))
        self._lift(engaged)
        return order_id

    # Inside

    @contextmanager
    def _learning(self) -> Iterator[None]:
        self.is_learning = True
        try:
            yield
        finally:
            self.is_learning = False

    def _give(self, content: OrderContent, *, order_id: str = "", issued_at: float | None = None) -> str:
        now = self._clock()
        order = Order(
            order_id=order_id or secrets.token_hex(_ID_BYTES),
            origin=self._node_id,
            issued_at=now if issued_at is None else issued_at,
            content=content,
        )
        try:
            is_news = self._book.add(order, now=now)
        except LimitExceededError as error:
            self._fail_closed(error)
            return order.order_id
        if is_news:
            self._tell(order, ())
        return order.order_id

    def _carry_out(self, order: Order) -> None:
        content = order.content
        if isinstance(content, KillSwitchOrder):
            self._follow_kill_switch()
        elif isinstance(content, RevocationOrder):
            self._revoked[content.tenant, content.reference.key, content.epoch] = order
            self._quarantines.revoke_told(content.tenant, content.reference.key, content.reason, content.detail)
        else:
            self._impose(content)

    def _impose(self, content: QuarantineOrder) -> None:
        try:
            self._quarantines.impose_told(content.tenant, content.quarantine)
        except LimitExceededError as error:
            self._fail_closed(error)

    def _lift(self, order_ids: Iterable[str]) -> None:
        """Lift orders, known or not, and end what they did here."""
        new = tuple(order_id for order_id in order_ids if not self._book.was_lifted(order_id))
        if not new:
            return
        for order in self._book.lift(new):
            if isinstance(order.content, QuarantineOrder):
                self._quarantines.lift_told(order.content.tenant, order.order_id)
            elif isinstance(order.content, KillSwitchOrder):
                self._follow_kill_switch()
        self._try_again()
        self._tell(None, new)

    def _follow_kill_switch(self) -> None:
        newest = self._book.kill_switch()
        if newest is None:
            self._catalog.follow_kill_switch(None, order_id="")
        else:
            assert isinstance(newest.content, KillSwitchOrder), newest
            self._catalog.follow_kill_switch(newest.content.why or _WITHOUT_WHY, order_id=newest.order_id)

    def _tell(self, order: Order | None, ended: tuple[str, ...]) -> None:
        for listener in self._listeners:
            listener(order, ended)

    def _fail_closed(self, error: LimitExceededError) -> None:
        _log.error("an order cannot be carried out; every handoff is text", extra={"problem": str(error)})
        self._catalog.fail_closed(f"more orders are in force on all nodes than this one can hold ({error})")

    def _try_again(self) -> None:
        """Carry out what there was no room for."""
        if not self._catalog.failed_closed:
            return
        self._catalog.fail_closed(None)
        for order in self._book.in_force():
            if isinstance(order.content, QuarantineOrder):
                self._impose(order.content)
