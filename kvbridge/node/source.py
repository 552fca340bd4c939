"""A node that bytes come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvbridge.link.port import Opened, Peer

_RENEWALS_PER_TTL = 3
_RENEWAL_SECONDS_MIN = 0.05
_RENEW_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that has leased a payload, or its replica of one, to this node."""

    node_id: str
    """Its name."""
    peer: Peer
    """Calls it."""
    lease_token: str
    """Proves the lease."""
    ttl_seconds: float
    """How long the lease lasts if it is not renewed."""
    is_owner: bool
    """Whether the payload is its own."""
    seconds_max: float
    """How long its bytes may take."""

    @asynccontextmanager
    async def renewing(self, tenant: str) -> AsyncIterator[None]:
        """Keep the lease for as long as the body runs."""
        renewing = asyncio.get_running_loop().create_task(self._renew(tenant))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})

    async def _renew(self, tenant: str) -> None:
        while True:
            await asyncio.sleep(max(self.ttl_seconds / _RENEWALS_PER_TTL, _RENEWAL_SECONDS_MIN))
            await self.peer.renew(self.lease_token, seconds_max=_RENEW_SECONDS_MAX, tenant=tenant)


def source_of(node_id: str, peer: Peer, opened: Opened, seconds_max: float, *, is_owner: bool) -> Source:
    """Return the node that gave this answer as one that bytes come from."""
    return Source(
        node_id=node_id,
        peer=peer,
        lease_token=opened.lease_token,
        ttl_seconds=opened.ttl_seconds,
        is_owner=is_owner,
        seconds_max=seconds_max,
    )
