"""Asking a bridge to bring caches of other nodes over before a consumer acquires them.

It is a hint: whatever goes wrong, whoever acquires afterwards is answered as if nothing had been prefetched. So nothing
but the caller's own mistakes raises.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbridge.client.asking import plan_references
from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import BridgeClosedError, BridgeForkedError, arguments_checked
from kvbridge.client.failures import CallFailedError
from kvbridge.core.bounds import require_number
from kvbridge.core.cost.curve import SECONDS_MAX
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.prefetch import PrefetchState
from kvbridge.core.reasons import Reason
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_reason, encode_duration, encode_reference

PREFETCH_SECONDS_DEFAULT = 1.0
"""How long the answer may take unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """What a bridge does about one cache."""

    key: str
    """What was asked for."""
    state: PrefetchState
    """What is done."""
    reason: Reason | None = None
    """Why nothing is done; None otherwise."""
    detail: str = ""
    """The same for people."""

    def __bool__(self) -> bool:
        """Tell whether the cache is here, or on its way."""
        return self.state is not PrefetchState.REFUSED


def prefetch(
    connector: Connector,
    keys: Sequence[str | PayloadReference],
    *,
    within: float | None,
    timeout: float,
    check_usable: Callable[[], None],
) -> list[Prefetch]:
    """Ask for `keys` to be brought over; arguments and errors as for `Bridge.prefetch`."""
    references = plan_references(keys)
    with arguments_checked():
        if within is not None:
            require_number("within", within, least=0, most=SECONDS_MAX)
    request = pb.PrefetchRequest(
        request_id=str(uuid.uuid4()),
        payloads=map(encode_reference, references),
        within=None if within is None else encode_duration(within),
    )
    deadline = Deadline(timeout)
    try:
        check_usable()
        _, answer = connector.call(lambda rpc: rpc.handoff.Prefetch, request, deadline)
    except (BridgeForkedError, BridgeClosedError) as error:
        return [_refused(reference, Reason.BRIDGE_UNREACHABLE, str(error)) for reference in references]
    except CallFailedError as failure:
        failure.raise_if_misuse()
        return [_refused(reference, failure.reason, str(failure)) for reference in references]
    said = [*answer.payloads, *(pb.Prefetched() for _ in references)]
    return [_decode(*pair) for pair in zip(references, said, strict=False)]


def _decode(reference: PayloadReference, answer: pb.Prefetched) -> Prefetch:
    if answer.state == pb.PREFETCH_STATE_STARTED:
        return Prefetch(key=reference.key, state=PrefetchState.STARTED)
    if answer.state == pb.PREFETCH_STATE_HERE:
        return Prefetch(key=reference.key, state=PrefetchState.HERE)
    try:
        reason = decode_reason(answer.reason)
    except InvalidFieldError:  # Of a newer bridge, or of one that says nothing that can be understood.
        reason = Reason.BRIDGE_UNREACHABLE
    return _refused(reference, reason, answer.detail)


def _refused(reference: PayloadReference, reason: Reason, detail: str) -> Prefetch:
    return Prefetch(key=reference.key, state=PrefetchState.REFUSED, reason=reason, detail=detail)
