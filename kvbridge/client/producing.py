"""The two ways of a payload into the bridge: written in place, or uploaded by value."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvbridge.client.arenas import ArenaView
from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError
from kvbridge.client.layouts import lazy_layout
from kvbridge.client.plans import PublishPlan
from kvbridge.client.ports import Ports
from kvbridge.client.private_memory import private_slot
from kvbridge.client.references import Ended, Reference
from kvbridge.client.sessions import Session
from kvbridge.client.slots import SlotWriter
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.reasons import Reason
from kvbridge.core.references import ReferenceKind
from kvbridge.memory.errors import MappingUnavailableError
from kvbridge.memory.mapping import SlotMapping
from kvbridge.memory.region import CharArray
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire import Seal, decode_duration, decode_reason, decode_reference, encode_seal, encode_spec
from kvbridge.wire.chunks import UPLOAD_CHUNK_TAG, cut, encode_chunk

CHUNK_BYTES = 1 << 20
"""Canonical bytes in one message of an upload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a publication."""

    reference: PayloadReference | None
    """Key and generation; absent where no slot was ever reserved."""
    reason: Reason | None
    """Why it was not published; absent if it was."""
    detail: str
    """The same, for people; empty if it was published."""
    hold: Reference | None = None
    """The producer's own reference, if one was asked for."""
    handoff_reference: str | None = None
    """The payload's name on every node; absent if it was not published."""


class Production(Protocol):
    """A payload under way."""

    writer: SlotWriter
    """Where it is written."""
    reference: PayloadReference | None
    """Key and generation, as soon as they are known."""

    def writing(self) -> AbstractContextManager[Reason | None]:
        """Write inside the context if it yields None, else it says why what is written would not be this payload's.

        The bridge object does not give the memory back before the context ends.
        """

    def commit(self) -> Outcome:
        """Seal it; raises `CallFailedError`."""

    def abort(self) -> None:
        """Give it up; never raises and never waits."""


def produce(ports: Ports, plan: PublishPlan) -> Production:
    """Begin to produce a payload.

    Raises:
        CallFailedError: no slot can be had.
    """
    if ports.connector.target.by_value:
        return UploadedProduction(ports, plan)
    return SharedProduction(ports, plan)


def _reservation(session: Session, answer: pb.ReserveResponse) -> tuple[Ended, ...]:
    return (Ended(session=session, kind=ReferenceKind.RESERVATION, token=answer.reservation_token),)


class SharedProduction:
    """A payload that is written into a slot of the arena."""

    def __init__(self, ports: Ports, plan: PublishPlan) -> None:
        """Reserve a slot and map it.

        Raises:
            CallFailedError: no slot can be had.
        """
        deadline = Deadline(plan.reserve_seconds)
        request = pb.ReserveRequest(request_id=str(uuid.uuid4()), spec=encode_spec(plan.spec))
        asked_at = time.monotonic()
        session, answer = ports.ask(lambda rpc: rpc.handoff.Reserve, request, deadline, granted=_reservation)
        self._ports = ports
        self._plan = plan
        self._reservation = ports.reference(
            session,
            ReferenceKind.RESERVATION,
            token=answer.reservation_token,
            ttl_seconds=decode_duration(answer.time_to_live, "time_to_live"),
            asked_at=asked_at,
        )
        try:
            self.reference: PayloadReference | None = decode_reference(answer.reference)
            self.writer = self._writer(answer.location, deadline)
        except CallFailedError:
            self._reservation.end()
            raise
        except InvalidFieldError as error:
            self._reservation.end()
            raise _senseless(error) from error

    @contextmanager
    def writing(self) -> Iterator[Reason | None]:
        """Write inside the context if it yields None; closing the bridge object waits for its end."""
        with self._ports.writers.writing() as admitted:
            yield self.loss if admitted else Reason.BRIDGE_UNREACHABLE

    @property
    def loss(self) -> Reason | None:
        """Return why the slot may be somebody else's by now; None while it certainly is this payload's."""
        if self._reservation.live:
            return None
        return Reason.PAYLOAD_EXPIRED if self._reservation.session.alive else Reason.BRIDGE_UNREACHABLE

    def commit(self) -> Outcome:
        """Seal what was written.

        Raises:
            CallFailedError: the bridge did not answer in time, or refused.
        """
        session, plan = self._reservation.session, self._plan
        self._views.end()
        request = pb.CommitRequest(
            request_id=str(uuid.uuid4()),
            reservation_token=self._reservation.token,
            seal=_seal_message(plan, self.writer),
        )
        asked_at = time.monotonic()
        answer = session.call(lambda rpc: rpc.handoff.Commit, request, Deadline(plan.commit_seconds))
        self._reservation.settle()
        return _outcome(self._ports, session, answer, asked_at=asked_at)

    def abort(self) -> None:
        """Return the reservation."""
        with suppress(CallFailedError):
            self._views.end()
            self._reservation.end()

    def _writer(self, location: types_pb2.SlotLocation, deadline: Deadline) -> SlotWriter:
        spec = self._plan.spec
        slot_bytes = lazy_layout(spec.geometry, spec.capacity_tokens).slot_bytes
        arena = self._reservation.session.arena(location.arena_id, deadline, writable=True)
        if location.length_bytes < slot_bytes or not arena.has(location.offset_bytes, location.length_bytes):
            raise InvalidFieldError("location", f"{location.length_bytes} bytes do not hold a slot of {slot_bytes}")
        self._views = _Views(arena, location, self._reservation)
        return SlotWriter(
            arena.slot(location.offset_bytes, location.length_bytes, self._reservation),
            spec.geometry,
            capacity_tokens=spec.capacity_tokens,
            valid_length=self._plan.valid_length,
            digested=self._plan.verification is not Verification.NONE,
            for_views=self._views.buffer,
        )


