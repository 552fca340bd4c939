"""Prefetches, out of their messages, and what becomes of them, into one."""

from __future__ import annotations

from kvbridge.core.errors import LimitExceededError
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.node.prefetching import Prefetched
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_duration, decode_reference, encode_reason
from kvbridge.wire.payloads import require

PAYLOADS_PER_PREFETCH_MAX = 256
"""Most payloads in one call."""


async def take_prefetch(bridge: Bridge, client: Client, request: pb.PrefetchRequest) -> pb.PrefetchResponse:
    """Begin with what `client` asks for, and say what becomes of each payload.

    Raises:
        InvalidFieldError: a field is missing or out of range.
        LimitExceededError: there are too many payloads in one call.
    """
    require(bool(request.payloads), "payloads")
    if len(request.payloads) > PAYLOADS_PER_PREFETCH_MAX:
        raise LimitExceededError("payloads_per_prefetch_max", PAYLOADS_PER_PREFETCH_MAX)
    within = decode_duration(request.within, "within") if request.HasField("within") else None
    references = [decode_reference(reference) for reference in request.payloads]
    answers = await bridge.prefetch(client, references, within_seconds=within)
    return pb.PrefetchResponse(payloads=map(_encode, answers))


def _encode(answer: Prefetched) -> pb.Prefetched:
    state = pb.PrefetchState.Value(f"PREFETCH_STATE_{answer.state}")
    if answer.reason is None:
        return pb.Prefetched(state=state)
    return pb.Prefetched(state=state, reason=encode_reason(answer.reason), detail=answer.detail)
