"""One node's contact with another: a heartbeat that compares the orders of both, and joins them where they differ."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from kvbridge.directory import Member
from kvbridge.link.neighbour import Neighbour, Neighbours
from kvbridge.link.port import OwnerUnreachableError
from kvbridge.node.orders import OrderKeeper

_SECONDS_MAX = 1.0
"""How long another node may take to answer."""
_EXCHANGES_MAX = 2
"""Most exchanges of one beat: what is learned by one may be news for the other."""

_log = logging.getLogger(__name__)

Hear = Callable[[str, int], None]
"""Is told a node's name and the boot epoch in its answer."""


class Contact:
    """Keeps in touch with one other node."""

    def __init__(self, member: Member, *, neighbours: Neighbours, orders: OrderKeeper, hear: Hear) -> None:
        """Call `member` by `neighbours`, and join its orders with `orders`."""
        self.member = member
        self.epoch = 0
        """Its boot epoch; 0 if it never answered."""
        self.is_reachable = False
        """Whether it answered last."""
        self.was_called = False
        """Whether a call has ended, be it without an answer."""
        self._digest: bytes | None = None
        self._neighbours = neighbours
        self._orders = orders
        self._hear = hear
        self._woken = asyncio.Event()
        self._has_news = False
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Show whether it answers, and agrees."""
        return f"<Contact with {self.member.node_id}: reachable {self.is_reachable}, agrees {self.agrees}>"

    @property
    def agrees(self) -> bool:
        """Tell whether the other node knows of the same orders, as far as it was heard of."""
        return self._digest == self._orders.digest

    def start(self, interval_seconds: Callable[[], float]) -> None:
        """Begin to call."""
        self._task = asyncio.get_running_loop().create_task(
            self._live(interval_seconds), name=f"kvbridge-contact-{self.member.node_id}"
        )
        self._task.add_done_callback(_report_failure)

    def wake(self, *, with_news: bool) -> None:
        """Call at once; `with_news` says that the other node cannot know yet what there is to be told."""
        self._has_news = self._has_news or with_news
        self._woken.set()

    async def close(self) -> None:
        """Call no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _live(self, interval_seconds: Callable[[], float]) -> None:
        while True:
            self._woken.clear()
            await self.beat()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_seconds()):
                    await self._woken.wait()

    async def beat(self) -> None:
        """Call the other node, until both know the same or a beat has taken long enough.

        What it knew at the last beat says little: with news about, somebody else has probably told it. So it is asked
        for a digest first, and all orders are sent only if that still differs, unless the news was made here.
        """
        has_news, self._has_news = self._has_news, False
        try:
            if not has_news or not self.epoch:
                await self._greet()
            for _ in range(_EXCHANGES_MAX):
                if self.agrees:
                    return
                await self._exchange()
        except OwnerUnreachableError:
            self.is_reachable = False
            self._digest = None  # Whatever it knew, it may have been restarted.
        finally:
            self.was_called = True

    async def _greet(self) -> None:
        greeting = await self._neighbour().greet(seconds_max=_SECONDS_MAX)
        self.epoch = greeting.epoch
        self._digest = greeting.orders_digest
        self._hear(self.member.node_id, greeting.epoch)
        self.is_reachable = True

    async def _exchange(self) -> None:
        news = await self._neighbour().exchange(self._orders.news(), seconds_max=_SECONDS_MAX)
        self._digest = news.digest
        self.is_reachable = True
        self._orders.take(news)

    def _neighbour(self) -> Neighbour:
        neighbour = self._neighbours.neighbour(self.member.node_id)
        if neighbour is None:
            raise OwnerUnreachableError(f"nobody knows where node {self.member.node_id!r} is")
        return neighbour


def _report_failure(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.critical("another node is not called any more", exc_info=error)
