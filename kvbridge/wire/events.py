"""What a node tells the clients that watch it."""

from __future__ import annotations

from kvbridge.core.events import (
    Event,
    EventsLost,
    LeaseExpiring,
    NodeDraining,
    PayloadQuarantined,
    PayloadRevoked,
)
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.durations import decode_duration, encode_duration
from kvbridge.wire.payloads import decode_reference, encode_reference
from kvbridge.wire.tags import decode_reason, encode_reason


def encode_event(sequence: int, event: Event | None) -> pb.WatchResponse:
    """Return an event as a message; None stands for a stream that is open and misses nothing."""
    response = pb.WatchResponse(sequence=sequence)
    match event:
        case PayloadRevoked():
            response.revoked.reference.CopyFrom(encode_reference(event.reference))
            response.revoked.reason = encode_reason(event.reason)
            response.revoked.detail = event.detail
        case PayloadQuarantined():
            response.quarantined.reference.CopyFrom(encode_reference(event.reference))
            response.quarantined.detail = event.detail
            response.quarantined.handoff_ids.extend(event.handoff_ids)
            response.quarantined.held = event.held
        case NodeDraining():
            response.draining.time_left.CopyFrom(encode_duration(event.seconds_left))
        case LeaseExpiring():
            response.expiring.lease_token = event.lease_token
            response.expiring.time_to_live.CopyFrom(encode_duration(event.seconds_left))
        case _:
            response.started.events_lost = event is not None
    return response


def decode_event(message: pb.WatchResponse) -> Event | None:
    """Return the event in `message`; None for a stream that is open and misses nothing, and for what is not known.

    Raises:
        InvalidFieldError: a field cannot be.
    """
    kind = message.WhichOneof("event")
    if kind == "revoked":
        revoked = message.revoked
        return PayloadRevoked(
            reference=decode_reference(revoked.reference),
            reason=decode_reason(revoked.reason),
            detail=revoked.detail,
        )
    if kind == "quarantined":
        quarantined = message.quarantined
        return PayloadQuarantined(
            reference=decode_reference(quarantined.reference),
            detail=quarantined.detail,
            handoff_ids=tuple(quarantined.handoff_ids),
            held=quarantined.held,
        )
    if kind == "draining":
        return NodeDraining(seconds_left=decode_duration(message.draining.time_left, "time_left"))
    if kind == "expiring":
        expiring = message.expiring
        left = decode_duration(expiring.time_to_live, "time_to_live")
        return LeaseExpiring(lease_token=expiring.lease_token, seconds_left=left)
    return EventsLost() if kind == "started" and message.started.events_lost else None
