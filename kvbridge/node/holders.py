"""Which other nodes said that they have brought a payload of this one over.

That is hearsay, and soft: it ends by the time that the other node named, with the payload, and with this node. Whoever
believes it loses time at most, because what a holder sends has to have the digests that this node sealed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvbridge.core.access import Role
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.ledger.effects import PayloadEnded
from kvbridge.core.ledger.states import PayloadState
from kvbridge.link.port import HOLDERS_MAX, ReplicaNotice
from kvbridge.node.identity import Client
from kvbridge.node.tenancy import Tenancy

PAYLOADS_MAX = 4096
"""Most payloads of which holders are remembered; those that were told of least recently are forgotten."""
LINGER_SECONDS_MAX = 3600.0
"""How long a holder is remembered at most."""

_Key = tuple[str, PayloadReference]
"""Tenant and payload, whose generation never comes twice."""


class Holders:
    """Remembers who has replicas of this node's payloads."""

    def __init__(self, tenancies: Mapping[str, Tenancy], *, clock: Callable[[], float]) -> None:
        """Know nobody; `clock` is the ledgers'."""
        self._tenancies = tenancies
        self._clock = clock
        self._until: OrderedDict[_Key, dict[str, float]] = OrderedDict()
        for tenancy in tenancies.values():
            tenancy.on_ended.append(self._ended)

    def __len__(self) -> int:
        """Return of how many payloads holders are remembered."""
        return len(self._until)

    def told(self, client: Client, tokens: Sequence[str], notice: ReplicaNotice) -> None:
        """Take the word of another node that still has its lease on what it brought over.

        Raises:
            InvalidFieldError: it is no node that says so, or it returns more than one reference.
            NotYoursError: the lease belongs to another client.
        """
        if not client.is_node or Role.PEER not in client.principal.roles:
            raise InvalidFieldError("replica", "is for other nodes to tell")
        if len(tokens) != 1:
            raise InvalidFieldError("tokens", "must be one with `replica`")
        with suppress(UnknownReferenceError), self._tenancies[client.tenant].ledger() as ledger:
            payload = ledger.payload_of(now=self._clock(), client_id=client.client_id, token=tokens[0])
            if payload.state is PayloadState.COMMITTED:
                self._note((client.tenant, payload.reference), notice)

    def of(self, tenant: str, reference: PayloadReference) -> tuple[str, ...]:
        """Return the nodes that ought to have a replica, who told of it last first."""
        now = self._clock()
        holders = self._until.get((tenant, reference), {})
        return tuple(node_id for node_id, until in reversed(holders.items()) if until > now)

    def _note(self, key: _Key, notice: ReplicaNotice) -> None:
        holders = self._until.setdefault(key, {})
        self._until.move_to_end(key)
        holders.pop(notice.node_id, None)
        holders[notice.node_id] = self._clock() + min(notice.linger_seconds, LINGER_SECONDS_MAX)
        if len(holders) > HOLDERS_MAX:
            del holders[next(iter(holders))]
        if len(self._until) > PAYLOADS_MAX:
            self._until.popitem(last=False)

    def _ended(self, tenancy: Tenancy, ended: PayloadEnded) -> None:
        self._until.pop((tenancy.tenant, ended.reference), None)
