"""Checking the bytes of a leased payload again before it is handed over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvbridge.core.descriptor import Verification
from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.ledger import Grant, Ledger, Payload
from kvbridge.core.reasons import Reason
from kvbridge.node.background import Background
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.verification import ByteFinding, Verifier

Failure = tuple[Reason, str]
"""What is wrong with bytes: the reason, and its finding for people."""


class ByteChecks:
    """Checks leased bytes; a check once begun runs to its end."""

    def __init__(self, *, clock: Callable[[], float], verifier: Verifier, background: Background) -> None:
        """Check by `verifier`; `clock` is the ledger's."""
        self._clock = clock
        self._verifier = verifier
        self._background = background

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
        """Check leased bytes and return what is wrong with them, or None.

        The lease keeps them in place meanwhile. A payload that is found bad ends, whoever else has leased it.
        """
        del seconds_max
        return await self._background.run(self._check(tenancy, payload, grant, client_id=client_id, level=level))

    async def _check(
        self, tenancy: Tenancy, payload: Payload, grant: Grant, *, client_id: str, level: Verification
    ) -> Failure | None:
        finding = await self._found(tenancy, payload, level)
        now = self._clock()
        with tenancy.ledger() as ledger:
            [ttl_seconds] = ledger.renew(now=now, client_id=client_id, tokens=[grant.token])
            if finding.failure is None:
                lost = (Reason.PAYLOAD_EXPIRED, "the lease expired while the bytes were checked")
                return lost if ttl_seconds is None else None
            if finding.layer_digests:
                reason, detail = finding.failure
                ledger.fail(now=now, payload_id=payload.payload_id, reason=reason, detail=detail)
        return finding.failure

    async def _found(self, tenancy: Tenancy, payload: Payload, level: Verification) -> ByteFinding:
        assert payload.descriptor is not None, payload
        if not payload.descriptor.layer_digests:
            detail = "no digest was sealed, so the bytes cannot be checked again"
            return ByteFinding(failure=(Reason.PAYLOAD_CORRUPT, detail))
        slot = tenancy.slot(payload.slot)
        return await self._verifier.check(slot, payload.descriptor, level=level, zero_padding=False)

    def give_back(self, ledger: Ledger, client_id: str, grant: Grant) -> None:
        """Return a lease that the consumer was never told of; if its session has ended it is gone already."""
        with suppress(UnknownReferenceError):
            ledger.release(now=self._clock(), client_id=client_id, tokens=[grant.token])
