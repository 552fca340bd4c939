"""What an acquire does about payloads of other nodes before its parts are decided."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.journal import Pull
from kvbridge.core.ledger import Ledger, Payload, Tombstone
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import TransferForm, marked_key
from kvbridge.node.byte_checks import Failure
from kvbridge.node.foreign import Foreign
from kvbridge.node.replicas import Replicas
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.visit import Visit

ForeignByKey = Mapping[str, Foreign]
"""What other nodes said, by handoff reference."""
PullsByKey = dict[str, Pull]
"""What was brought over, by handoff reference."""
FormsByKey = Mapping[str, TransferForm]
"""How payloads are to be brought over, by handoff reference."""
Takes = Callable[[str, Payload], bool]
"""Tells of a replica that lost bits on its way whether it may be handed over to who asks for a handoff reference."""
SecondsLeft = Callable[[], float | None]
"""What is left of the caller's time; None if it has no deadline."""


class Fetching:
    """Brings over what would be handed over, and nothing else."""

    def __init__(self, *, clock: Callable[[], float], replicas: Replicas) -> None:
        """Visit other nodes by `replicas`; `clock` is the ledger's."""
        self._clock = clock
        self._replicas = replicas

    async def missing(
        self, tenancy: Tenancy, keys: Sequence[str], seconds_left: SecondsLeft, takes: Takes = lambda *_: False
    ) -> list[str]:
        """Return those keys that name payloads of other nodes of which there is no replica here that could be used."""
        foreign = [key for key in keys if is_handoff_reference(key)]
        here = [key for key in foreign if self._is_here(tenancy, key, takes)]
        if here:
            await self._replicas.refresh(here, seconds_left())
        return [key for key in foreign if not self._is_here(tenancy, key, takes)]

    def find(self, ledger: Ledger, tenant: str, key: str, takes: Takes) -> Payload | Tombstone | None:
        """Return the exact replica of a handoff reference, or else one that lost bits if `takes` allows it."""
        found = ledger.find(now=self._clock(), key=key)
        if self._is_usable(tenant, key, found):
            return found
        for marked in ledger.marked(key=key):
            lossy = ledger.find(now=self._clock(), key=marked)
            if isinstance(lossy, Payload) and self._is_usable(tenant, marked, lossy) and takes(key, lossy):
                return lossy
        return found

    async def fetch(
        self,
        tenancy: Tenancy,
        keys: Sequence[str],
        *,
        passing: Callable[[ForeignByKey], FormsByKey],
        seconds_left: SecondsLeft,
        pulls: PullsByKey,
    ) -> ForeignByKey:
        """Ask owners of `keys`, bring over what `passing` names, as it says, and return what was said of the others.

        The others are those that could not, or need not, be brought over. What fails may let others pass that would
        have been too many before, so `passing` is asked until it names nothing more. `pulls` is told what came.
        """
        with ExitStack() as stays:
            visits = stays.enter_context(self._replicas.visiting(tenancy.tenant, keys))
            looked = await asyncio.gather(*(visit.look(seconds_left()) for visit in visits.values()))
            foreign = dict(zip(visits, looked, strict=True))
            while wanted := passing(foreign):
                # What has come stays until the last of them has: all visits end together.
                exact = {key: visits[key] for key in wanted}
                lossy = {
                    key: stays.enter_context(self._replicas.visiting(tenancy.tenant, [key], form))[key]
                    for key, form in wanted.items()
                    if not form.is_exact
                }
                brought = (
                    self._bring(tenancy, key, exact[key], lossy.get(key), seconds_left=seconds_left, pulls=pulls)
                    for key in wanted
                )
                for key, failure in zip(wanted, await asyncio.gather(*brought), strict=True):
                    said = foreign.pop(key)
                    if failure is not None:
                        foreign[key] = said.lost(failure)
            return foreign

    async def _bring(
        self,
        tenancy: Tenancy,
        key: str,
        exact: Visit,
        lossy: Visit | None,
        *,
        seconds_left: SecondsLeft,
        pulls: PullsByKey,
    ) -> Failure | None:
        """Bring a payload over, in fewer bits if there is a visit for that and its values allow it."""
        if lossy is not None:
            said = await lossy.look(seconds_left())
            if said.descriptor is None:
                return said.ended or Reason.TRANSFER_FAILED, said.detail
            failure = await self._pull(tenancy, key, lossy, seconds_left=seconds_left, pulls=pulls)
            if not lossy.must_be_exact:
                return failure
        return await self._pull(tenancy, key, exact, seconds_left=seconds_left, pulls=pulls)

    async def _pull(
        self, tenancy: Tenancy, key: str, visit: Visit, *, seconds_left: SecondsLeft, pulls: PullsByKey
    ) -> Failure | None:
        failure = await visit.pull(seconds_left())
        if visit.figures is not None:
            pulls[key] = visit.figures
        if failure is not None:
            return failure
        self._replicas.note(tenancy.tenant, key, visit)
        if not self._replicas.is_current(tenancy.tenant, marked_key(key, visit.form)):
            # A holder goes on sending when the owner has gone; whoever joined the visit late may know of the new start.
            return Reason.TRANSFER_FAILED, "its owner has started again since it was asked"
        return None

    def _is_here(self, tenancy: Tenancy, key: str, takes: Takes) -> bool:
        with tenancy.ledger() as ledger:
            found = self.find(ledger, tenancy.tenant, key, takes)
        return isinstance(found, Payload) and self._is_usable(tenancy.tenant, found.reference.key, found)

    def _is_usable(self, tenant: str, key: str, found: Payload | Tombstone | None) -> bool:
        ready = isinstance(found, Payload) and found.committed_at is not None
        return ready and self._replicas.is_current(tenant, key)
