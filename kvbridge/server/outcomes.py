"""What became of a commit, as a message."""

from __future__ import annotations

from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.ledger import Committed, Rejected
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import encode_descriptor, encode_duration, encode_reason, encode_reference


def encode_outcome(outcome: Committed | Rejected, *, node_id: str) -> pb.CommitResponse:
    """Return what became of a commit at the node `node_id` as a message."""
    if isinstance(outcome, Rejected):
        return pb.CommitResponse(
            rejected=pb.RejectedPayload(
                reference=encode_reference(outcome.reference),
                reason=encode_reason(outcome.reason),
                detail=outcome.detail,
            )
        )
    hold = outcome.hold
    return pb.CommitResponse(
        committed=pb.CommittedPayload(
            descriptor=encode_descriptor(outcome.descriptor),
            handoff_reference=str(HandoffReference(node_id=node_id, payload=outcome.descriptor.reference)),
            hold_token=hold.token if hold else "",
            hold_time_to_live=encode_duration(hold.ttl_seconds) if hold else None,
        )
    )
