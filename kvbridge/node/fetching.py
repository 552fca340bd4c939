"""What an acquire does about payloads of other nodes before its parts are decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.journal import Pull
from kvbridge.core.ledger import Payload
from kvbridge.node.foreign import Foreign
from kvbridge.node.replicas import Replicas
from kvbridge.node.tenancy import Tenancy

ForeignByKey = Mapping[str, Foreign]
"""What other nodes said, by handoff reference."""
PullsByKey = dict[str, Pull]
"""What was brought over, by handoff reference."""
SecondsLeft = Callable[[], float | None]
"""What is left of the caller's time; None if it has no deadline."""


class Fetching:
    """Brings over what would be handed over, and nothing else."""

    def __init__(self, *, clock: Callable[[], float], replicas: Replicas) -> None:
        """Visit other nodes by `replicas`; `clock` is the ledger's."""
        self._clock = clock
        self._replicas = replicas

    async def missing(self, tenancy: Tenancy, keys: Sequence[str], seconds_left: SecondsLeft) -> list[str]:
        """Return those keys that name payloads of other nodes of which there is no replica here."""
        foreign = [key for key in keys if is_handoff_reference(key)]
        here = [key for key in foreign if self._is_here(tenancy, key)]
        if here:
            await self._replicas.refresh(here, seconds_left())
        return [key for key in foreign if not self._is_here(tenancy, key)]

    async def fetch(
        self,
        tenancy: Tenancy,
        keys: Sequence[str],
        *,
        passing: Callable[[ForeignByKey], Sequence[str]],
        seconds_left: SecondsLeft,
        pulls: PullsByKey,
    ) -> ForeignByKey:
        """Ask the owners of `keys`, bring over those that `passing` names, and return what they said of the others.

        The others are those that could not, or need not, be brought over. What fails may let others pass that would
        have been too many before, so `passing` is asked until it names nothing more. `pulls` is told what came.
        """
        with self._replicas.visiting(tenancy.tenant, keys) as visits:
            looked = await asyncio.gather(*(visit.look(seconds_left()) for visit in visits.values()))
            foreign = dict(zip(visits, looked, strict=True))
            while wanted := passing(foreign):
                failures = await asyncio.gather(*(visits[key].pull(seconds_left()) for key in wanted))
                for key, failure in zip(wanted, failures, strict=True):
                    said, pull = foreign.pop(key), visits[key].figures
                    if pull is not None:
                        pulls[key] = pull
                    if failure is None:
                        self._replicas.note(tenancy.tenant, key, visits[key])
                    else:
                        foreign[key] = said.lost(failure)
            return foreign

    def _is_here(self, tenancy: Tenancy, key: str) -> bool:
        with tenancy.ledger() as ledger:
            found = ledger.find(now=self._clock(), key=key)
        ready = isinstance(found, Payload) and found.committed_at is not None
        return ready and self._replicas.is_current(tenancy.tenant, key)
