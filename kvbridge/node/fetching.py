"""What an acquire does about payloads of other nodes before its parts are decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.ledger import Payload
from kvbridge.node.replicas import Foreign, Replicas
from kvbridge.node.tenancy import Tenancy

ForeignByKey = Mapping[str, Foreign]
"""What other nodes said, by handoff reference."""


class Fetching:
    """Brings over what would be handed over, and nothing else."""

    def __init__(self, *, clock: Callable[[], float], replicas: Replicas) -> None:
        """Visit other nodes by `replicas`; `clock` is the ledger's."""
        self._clock = clock
        self._replicas = replicas

    def missing(self, tenancy: Tenancy, keys: Sequence[str]) -> list[str]:
        """Return those keys that name payloads of other nodes of which there is no replica here."""
        foreign = [key for key in keys if is_handoff_reference(key)]
        if not foreign:
            return []
        with tenancy.ledger() as ledger:
            found = {key: ledger.find(now=self._clock(), key=key) for key in foreign}
        return [key for key, payload in found.items() if not _is_ready(payload)]

    async def fetch(
        self,
        tenancy: Tenancy,
        keys: Sequence[str],
        *,
        passing: Callable[[ForeignByKey], Sequence[str]],
        seconds_left: Callable[[], float | None],
    ) -> ForeignByKey:
        """Ask the owners of `keys`, bring over those that `passing` names, and return what they said of the others.

        The others are those that could not, or need not, be brought over.
        """
        visits = {key: self._replicas.enter(tenancy.tenant, key) for key in keys}
        try:
            looked = await asyncio.gather(*(visit.look(seconds_left()) for visit in visits.values()))
            foreign = dict(zip(visits, looked, strict=True))
            wanted = passing(foreign)
            failures = await asyncio.gather(*(visits[key].pull(seconds_left()) for key in wanted))
            for key, failure in zip(wanted, failures, strict=True):
                said = foreign.pop(key)
                if failure is not None:
                    foreign[key] = said.lost(failure)
            return foreign
        finally:
            for key in visits:
                self._replicas.leave(tenancy.tenant, key)


def _is_ready(found: object) -> bool:
    return isinstance(found, Payload) and found.committed_at is not None