class _Views:
    """What tensors that were given out lie in: the slot, mapped apart when the first of them is asked for.

    It does not know the production that it belongs to, so that one that is forgotten is gone at once.
    """

    def __init__(self, arena: ArenaView, location: types_pb2.SlotLocation, reservation: Reference) -> None:
        """Map nothing yet."""
        self._arena = arena
        self._location = location
        self._reservation = reservation
        self._mapping: SlotMapping | None = None
        self._lock = threading.Lock()

    def buffer(self) -> CharArray:
        """Return the slot's bytes; whoever keeps them keeps the reservation.

        Raises:
            CallFailedError: the kernel refuses.
        """
        with self._lock:
            if self._mapping is None:
                self._mapping = self._arena.apart(self._location.offset_bytes, self._location.length_bytes)
            return self._mapping.buffer(self._reservation)

    def end(self) -> None:
        """Let what is written to those tensors reach nobody any more.

        Raises:
            CallFailedError: the kernel refuses; then the slot must not be given back before the last tensor is gone.
        """
        if self._mapping is None:
            return
        try:
            self._mapping.part()
        except MappingUnavailableError as error:
            raise CallFailedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error


class UploadedProduction:
    """A payload that is written into private memory and sent at the commit."""

    def __init__(self, ports: Ports, plan: PublishPlan) -> None:
        """Make room for the payload without asking the bridge.

        Raises:
            CallFailedError: this process has no room.
        """
        self._ports = ports
        self._plan = plan
        self.reference: PayloadReference | None = None
        layout = lazy_layout(plan.spec.geometry, plan.valid_length)
        try:
            buffer = private_slot(layout.slot_bytes)
        except MemoryError as error:
            raise CallFailedError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from error
        self.writer = SlotWriter(
            buffer,
            plan.spec.geometry,
            capacity_tokens=plan.valid_length,
            valid_length=plan.valid_length,
            digested=plan.verification is not Verification.NONE,
        )

    def writing(self) -> AbstractContextManager[None]:
        """Always write: the memory is this process's own."""
        return nullcontext()

    def commit(self) -> Outcome:
        """Send everything, a second time over a new channel if the first found no connection.

        Raises:
            CallFailedError: the bridge did not take it in time, or refused.
        """
        header = pb.UploadRequest(
            header=pb.UploadHeader(
                request_id=str(uuid.uuid4()), spec=encode_spec(self._plan.spec), valid_length=self._plan.valid_length
            )
        ).SerializeToString()
        finish = pb.UploadRequest(finish=_seal_message(self._plan, self.writer)).SerializeToString()
        deadline = Deadline(self._plan.commit_seconds)
        asked_at = time.monotonic()
        session, answer = self._ports.connector.call(
            lambda rpc: lambda _, **options: rpc.upload(self._messages(header, finish), **options), None, deadline
        )
        return _outcome(self._ports, session, answer.commit, asked_at=asked_at)

    def abort(self) -> None:
        """Do nothing: the bridge knows nothing of it, and the memory goes with its last user."""

    def _messages(self, header: bytes, finish: bytes) -> Iterator[bytes]:
        yield header
        yield from (encode_chunk(pieces, UPLOAD_CHUNK_TAG) for pieces in cut(self.writer.canonical(), CHUNK_BYTES))
        yield finish


def _seal_message(plan: PublishPlan, writer: SlotWriter) -> pb.PayloadSeal:
    return encode_seal(
        Seal(
            valid_length=plan.valid_length,
            layer_digests=writer.layer_digests(),
            verification=plan.verification,
            hold=plan.hold,
        )
    )


def _outcome(ports: Ports, session: Session, answer: pb.CommitResponse, *, asked_at: float) -> Outcome:
    """Return what the bridge answered to a commit.

    Raises:
        CallFailedError: the answer makes no sense.
    """
    try:
        if answer.WhichOneof("outcome") == "committed":
            return _published(ports, session, answer.committed, asked_at=asked_at)
        rejected = answer.rejected
        return Outcome(
            reference=decode_reference(rejected.reference),
            reason=decode_reason(rejected.reason),
            detail=rejected.detail,
        )
    except InvalidFieldError as error:
        raise _senseless(error) from error


def _published(ports: Ports, session: Session, committed: pb.CommittedPayload, *, asked_at: float) -> Outcome:
    hold = None
    if committed.hold_token:
        hold = ports.reference(
            session,
            ReferenceKind.HOLD,
            token=committed.hold_token,
            ttl_seconds=decode_duration(committed.hold_time_to_live, "hold_time_to_live"),
            asked_at=asked_at,
        )
    return Outcome(
        reference=decode_reference(committed.descriptor.reference),
        reason=None,
        detail="",
        hold=hold,
        handoff_reference=committed.handoff_reference or None,
    )


def _senseless(error: InvalidFieldError) -> CallFailedError:
    return CallFailedError(grpc.StatusCode.INTERNAL, f"the bridge's answer makes no sense: {error}")
