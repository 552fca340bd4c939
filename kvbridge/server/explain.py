"""`ExplainHandoff`: finds a past handoff of the caller's tenant and tells all that is known of it."""

from __future__ import annotations

from kvbridge.core.errors import UnknownReferenceError
from kvbridge.core.journal import HandoffRecord
from kvbridge.node.bridge import Bridge
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.wire import decode_reason
from kvbridge.wire.journal import parse_record
from kvbridge.wire.payloads import require


def explain(bridge: Bridge, tenant: str, request: pb.ExplainHandoffRequest) -> pb.ExplainHandoffResponse:
    """Return the record that `request` selects among those of `tenant`.

    Raises:
        InvalidFieldError: nothing is selected, or an unknown reason.
        UnknownReferenceError: there is no such handoff, it is forgotten, or it is another tenant's.
    """
    selector = request.WhichOneof("selector")
    require(selector is not None, "selector")
    record = _find(bridge, tenant, request, selector)
    if record is None:
        raise UnknownReferenceError(str(selector), "no such handoff is remembered")
    return pb.ExplainHandoffResponse(record=parse_record(bridge.observation.records.record(record)))


def _find(bridge: Bridge, tenant: str, request: pb.ExplainHandoffRequest, selector: str | None) -> HandoffRecord | None:
    if selector == "reason":
        return bridge.journal.newest(tenant, decode_reason(request.reason))
    if selector == "last":
        require(request.last, "last")
        return bridge.journal.newest(tenant)
    record = bridge.journal.find(request.handoff_id)
    return record if record is not None and record.tenant == tenant else None
