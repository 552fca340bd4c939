"""`InspectService`: shows what a node holds; changes nothing."""

from __future__ import annotations

import base64
import binascii
from typing import Any, TypeAlias

from grpc import aio

from kvbridge.core.access import Role
from kvbridge.core.errors import InvalidFieldError, UnknownReferenceError
from kvbridge.core.ledger import Payload, PayloadState
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.server.calls import caller
from kvbridge.server.directory import encode_status
from kvbridge.server.explain import explain
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.v1.access_file_pb2 import AccessRole
from kvbridge.v1.inspect_service_pb2_grpc import InspectServiceServicer
from kvbridge.version import VERSION
from kvbridge.wire import decode_reference, encode_descriptor, encode_duration, encode_model_tag, encode_reference
from kvbridge.wire.payloads import require

PAGE_SIZE_DEFAULT = 100
"""Payloads in a page unless the caller asks for another number."""
PAGE_SIZE_MAX = 1000
"""Most payloads in a page."""
_CURSOR_BYTES = 8

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class InspectServicer(InspectServiceServicer):
    """Shows what a node holds."""

    def __init__(self, bridge: Bridge) -> None:
        """Show `bridge`."""
        self._bridge = bridge

    async def GetNode(self, _: pb.GetNodeRequest, context: _Context) -> pb.GetNodeResponse:  # noqa: N802
        """Describe the node, its limits and its memory."""
        client = caller(self._bridge.sessions, context)
        bridge = self._bridge
        return pb.GetNodeResponse(
            node_id=bridge.config.node_id,
            epoch=bridge.epoch,
            version=VERSION,
            uptime=encode_duration(bridge.uptime_seconds),
            draining=bridge.draining,
            descriptor_socket_path=bridge.config.descriptor_socket,
            arena=self._arena(client),
            limits=bridge.config.limits(),
            sessions=self._sessions(client),
            directory=encode_status(bridge.cluster),
            caller=_encode_caller(client),
            access=self._access() if Role.ADMIN in client.principal.roles else None,
        )

    async def ListPayloads(self, request: pb.ListPayloadsRequest, context: _Context) -> pb.ListPayloadsResponse:  # noqa: N802
        """List payloads, newest first."""
        client = caller(self._bridge.sessions, context)
        if request.page_size > PAGE_SIZE_MAX:
            raise InvalidFieldError("page_size", f"must be at most {PAGE_SIZE_MAX}, got {request.page_size}")
        page = self._bridge.stock.payloads(
            client,
            key_prefix=request.key_prefix,
            page_size=request.page_size or PAGE_SIZE_DEFAULT,
            cursor=_decode_cursor(request.page_token),
        )
        return pb.ListPayloadsResponse(
            payloads=[self._summary(payload) for payload in page.payloads],
            next_page_token=_encode_cursor(page.next_cursor),
        )

    async def GetPayload(self, request: pb.GetPayloadRequest, context: _Context) -> pb.GetPayloadResponse:  # noqa: N802
        """Describe one payload."""
        client = caller(self._bridge.sessions, context)
        require(request.HasField("reference"), "reference")
        reference = decode_reference(request.reference)
        payload = self._bridge.stock.payload(client, reference.key, reference.generation)
        if payload is None:
            raise UnknownReferenceError("reference", "no payload occupies memory under this key and generation")
        return pb.GetPayloadResponse(
            summary=self._summary(payload),
            descriptor=None if payload.descriptor is None else encode_descriptor(payload.descriptor, with_ids=True),
        )

    async def ExplainHandoff(self, request: pb.ExplainHandoffRequest, context: _Context) -> pb.ExplainHandoffResponse:  # noqa: N802
        """Tell every check of one past handoff."""
        client = caller(self._bridge.sessions, context)
        return explain(self._bridge, client.tenant, request)

    def _sessions(self, client: Client) -> int:
        """Return how many sessions concern the caller: how many others there are is no tenant's business."""
        sessions = self._bridge.sessions
        return len(sessions) if Role.ADMIN in client.principal.roles else sessions.of_tenant(client.tenant)

    def _access(self) -> pb.AccessStatus:
        access = self._bridge.access
        return pb.AccessStatus(
            file=access.file, version=access.version, file_problem=access.file_problem, tenants=access.tenants
        )

    def _arena(self, client: Client) -> pb.ArenaUsage:
        usage, arena = self._bridge.stock.usage(client)
        return pb.ArenaUsage(
            arena_id=arena.arena_id,
            size_bytes=usage.arena_bytes,
            reserved_bytes=usage.reserved_bytes,
            committed_bytes=usage.committed_bytes,
            draining_bytes=usage.draining_bytes,
            quarantined_bytes=usage.quarantined_bytes,
            free_bytes=usage.free_bytes,
            largest_free_bytes=usage.largest_free_bytes,
            touched_bytes=arena.touched_bytes,
            page_kind=arena.page_kind.value,
            payloads=usage.payloads,
            leases=usage.leases,
            holds=usage.holds,
            reservations=usage.reservations,
        )

    def _summary(self, payload: Payload) -> pb.PayloadSummary:
        ends_in = None if payload.ends_at is None else max(-self._bridge.age_seconds(payload.ends_at), 0.0)
        return pb.PayloadSummary(
            reference=encode_reference(payload.reference),
            state=_encode_state(payload.state),
            model=encode_model_tag(payload.spec.model),
            valid_length=0 if payload.descriptor is None else payload.descriptor.valid_length,
            slot_bytes=payload.slot.length_bytes,
            leases=payload.leases,
            holds=payload.holds,
            age=encode_duration(max(self._bridge.age_seconds(payload.reserved_at), 0.0)),
            time_to_live=None if ends_in is None else encode_duration(ends_in),
        )


def _encode_caller(client: Client) -> pb.CallerIdentity:
    roles = sorted(AccessRole.Value(f"ACCESS_ROLE_{role.name}") for role in client.principal.roles)
    return pb.CallerIdentity(principal=client.principal.name, tenant=client.tenant, roles=roles)


def _encode_state(state: PayloadState) -> pb.PayloadState.ValueType:
    return pb.PayloadState.Value(f"PAYLOAD_STATE_{state.name}")


def _encode_cursor(cursor: int | None) -> str:
    return "" if cursor is None else base64.urlsafe_b64encode(cursor.to_bytes(_CURSOR_BYTES, "big")).decode()


def _decode_cursor(token: str) -> int | None:
    if not token:
        return None
    try:
        packed = base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidFieldError("page_token", "is not a token that this service gave") from error
    if len(packed) != _CURSOR_BYTES:
        raise InvalidFieldError("page_token", "is not a token that this service gave")
    return int.from_bytes(packed, "big")
