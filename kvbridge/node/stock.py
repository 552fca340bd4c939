"""What the arenas of a node's tenants hold, for whoever looks at it."""

from __future__ import annotations

from collections.abc import Mapping

from kvbridge.core.ledger import Page, Payload, Usage
from kvbridge.memory.arena import ArenaSnapshot, HostArena
from kvbridge.node.identity import Client
from kvbridge.node.tenancy import Tenancy


class Stock:
    """Bytes and payloads; to look changes nothing."""

    def __init__(self, tenancies: Mapping[str, Tenancy]) -> None:
        """Look at `tenancies`, by the tenants' names."""
        self._tenancies = tenancies

    def __repr__(self) -> str:
        """Show what each tenant has."""
        return f"<Stock: {list(self._tenancies.values())}>"

    def arena(self, tenant: str) -> HostArena:
        """Return a tenant's arena."""
        return self._tenancies[tenant].arena

    def usage(self, client: Client) -> tuple[Usage, ArenaSnapshot]:
        """Return where the bytes of the client's arena are."""
        tenancy = self._tenancies[client.tenant]
        with tenancy.ledger() as ledger:
            return ledger.usage(), tenancy.arena.snapshot()

    def usages(self) -> list[Usage]:
        """Return where the bytes of every tenant's arena are."""
        usages = []
        for tenancy in self._tenancies.values():
            with tenancy.ledger() as ledger:
                usages.append(ledger.usage())
        return usages

    def payloads(self, client: Client, *, key_prefix: str, page_size: int, cursor: int | None) -> Page:
        """Return a page of the client's tenant's payloads, newest first."""
        with self._tenancies[client.tenant].ledger() as ledger:
            return ledger.payloads(key_prefix=key_prefix, page_size=page_size, cursor=cursor)

    def payload(self, client: Client, key: str, generation: int) -> Payload | None:
        """Return one payload that occupies memory; generation 0 means the newest."""
        with self._tenancies[client.tenant].ledger() as ledger:
            return ledger.occupant(key=key, generation=generation)
