"""What a node gives to other nodes: leases on its own payloads, and on the replicas that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.ledger import Tombstone
from kvbridge.node.holders import Holders
from kvbridge.node.identity import Client
from kvbridge.node.lending import UNKNOWN, Lent, Refused, lend
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.node.replicas import Replicas
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.texts import Texts


class Lender:
    """Answers nodes that want to replicate a payload."""

    def __init__(
        self,
        tenancies: Mapping[str, Tenancy],
        *,
        clock: Callable[[], float],
        replicas: Replicas,
        holders: Holders,
        quarantines: QuarantineKeeper,
        texts: Texts,
        is_draining: Callable[[], bool],
    ) -> None:
        """Ask all of these; `clock` is the ledgers', and `is_draining` tells whether the node is shutting down."""
        self._tenancies = tenancies
        self._clock = clock
        self._replicas = replicas
        self._holders = holders
        self._quarantines = quarantines
        self._texts = texts
        self._is_draining = is_draining

    async def recall(self, tenant: str, reference: PayloadReference) -> Tombstone | None:
        """Return what is kept of a payload of which the ledger knows nothing, for `lend`."""
        if tenant not in self._tenancies:
            return None
        return (await self._texts.recall(self._tenancies[tenant], [reference], seconds_max=None)).get(reference)

    def lend(
        self,
        client: Client,
        tenant: str,
        reference: PayloadReference,
        *,
        kept: Tombstone | None = None,
        owner_epoch: int = 0,
    ) -> Lent | Refused:
        """Lease a payload to another node, or say why it cannot be had; `kept` is what `recall` gave.

        With `owner_epoch` it is the replica, from that start of its owner, that is here or not; none is brought over.

        Raises:
            LimitExceededError: the other node has too many references.
        """
        if tenant not in self._tenancies:
            return UNKNOWN
        if is_handoff_reference(reference.key):
            if not self._replicas.is_from(tenant, reference.key, owner_epoch):
                return UNKNOWN
            reference = PayloadReference(key=reference.key, generation=0)
        answer = lend(
            self._tenancies[tenant],
            client,
            reference,
            clock=self._clock,
            kept=kept,
            quarantine=partial(self._quarantines.problem, tenant),
            node_draining=self._is_draining(),
        )
        if isinstance(answer, Lent):
            self._quarantines.lent(client, tenant, answer.grant)
            return replace(answer, holders=self._holders.of(tenant, reference))
        return answer
