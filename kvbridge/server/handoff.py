"""`HandoffService`: messages in, the bridge's decisions out."""

from __future__ import annotations

import time
from typing import Any, TypeAlias

from grpc import aio

from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.core.handoff_reference import is_node_id
from kvbridge.core.ledger import Grant
from kvbridge.link.port import ReplicaNotice
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.server.answers import Answers
from kvbridge.server.calls import caller, require_time, time_remaining
from kvbridge.server.outcomes import encode_outcome
from kvbridge.server.prefetches import take_prefetch
from kvbridge.server.reports import take_report
from kvbridge.server.terms import decode_acquisition, encode_layout
from kvbridge.server.watch import WatchMethods
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceServicer
from kvbridge.wire import (
    decode_duration,
    decode_seal,
    decode_spec,
    encode_aligner_tag,
    encode_descriptor,
    encode_duration,
    encode_fallback,
    encode_reason,
    encode_reference,
    encode_tokens,
)
from kvbridge.wire.payloads import require

TOKENS_PER_CALL_MAX = 10_000
"""Most references in one Renew or Release."""

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class HandoffServicer(WatchMethods, HandoffServiceServicer):
    """Publishes, acquires and releases payloads; `kvbridge.server.bulk` has the methods that carry bytes."""

    def __init__(self, bridge: Bridge, answers: Answers) -> None:
        """Serve `bridge`; `answers` are shared with the bulk methods."""
        self._bridge = bridge
        self._answers = answers

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:  # noqa: N802
        """Lend a slot to write a payload into."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.ReserveResponse:
            require_time(context)
            require(request.HasField("spec"), "spec")
            grant = self._bridge.reserve(client, decode_spec(request.spec))
            return pb.ReserveResponse(
                reservation_token=grant.token,
                reference=encode_reference(grant.reference),
                location=self._location(client, grant),
                time_to_live=encode_duration(grant.ttl_seconds),
            )

        return await self._answers.once(client, request.request_id, request, work)

    async def Commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitResponse:  # noqa: N802
        """Seal a reserved payload, check it and make it available."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.CommitResponse:
            require(request.HasField("seal"), "seal")
            outcome = await self._bridge.commit(client, request.reservation_token, decode_seal(request.seal))
            return encode_outcome(outcome, node_id=self._bridge.config.node_id)

        return await self._answers.once(client, request.request_id, request, work)

    async def Abort(self, request: pb.AbortRequest, context: _Context) -> pb.AbortResponse:  # noqa: N802
        """Give a reservation back."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.AbortResponse:
            self._bridge.abort(client, request.reservation_token)
            return pb.AbortResponse()

        return await self._answers.once(client, request.request_id, request, work)

    async def Acquire(self, request: pb.AcquireRequest, context: _Context) -> pb.AcquireResponse:  # noqa: N802
        """Answer with a lease on verified tensors, or with a text-fallback directive and its reason."""
        arrived_at, deadline_seconds = time.perf_counter(), time_remaining(context)
        client = caller(self._bridge.sessions, context)
        is_first = False

        async def work() -> pb.AcquireResponse:
            nonlocal is_first
            is_first = True
            require_time(context)
            answer = await self._bridge.acquire(decode_acquisition(request, client, arrived_at, deadline_seconds))
            with_ids = request.tokens.any
            return pb.AcquireResponse(
                handoff_id=answer.handoff_id,
                parts=[self._encode_part(client, part, with_ids=with_ids) for part in answer.parts],
                layout=None if answer.layout is None else encode_layout(answer.layout),
            )

        # Bytes that come from another node, or are checked, are not waited for on behalf of nobody.
        answer = await self._answers.once(client, request.request_id, request, work, stops_unheard=True)
        return answer if is_first else self._as_it_stands(client, answer)

    async def Prefetch(self, request: pb.PrefetchRequest, context: _Context) -> pb.PrefetchResponse:  # noqa: N802
        """Begin to bring payloads of other nodes over."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.PrefetchResponse:
            require_time(context)
            return await take_prefetch(self._bridge, client, request)

        return await self._answers.once(client, request.request_id, request, work)

    async def Renew(self, request: pb.RenewRequest, context: _Context) -> pb.RenewResponse:  # noqa: N802
        """Prolong reservations, holds and leases."""
        client = caller(self._bridge.sessions, context)
        _check_count(len(request.tokens))
        ttls = self._bridge.renew(client, request.tokens)
        return pb.RenewResponse(
            references=[
                pb.RenewedReference(token=token, time_to_live=None if ttl is None else encode_duration(ttl))
                for token, ttl in zip(request.tokens, ttls, strict=True)
            ]
        )

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:  # noqa: N802
        """Return holds and leases."""
        client = caller(self._bridge.sessions, context)
        _check_count(len(request.tokens))

        async def work() -> pb.ReleaseResponse:
            if request.HasField("replica"):
                self._bridge.holders.told(client, request.tokens, _decode_notice(request.replica))
            return pb.ReleaseResponse(expired_tokens=sorted(self._bridge.release(client, request.tokens)))

        return await self._answers.once(client, request.request_id, request, work)

    async def Report(self, request: pb.ReportRequest, context: _Context) -> pb.ReportResponse:  # noqa: N802
        """Take what a consumer says of a handoff."""
        client = caller(self._bridge.sessions, context)

        async def work() -> pb.ReportResponse:
            return take_report(self._bridge.reports, client, request)

        return await self._answers.once(client, request.request_id, request, work)

    def _as_it_stands(self, client: Client, answer: pb.AcquireResponse) -> pb.AcquireResponse:
        """Return an answer that was given before, with what is left of its leases: nothing of those that have ended."""
        again = pb.AcquireResponse()
        again.CopyFrom(answer)
        for part in again.parts:
            if part.HasField("kv"):
                left = self._bridge.lease_seconds_left(client, part.kv.lease_token)
                part.kv.time_to_live.CopyFrom(encode_duration(left or 0.0))
        return again

    def _location(self, client: Client, grant: Grant) -> types_pb2.SlotLocation:
        return types_pb2.SlotLocation(
            arena_id=self._bridge.stock.arena(client.tenant).arena_id,
            offset_bytes=grant.slot.offset_bytes,
            length_bytes=grant.slot.length_bytes,
            epoch=self._bridge.epoch,
            slot_generation=grant.slot_generation,
        )

    def _encode_part(self, client: Client, answer: Leased | Fallback, *, with_ids: bool) -> pb.Part:
        if isinstance(answer, Fallback):
            return pb.Part(text=_encode_fallback_directive(answer))
        apply = answer.aligner_to_apply
        return pb.Part(
            kv=pb.KvLease(
                lease_token=answer.grant.token,
                location=self._location(client, answer.grant),
                descriptor=encode_descriptor(answer.descriptor, with_ids=with_ids),
                time_to_live=encode_duration(answer.grant.ttl_seconds),
                aligner_to_apply=None if apply is None else encode_aligner_tag(apply),
            )
        )


def _encode_fallback_directive(answer: Fallback) -> pb.TextFallback:
    retry = answer.retry_after_seconds
    return pb.TextFallback(
        reason=encode_reason(answer.finding.reason),
        detail=answer.finding.problem or "",
        fallback=encode_fallback(answer.fallback),
        tokens=None if answer.tokens is None else encode_tokens(answer.tokens),
        retry_after=None if retry is None else encode_duration(retry),
    )


def _decode_notice(message: pb.ReplicaNotice) -> ReplicaNotice:
    if not is_node_id(message.node_id):
        raise InvalidFieldError("replica.node_id", "is no name of a node")
    return ReplicaNotice(node_id=message.node_id, linger_seconds=decode_duration(message.linger, "replica.linger"))


def _check_count(count: int) -> None:
    if not count:
        raise InvalidFieldError("tokens", "must name at least one reference")
    if count > TOKENS_PER_CALL_MAX:
        raise LimitExceededError("tokens_per_call_max", TOKENS_PER_CALL_MAX)
