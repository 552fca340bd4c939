"""Reports of consumers, out of their messages."""

from __future__ import annotations

from typing import TypeAlias

from kvbridge.core.cost.curve import SECONDS_MAX, SECONDS_MIN, SIZE_MAX
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.journal import HandoffQuality, HandoffUse, Outcome
from kvbridge.node.identity import Client
from kvbridge.node.reports import Measured, Report, Reports
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_duration, decode_model_tag
from kvbridge.wire.enums import EnumCodec
from kvbridge.wire.payloads import require

DETAIL_CHARACTERS_MAX = 1024
"""Longest detail of a report."""

_USES = EnumCodec(HandoffUse, dict(pb.HandoffUse.items()), "HANDOFF_USE_")
_QUALITIES = EnumCodec(HandoffQuality, dict(pb.HandoffQuality.items()), "HANDOFF_QUALITY_")
_Timed: TypeAlias = pb.MeasuredPrefill | pb.MeasuredTransfer


def take_report(reports: Reports, client: Client, request: pb.ReportRequest) -> pb.ReportResponse:
    """Hand over what `client` says of a handoff, or of a model that it measured.

    Raises:
        InvalidFieldError: a field is missing or out of range.
        UnknownReferenceError: no handoff of this client has this name, or it is forgotten.
    """
    prefill = _measured("prefill", request.prefill, request.prefill.tokens) if request.HasField("prefill") else None
    scatter = _measured("scatter", request.scatter, request.scatter.bytes) if request.HasField("scatter") else None
    if request.handoff_id:
        outcome = _outcome(request)
        reports.take(client, Report(handoff_id=request.handoff_id, outcome=outcome, prefill=prefill, scatter=scatter))
    else:
        require(request.HasField("model"), "model")
        require(prefill is not None or scatter is not None, "prefill")
        reports.measure(client.tenant, decode_model_tag(request.model), prefill=prefill, scatter=scatter)
    return pb.ReportResponse()


def _outcome(request: pb.ReportRequest) -> Outcome:
    if len(request.detail) > DETAIL_CHARACTERS_MAX:
        raise InvalidFieldError("detail", f"must be at most {DETAIL_CHARACTERS_MAX} characters")
    unknown = request.quality == pb.HANDOFF_QUALITY_UNSPECIFIED
    return Outcome(
        use=_USES.decode(request.use, "use"),
        quality=None if unknown else _QUALITIES.decode(request.quality, "quality"),
        detail=request.detail,
        tokens_saved=request.tokens_saved,
    )


def _measured(field: str, message: _Timed, size: int) -> Measured:
    if not 1 <= size <= SIZE_MAX:
        raise InvalidFieldError(field, f"must name a size in [1, {SIZE_MAX}], got {size}")
    seconds = decode_duration(message.duration, f"{field}.duration")
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        raise InvalidFieldError(f"{field}.duration", f"must lie in [{SECONDS_MIN:g}, {SECONDS_MAX:g}] s")
    return Measured(size=size, seconds=seconds)
