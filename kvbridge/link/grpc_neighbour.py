"""Another node over gRPC: what its `PeerService` says besides payloads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from google.protobuf.message import Message

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.orders import DIGEST_BYTES, Order
from kvbridge.link.neighbour import Greeting, OrderNews, Owned
from kvbridge.link.port import OwnerUnreachableError
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.wire import decode_reference
from kvbridge.wire.orders import check_order_id, decode_order, encode_order

_log = logging.getLogger(__name__)

_NANOS_PER_SECOND = 1_000_000_000


class Caller(Protocol):
    """Calls one node."""

    async def ask(self, method: str, request: Message, *, seconds_max: float) -> Any:
        """Call a method of `PeerService` and return the answer of the right node.

        Raises:
            OwnerUnreachableError: there was no answer in time, or another node answered.
        """


class GrpcNeighbour:
    """One other node."""

    def __init__(self, caller: Caller) -> None:
        """Call it by `caller`."""
        self._caller = caller

    def __repr__(self) -> str:
        """Show who is called where."""
        return f"<GrpcNeighbour by {self._caller!r}>"

    async def greet(self, *, seconds_max: float) -> Greeting:
        """Return who answers; errors as for `Neighbour`."""
        answer: pb.PingResponse = await self._caller.ask("Ping", pb.PingRequest(), seconds_max=seconds_max)
        return Greeting(
            node_id=answer.node_id,
            epoch=answer.epoch,
            draining=answer.draining,
            orders_digest=answer.orders_digest[:DIGEST_BYTES],
        )

    async def locate(self, tenant: str, keys: Sequence[str], *, seconds_max: float) -> Mapping[str, Owned]:
        """Return what the node owns under those of the keys under which it owns anything; errors as for `Neighbour`."""
        request = pb.LocatePayloadsRequest(tenant=tenant, keys=keys)
        answer: pb.LocatePayloadsResponse = await self._caller.ask("LocatePayloads", request, seconds_max=seconds_max)
        try:
            owned = [_decode_owned(located) for located in answer.payloads[: len(keys)]]
        except InvalidFieldError as error:
            raise OwnerUnreachableError(f"{self!r} gave no answer that makes sense: {error}") from error
        return {one.reference.key: one for one in owned if one.reference.key in keys}

    async def exchange(self, news: OrderNews, *, seconds_max: float) -> OrderNews:
        """Tell the node of orders, and return what it knows; errors as for `Neighbour`."""
        request = pb.ExchangeOrdersRequest(
            orders=map(encode_order, news.orders), lifted=news.lifted, digest=news.digest
        )
        answer: pb.ExchangeOrdersResponse = await self._caller.ask("ExchangeOrders", request, seconds_max=seconds_max)
        return OrderNews(
            orders=tuple(readable_orders(answer.orders)),
            lifted=tuple(readable_names(answer.lifted)),
            digest=answer.owner.orders_digest[:DIGEST_BYTES],
        )


def readable_orders(messages: Iterable[pb.Order]) -> Iterable[Order]:
    """Yield those orders that this release understands: one that it does not must not keep it from the others."""
    for message in messages:
        try:
            yield decode_order(message)
        except InvalidFieldError as error:
            _log.warning("an order cannot be understood", extra={"order": message.order_id[:64], "problem": str(error)})


def readable_names(order_ids: Iterable[str]) -> Iterable[str]:
    """Yield what orders can be called."""
    for order_id in order_ids:
        try:
            check_order_id(order_id)
        except InvalidFieldError:
            continue
        yield order_id


def _decode_owned(message: pb.LocatedPayload) -> Owned:
    reference = decode_reference(message.reference)
    if not reference.generation:
        raise InvalidFieldError("reference.generation", "is required")
    committed_at = message.committed.seconds + message.committed.nanos / _NANOS_PER_SECOND
    return Owned(reference=reference, committed_at=committed_at)
