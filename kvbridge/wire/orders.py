"""Orders that hold on every node."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from kvbridge.core.catalog.texts import require_text
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference, is_node_id
from kvbridge.core.orders import (
    ORDER_ID_CHARACTERS_MAX,
    KillSwitchOrder,
    Order,
    OrderContent,
    QuarantineOrder,
    RevocationOrder,
)
from kvbridge.core.quarantine import WHY_CHARACTERS_MAX
from kvbridge.core.reasons import SDK_ONLY_REASONS
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.wire.payloads import decode_reference, encode_reference, require
from kvbridge.wire.quarantines import decode_quarantine, encode_quarantine
from kvbridge.wire.tags import decode_reason, encode_reason

ORDER_BYTES_MAX = 32 << 10
"""Longest order that is read where nobody else has limited its length."""
TENANT_CHARACTERS_MAX = 256
"""Longest name of a tenant."""
DETAIL_CHARACTERS_MAX = 1024
"""As much of what a node says of a bad payload as is kept."""
_NANOS_PER_SECOND = 1_000_000_000


def encode_order(order: Order) -> pb.Order:
    """Return an order as a message."""
    seconds = int(order.issued_at)
    message = pb.Order(
        order_id=order.order_id,
        origin=order.origin,
        issued=Timestamp(seconds=seconds, nanos=int((order.issued_at - seconds) * _NANOS_PER_SECOND)),
    )
    content = order.content
    if isinstance(content, QuarantineOrder):
        record = encode_quarantine(content.quarantine)
        message.quarantine.CopyFrom(pb.QuarantineOrder(tenant=content.tenant, record=record))
    elif isinstance(content, KillSwitchOrder):
        message.kill_switch.CopyFrom(pb.KillSwitchOrder(why=content.why))
    else:
        message.revocation.CopyFrom(_encode_revocation(content))
    return message


def decode_order(message: pb.Order) -> Order:
    """Return the order in `message`.

    Raises:
        InvalidFieldError: a field is missing or cannot be.
    """
    check_order_id(message.order_id)
    if not is_node_id(message.origin):
        raise InvalidFieldError("origin", f"must name a node, got {message.origin!r}")
    return Order(
        order_id=message.order_id,
        origin=message.origin,
        issued_at=message.issued.seconds + message.issued.nanos / _NANOS_PER_SECOND,
        content=_decode_content(message),
    )


def parse_order(content: bytes) -> Order:
    """Return the order in serialized form that somebody wrote who need not be a node.

    Raises:
        InvalidFieldError: it is none.
    """
    if len(content) > ORDER_BYTES_MAX:
        raise InvalidFieldError("order", f"must be at most {ORDER_BYTES_MAX} bytes, got {len(content)}")
    try:
        return decode_order(pb.Order.FromString(content))
    except DecodeError as error:
        raise InvalidFieldError("order", f"does not parse: {error}") from error


def check_order_id(order_id: str) -> None:
    """Refuse what no order can be called.

    Raises:
        InvalidFieldError: naming `order_id`.
    """
    require_text("order_id", order_id, characters_max=ORDER_ID_CHARACTERS_MAX, may_be_empty=False)


def _decode_content(message: pb.Order) -> OrderContent:
    kind = message.WhichOneof("content")
    require(kind is not None, "content")
    if kind == "kill_switch":
        require_text("why", message.kill_switch.why, characters_max=WHY_CHARACTERS_MAX)
        return KillSwitchOrder(why=message.kill_switch.why)
    if kind == "revocation":
        return _decode_revocation(message)
    order = message.quarantine
    require_text("tenant", order.tenant, characters_max=TENANT_CHARACTERS_MAX, may_be_empty=False)
    quarantine = decode_quarantine(order.record)
    if quarantine.quarantine_id != message.order_id:
        raise InvalidFieldError("quarantine.record.quarantine_id", "must be the order's name")
    return QuarantineOrder(tenant=order.tenant, quarantine=quarantine)


def _encode_revocation(order: RevocationOrder) -> pb.RevocationOrder:
    return pb.RevocationOrder(
        tenant=order.tenant,
        reference=encode_reference(order.reference),
        epoch=order.epoch,
        reason=encode_reason(order.reason),
        detail=order.detail,
    )


def _decode_revocation(message: pb.Order) -> RevocationOrder:
    order = message.revocation
    require_text("tenant", order.tenant, characters_max=TENANT_CHARACTERS_MAX, may_be_empty=False)
    reference = decode_reference(order.reference)
    if HandoffReference.parse(reference.key).node_id != message.origin:
        raise InvalidFieldError("revocation.reference", "is for its owner alone to revoke")
    reason = decode_reason(order.reason)
    if reason in SDK_ONLY_REASONS:
        raise InvalidFieldError("revocation.reason", f"{reason} is not for a node to say")
    return RevocationOrder(
        tenant=order.tenant,
        reference=reference,
        epoch=order.epoch,
        reason=reason,
        detail=order.detail[:DETAIL_CHARACTERS_MAX],
    )
