"""Which start of each other node was heard of last.

A handoff reference names a generation of a key, and a node that starts again counts its generations from 1. So what was
brought over from an earlier start may be something else than what its reference names now. Every answer of a node
tells its boot epoch; what came from another epoch counts as not here. Where a node was not heard of lately it is asked
before an old replica is used. One that does not answer has not started again as far as anybody can tell, and its
replicas, which are what their references named, stay good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbridge.link.port import OwnerUnreachableError, Peers
from kvbridge.node.background import Background
from kvbridge.node.waiting import patience

NODES_MAX = 16_384
"""Most nodes that are remembered, under whatever names they come and go; replicas of others are brought over again."""
_ASKING_SECONDS_MAX = 0.25
"""How long a caller waits at most for a node to say whether it is still the same."""


@dataclass(slots=True, kw_only=True)
class _Known:
    epoch: int | None = None
    asked_at: float = float("-inf")
    asking: asyncio.Task[None] | None = None


class Incarnations:
    """The boot epoch of every other node that was heard of."""

    def __init__(
        self, peers: Peers, *, clock: Callable[[], float], seconds_fresh: float, background: Background
    ) -> None:
        """Ask `peers` again when they were not heard of for `seconds_fresh`; `clock` gives monotonic seconds."""
        self._peers = peers
        self._clock = clock
        self._seconds_fresh = seconds_fresh
        self._background = background
        self._known: dict[str, _Known] = {}

    def __repr__(self) -> str:
        """Show how many nodes were heard of."""
        return f"<Incarnations of {len(self._known)} nodes>"

    def hear(self, node_id: str, epoch: int) -> None:
        """Note the epoch in an answer of a node."""
        known = self._noted(node_id)
        known.epoch, known.asked_at = epoch, self._clock()

    def of(self, node_id: str) -> int | None:
        """Return the newest epoch that is known of a node, or None."""
        known = self._known.get(node_id)
        return None if known is None else known.epoch

    async def refresh(self, node_ids: Iterable[str], seconds_left: float | None) -> None:
        """Ask those nodes that were not heard of lately, and wait for them a moment."""
        asking = [task for task in map(self._ask, set(node_ids)) if task is not None]
        if asking:
            left = patience(seconds_left)
            await asyncio.wait(asking, timeout=_ASKING_SECONDS_MAX if left is None else min(left, _ASKING_SECONDS_MAX))

    def _ask(self, node_id: str) -> asyncio.Task[None] | None:
        known = self._noted(node_id)
        if self._clock() - known.asked_at < self._seconds_fresh:
            return None
        if known.asking is None:
            known.asking = self._background.start(self._ping(node_id, known))
        return known.asking

    def _noted(self, node_id: str) -> _Known:
        """Return what is known of a node, which is the last one to be forgotten from here on."""
        known = self._known[node_id] = self._known.pop(node_id, _Known())
        if len(self._known) > NODES_MAX:
            del self._known[next(iter(self._known))]
        return known

    async def _ping(self, node_id: str, known: _Known) -> None:
        peer = self._peers.find(node_id)
        try:
            if peer is not None:
                self.hear(node_id, await peer.ping(seconds_max=_ASKING_SECONDS_MAX))
        except OwnerUnreachableError:
            pass
        finally:
            known.asked_at = self._clock()
            known.asking = None
