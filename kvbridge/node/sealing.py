"""The end of a commit: check the bytes, probe the tokens, and make the payload available or say why not."""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.ledger import Committed, Payload, Rejected
from kvbridge.node.check_costs import CheckCosts
from kvbridge.node.probes import Probes
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.texts import Texts
from kvbridge.node.traffic import Traffic
from kvbridge.node.verification import Verifier


class Sealing:
    """Finishes commits that have begun."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        verifier: Verifier,
        costs: CheckCosts,
        probes: Probes,
        quarantines: QuarantineKeeper,
        texts: Texts,
        traffic: Traffic,
    ) -> None:
        """Ask all of these, and tell `costs`, `texts` and `traffic`; `clock` is the ledger's."""
        self._clock = clock
        self._verifier = verifier
        self._costs = costs
        self._probes = probes
        self._quarantines = quarantines
        self._texts = texts
        self._traffic = traffic
        self.on_committed: Callable[[str, PayloadReference], None] = lambda _, __: None

    async def verify_and_finish(
        self, tenancy: Tenancy, payload: Payload, *, hold: bool, digested: bool = False
    ) -> Committed | Rejected:
        """Check a payload that is being committed, and end its verification either way; must not be cancelled.

        One whose bytes were `digested` as they came, and found to be what was sealed, is not read again for that.
        """
        assert payload.descriptor is not None, payload
        descriptor, slot = payload.descriptor, tenancy.slot(payload.slot)
        if digested and descriptor.verified is Verification.DIGEST:
            finding = await self._verifier.check(slot, descriptor, level=Verification.NONE, zero_padding=True)
        else:
            with self._costs.timed((tenancy.tenant, payload.payload_id), descriptor, descriptor.verified):
                finding = await self._verifier.check(slot, descriptor, level=descriptor.verified, zero_padding=True)
        failure = finding.failure or await self._probes.check((tenancy.tenant, payload.payload_id), descriptor, slot)
        with tenancy.ledger() as ledger:
            outcome = ledger.finish_commit(
                now=self._clock(),
                payload_id=payload.payload_id,
                layer_digests=finding.layer_digests,
                failure=failure or self._quarantines.commit_failure(tenancy.tenant, payload),
                hold=hold,
            )
        if isinstance(outcome, Committed):
            self._texts.committed(tenancy.tenant, payload)
            self.on_committed(tenancy.tenant, payload.reference)
        self._traffic.note_commit(outcome)
        return outcome
