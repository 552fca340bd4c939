"""Orders over the wire, and what is read where anybody may have written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.orders import KillSwitchOrder, Order, OrderContent, QuarantineOrder, RevocationOrder
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Target
from kvbridge.core.reasons import Reason
from kvbridge.v1 import peer_service_pb2 as pb
from kvbridge.wire.orders import ORDER_BYTES_MAX, decode_order, encode_order, parse_order

TARGETS: tuple[Target, ...] = (
    ModelPattern(name="m", revision="r"),
    AlignerPattern(name="a"),
    PayloadReference(key="kvb://node-a/k@3", generation=1),
)
REVOKED = RevocationOrder(
    tenant="default",
    reference=PayloadReference(key="kvb://node-a/k@3", generation=1),
    epoch=(1 << 64) - 1,
    reason=Reason.VALUES_NOT_FINITE,
    detail="a NaN",
)


def order(content: OrderContent) -> Order:
    """Return an order of this content."""
    return Order(order_id="0123456789abcdef", origin="node-a", issued_at=1234.5, content=content)


def quarantine(target: Target) -> OrderContent:
    """Return a quarantine as the content of `order`."""
    imposed = Quarantine(quarantine_id="0123456789abcdef", target=target, why="bad weights", since=1234.5)
    return QuarantineOrder(tenant="default", quarantine=imposed)


@pytest.mark.parametrize("content", [*map(quarantine, TARGETS), KillSwitchOrder(why="why"), REVOKED])
def test_orders_survive_the_wire(content: OrderContent) -> None:
    """What is decoded is what was encoded."""
    assert decode_order(encode_order(order(content))) == order(content)
    assert parse_order(encode_order(order(content)).SerializeToString()) == order(content)


def spoilt(**changes: object) -> pb.Order:
    """Return an order with some fields of its message changed."""
    message = encode_order(order(quarantine(TARGETS[0])))
    for name, value in changes.items():
        where = message
        *path, last = name.split("__")
        for step in path:
            where = getattr(where, step)
        setattr(where, last, value)
    return message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"order_id": ""}, "order_id"),
        ({"order_id": "x" * 65}, "order_id"),
        ({"order_id": "another"}, "quarantine.record.quarantine_id"),
        ({"origin": "no node"}, "origin"),
        ({"quarantine__tenant": ""}, "tenant"),
        ({"quarantine__record__why": "x" * 1025}, "why"),
        ({"quarantine__record__target__model__name": "x" * 2000}, None),
    ],
)
def test_what_no_node_can_have_written_is_refused(changes: dict[str, object], field: str | None) -> None:
    """By its field."""
    with pytest.raises(InvalidFieldError) as refused:
        decode_order(spoilt(**changes))
    assert field is None or refused.value.field == field


def test_nobody_revokes_what_is_anothers() -> None:
    """A payload is its owner's to find bad."""
    message = encode_order(order(REVOKED))
    message.origin = "node-b"
    with pytest.raises(InvalidFieldError, match="owner"):
        decode_order(message)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_order_or_refused(content: bytes) -> None:
    """Nothing else comes of them."""
    try:
        parse_order(content)
    except InvalidFieldError:
        return


def test_what_is_too_long_is_not_even_parsed() -> None:
    """However good it may be."""
    with pytest.raises(InvalidFieldError, match="at most"):
        parse_order(b"\0" * (ORDER_BYTES_MAX + 1))
