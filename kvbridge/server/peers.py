"""`PeerService`: what other nodes ask of this one."""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.directory.port import ORDERS_MAX
from kvbridge.link.grpc_neighbour import readable_names, readable_orders
from kvbridge.link.neighbour import OrderNews, Owned
from kvbridge.node.bridge import Bridge
from kvbridge.node.cluster import KEYS_ASKED_MAX
from kvbridge.node.encoding import encodings_of
from kvbridge.node.lending import Lent, Refused
from kvbridge.server.answers import Answers
from kvbridge.server.calls import caller, require_time
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.v1.peer_service_pb2_grpc import PeerServiceServicer
from kvbridge.wire import (
    decode_reference,
    encode_descriptor,
    encode_duration,
    encode_fallback,
    encode_model_tag,
    encode_reason,
    encode_reference,
    encode_tokens,
)
from kvbridge.wire.orders import encode_order
from kvbridge.wire.payloads import require
from kvbridge.wire.transfers import encode_transfer_encoding

_NANOS_PER_SECOND = 1_000_000_000

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class PeerServicer(PeerServiceServicer):
    """Leases payloads to other nodes."""

    def __init__(self, bridge: Bridge, answers: Answers, *, bulk_port: int = 0) -> None:
        """Serve `bridge`, whose port for bytes is `bulk_port`, 0 if it has none."""
        self._bulk_port = bulk_port
        self._bridge = bridge
        self._answers = answers

    async def OpenPayload(self, request: pb.OpenPayloadRequest, context: _Context) -> pb.OpenPayloadResponse:  # noqa: N802
        """Lease a payload to another node, or say why it cannot."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.OpenPayloadResponse:
            require_time(context)
            require(request.HasField("reference"), "reference")
            reference = decode_reference(request.reference)
            if not reference.generation:
                raise InvalidFieldError("reference.generation", "is required")
            _check_whose(reference, request.owner_epoch)
            kept = None if request.owner_epoch else await self._bridge.lender.recall(request.tenant, reference)
            answer = self._bridge.lender.lend(
                client.in_tenant(request.tenant),
                request.tenant,
                reference,
                kept=kept,
                owner_epoch=request.owner_epoch,
            )
            owner = self._owner()
            if isinstance(answer, Refused):
                return pb.OpenPayloadResponse(closed=_encode_refused(answer), owner=owner)
            return pb.OpenPayloadResponse(opened=encode_lent(answer), owner=owner)

        return await self._answers.once(client, request.request_id, request, work)

    async def Ping(self, _: pb.PingRequest, context: _Context) -> pb.PingResponse:  # noqa: N802
        """Tell who answers here."""
        caller(self._bridge.sessions, context)
        return self._owner()

    async def LocatePayloads(  # noqa: N802
        self, request: pb.LocatePayloadsRequest, context: _Context
    ) -> pb.LocatePayloadsResponse:
        """Tell which payloads this node owns under some keys."""
        caller(self._bridge.sessions, context)
        if len(request.keys) > KEYS_ASKED_MAX:
            raise InvalidFieldError("keys", f"must be at most {KEYS_ASKED_MAX}, got {len(request.keys)}")
        owned = self._bridge.cluster.owned(request.tenant, request.keys)
        return pb.LocatePayloadsResponse(payloads=map(_encode_owned, owned), owner=self._owner())

    async def ExchangeOrders(  # noqa: N802
        self, request: pb.ExchangeOrdersRequest, context: _Context
    ) -> pb.ExchangeOrdersResponse:
        """Take the orders that another node knows of, and tell those that this node knows of."""
        caller(self._bridge.sessions, context)
        for name in ("orders", "lifted"):
            if len(getattr(request, name)) > ORDERS_MAX:
                raise InvalidFieldError(name, f"must be at most {ORDERS_MAX}")
        told = OrderNews(
            orders=tuple(readable_orders(request.orders)),
            lifted=tuple(readable_names(request.lifted)),
            digest=request.digest,
        )
        known = self._bridge.cluster.exchange(told)
        return pb.ExchangeOrdersResponse(
            orders=map(encode_order, known.orders), lifted=known.lifted, owner=self._owner()
        )

    def _owner(self) -> pb.PingResponse:
        bridge = self._bridge
        return pb.PingResponse(
            node_id=bridge.config.node_id,
            epoch=bridge.epoch,
            draining=bridge.draining,
            bulk_port=bridge.config.bulk_port_told or self._bulk_port,
            orders_digest=bridge.cluster.orders.digest,
        )


def _check_whose(reference: PayloadReference, owner_epoch: int) -> None:
    """Refuse what is neither a payload of this node nor exactly a replica.

    Raises:
        InvalidFieldError: naming the field.
    """
    if not is_handoff_reference(reference.key):
        if owner_epoch:
            raise InvalidFieldError("owner_epoch", "is for replicas, which go by their handoff reference")
        return
    if not owner_epoch:
        raise InvalidFieldError("reference.key", "names a payload of another node; ask that node")
    HandoffReference.parse(reference.key)


def _encode_owned(owned: Owned) -> pb.LocatedPayload:
    seconds = int(owned.committed_at)
    nanos = int((owned.committed_at - seconds) * _NANOS_PER_SECOND)
    return pb.LocatedPayload(
        reference=encode_reference(owned.reference), committed=Timestamp(seconds=seconds, nanos=nanos)
    )


def encode_lent(lent: Lent) -> pb.OpenedPayload:
    """Return what another node is lent as a message."""
    return pb.OpenedPayload(
        lease_token=lent.grant.token,
        time_to_live=encode_duration(lent.grant.ttl_seconds),
        descriptor=encode_descriptor(lent.descriptor, with_ids=True),
        fallback=encode_fallback(lent.fallback),
        encodings=map(encode_transfer_encoding, encodings_of(lent.descriptor)),
        holders=lent.holders,
    )


def _encode_refused(refused: Refused) -> pb.ClosedPayload:
    return pb.ClosedPayload(
        reason=encode_reason(refused.reason),
        detail=refused.detail,
        fallback=encode_fallback(refused.fallback),
        tokens=None if refused.tokens is None else encode_tokens(refused.tokens),
        model=None if refused.model is None else encode_model_tag(refused.model),
    )
