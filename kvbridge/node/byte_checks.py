"""Checking the bytes of a leased payload again before it is handed over.

1. However many consumers wait for the same payload, it is checked once: whoever comes while a check runs waits for that
   one, if it is as thorough as wanted.
2. Nobody waits longer than its deadline allows. The check goes on without it, for the others. Answers take time, too:
   of many who wait, each is answered a little earlier than the one before, so that the last is not late.
3. The check holds a lease of its own, so that the bytes stay in place although those who wait may give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvbridge.core.descriptor import Verification
from kvbridge.core.errors import BridgeError, UnknownReferenceError
from kvbridge.core.ledger import Grant, Ledger, Payload, Tombstone
from kvbridge.core.reasons import Reason
from kvbridge.node.background import Background
from kvbridge.node.check_costs import CheckCosts
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.verification import ByteFinding, Verifier
from kvbridge.node.waiting import Waiters

Failure = tuple[Reason, str]
"""What is wrong with bytes: the reason, and its finding for people."""

NODE_CLIENT_ID = "(node)"
"""Holds the leases of running checks; too short to be a client's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CheckKey:
    """Names a check that can be shared."""

    tenant: str
    payload_id: int
    level: Verification


class ByteChecks:
    """Checks leased bytes, each payload once at a time; a check once begun runs to its end."""

    def __init__(
        self, *, clock: Callable[[], float], verifier: Verifier, costs: CheckCosts, background: Background
    ) -> None:
        """Check by `verifier` and tell `costs` how long that takes; `clock` is the ledger's."""
        self._clock = clock
        self._costs = costs
        self._verifier = verifier
        self._background = background
        self._running: dict[_CheckKey, asyncio.Task[Failure | None]] = {}
        self._waiters = Waiters()

    def __repr__(self) -> str:
        """Show how many checks run."""
        return f"<ByteChecks, {len(self._running)} running>"

    async def check(
        self,
        tenancy: Tenancy,
        payload: Payload,
        grant: Grant,
        *,
        client_id: str,
        level: Verification,
        seconds_max: float | None,
    ) -> Failure | None:
        """Check leased bytes and return what is wrong with them, or None; never later than in `seconds_max`.

        A payload that is found bad ends, whoever else has leased it.
        """
        task = self._shared(tenancy, payload, level)
        if not await self._ends_in_time(task, seconds_max):
            return Reason.TRANSFER_TIMEOUT, "the check of the bytes did not end before the caller's deadline"
        failure = task.result()
        if failure is not None:
            return failure
        with tenancy.ledger() as ledger:
            [ttl_seconds] = ledger.renew(now=self._clock(), client_id=client_id, tokens=[grant.token])
        lost = (Reason.PAYLOAD_EXPIRED, "the lease expired while the bytes were checked")
        return lost if ttl_seconds is None else None

    def lost(self, ledger: Ledger, client_id: str, grant: Grant) -> Failure | None:
        """Return why a payload may not be handed over under a lease that was given a while ago, or None.

        Somebody else may have found it bad since then, or the lease may have ended beside the check of another part.
        """
        now, reference = self._clock(), grant.reference
        found = ledger.find(now=now, key=reference.key, generation=reference.generation)
        if isinstance(found, Tombstone):
            return found.reason, found.detail
        left = ledger.lease_seconds_left(now=now, client_id=client_id, token=grant.token)
        lost = (Reason.PAYLOAD_EXPIRED, "the lease ended while the bytes were checked")
        return lost if found is None or left is None else None

    def give_back(self, ledger: Ledger, client_id: str, grant: Grant) -> None:
        """Return a lease that the consumer was never told of; if its session has ended it is gone already."""
        with suppress(UnknownReferenceError):
            ledger.release(now=self._clock(), client_id=client_id, tokens=[grant.token])

    async def _ends_in_time(self, task: asyncio.Task[Failure | None], seconds_max: float | None) -> bool:
        return await self._waiters.see_the_end(task, seconds_max)

    def _shared(self, tenancy: Tenancy, payload: Payload, level: Verification) -> asyncio.Task[Failure | None]:
        for thorough in Verification:
            key = _CheckKey(tenant=tenancy.tenant, payload_id=payload.payload_id, level=thorough)
            if thorough.includes(level) and key in self._running:
                return self._running[key]
        key = _CheckKey(tenant=tenancy.tenant, payload_id=payload.payload_id, level=level)
        task = self._running[key] = self._background.start(self._check(tenancy, payload, level))
        task.add_done_callback(lambda _: self._running.pop(key))
        return task

    async def _check(self, tenancy: Tenancy, payload: Payload, level: Verification) -> Failure | None:
        try:
            with tenancy.ledger() as ledger:
                own = ledger.lease(
                    now=self._clock(), client_id=NODE_CLIENT_ID, attached=True, payload_id=payload.payload_id
                )
        except BridgeError as error:
            return Reason.PAYLOAD_EXPIRED, f"the payload could not be kept in place for the check: {error}"
        try:
            finding = await self._found(tenancy, payload, level)
        finally:
            with tenancy.ledger() as ledger:
                self.give_back(ledger, NODE_CLIENT_ID, own)
        if finding.failure is not None and finding.layer_digests:
            reason, detail = finding.failure
            with tenancy.ledger() as ledger:
                ledger.fail(now=self._clock(), payload_id=payload.payload_id, reason=reason, detail=detail)
        return finding.failure

    async def _found(self, tenancy: Tenancy, payload: Payload, level: Verification) -> ByteFinding:
        assert payload.descriptor is not None, payload
        if not payload.descriptor.layer_digests:
            detail = "no digest was sealed, so the bytes cannot be checked again"
            return ByteFinding(failure=(Reason.PAYLOAD_CORRUPT, detail))
        slot = tenancy.slot(payload.slot)
        with self._costs.timed((tenancy.tenant, payload.payload_id), payload.descriptor, level):
            return await self._verifier.check(slot, payload.descriptor, level=level, zero_padding=False)
