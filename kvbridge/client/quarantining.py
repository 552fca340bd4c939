"""Imposing, lifting and listing quarantines."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import (
    ArgumentTypeError,
    BridgeUnreachableError,
    ChangeRefusedError,
    arguments_checked,
)
from kvbridge.client.failures import CallFailedError
from kvbridge.client.plans import require_type
from kvbridge.client.rpc import Method
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import BridgeError
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Target, check_target
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire import decode_reference
from kvbridge.wire.quarantines import decode_quarantine, encode_target

QUARANTINE_SECONDS_DEFAULT = 10.0
"""How long a call may take unless its caller says otherwise."""
_REFUSALS = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED})
"""Statuses by which a bridge that works says no."""
_NOT_PERSISTED = "NOT_PERSISTED"
"""The `google.rpc.ErrorInfo` reason of a change that is in force and not in the bridge's file."""

_Answer = TypeVar("_Answer")


class QuarantineNotPersistedError(BridgeError, RuntimeError):
    """A change of the quarantines is in force, but the bridge could not write it to its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPayload:
    """One payload that a quarantine touches, as it was just before."""

    reference: PayloadReference
    """Key and generation."""
    because: str
    """How it comes to be touched."""
    leases: int
    """Live leases."""
    handoffs: int
    """Handoffs within the retention window."""
    alive: bool
    """Whether it occupied memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineOutcome:
    """What a quarantine touches."""

    quarantine_id: str
    """Its name, by which it can be lifted; empty for a dry run."""
    payloads: tuple[QuarantinedPayload, ...]
    """The first of the payloads that are or would be refused, those that derive from others after them."""
    payloads_total: int
    """How many there are."""
    clients_total: int
    """How many clients hold or held one of them within the retention window."""


class Quarantining:
    """Calls about quarantines, each with its own deadline.

    Every method raises `BridgeUnreachableError` if the bridge does not answer, and `ArgumentTypeError` or
    `ArgumentValueError` for an argument that cannot be. Those that change something raise `ChangeRefusedError` if the
    bridge refuses, and `QuarantineNotPersistedError` if the change is in force and a restart would undo it.
    """

    def __init__(self, connector: Connector, check_usable: Callable[[], None]) -> None:
        """Ask the bridge that `connector` finds, if `check_usable` does not raise."""
        self._connector = connector
        self._check_usable = check_usable

    def impose(
        self, target: Target, *, why: str = "", dry_run: bool = False, timeout: float = QUARANTINE_SECONDS_DEFAULT
    ) -> QuarantineOutcome:
        """Quarantine a model version, an aligner version or a payload, or only say what that would touch.

        What is quarantined already stays so under the same name, unless `why` is another reason: then the newest holds,
        under a new name, on all nodes.
        """
        if not isinstance(target, ModelPattern | AlignerPattern | PayloadReference):
            raise ArgumentTypeError("target", f"must be a pattern or a reference, got {type(target).__name__}")
        require_type("why", why, str)
        with arguments_checked():
            check_target(target)
        request = pb.QuarantineRequest(
            request_id=str(uuid.uuid4()), target=encode_target(target), why=why, dry_run=dry_run
        )
        answer = self._answered(lambda rpc: rpc.catalog.Quarantine, request, timeout)
        return QuarantineOutcome(
            quarantine_id=answer.quarantine_id,
            payloads=tuple(map(_decode_payload, answer.payloads)),
            payloads_total=answer.payloads_total,
            clients_total=answer.clients_total,
        )

    def lift(self, quarantine_id: str, *, timeout: float = QUARANTINE_SECONDS_DEFAULT) -> None:
        """End a quarantine for payloads that are published from now on."""
        require_type("quarantine_id", quarantine_id, str)
        request = pb.UnquarantineRequest(request_id=str(uuid.uuid4()), quarantine_id=quarantine_id)
        self._answered(lambda rpc: rpc.catalog.Unquarantine, request, timeout)

    def in_force(self, *, timeout: float = QUARANTINE_SECONDS_DEFAULT) -> list[Quarantine]:
        """Return the quarantines in force, newest first."""
        answer = self._answered(lambda rpc: rpc.catalog.ListQuarantines, pb.ListQuarantinesRequest(), timeout)
        return [decode_quarantine(record) for record in answer.quarantines]

    def _answered(self, method: Method[_Answer], request: Any, timeout: float) -> _Answer:
        self._check_usable()
        try:
            return self._connector.call(method, request, Deadline(timeout))[1]
        except CallFailedError as failure:
            failure.raise_if_misuse()
            if failure.about == _NOT_PERSISTED:
                raise QuarantineNotPersistedError(failure.detail) from failure
            if failure.code in _REFUSALS and failure.about:
                raise ChangeRefusedError(failure.detail) from failure
            raise BridgeUnreachableError(str(failure)) from failure


def _decode_payload(message: pb.QuarantinedPayload) -> QuarantinedPayload:
    return QuarantinedPayload(
        reference=decode_reference(message.reference),
        because=message.because,
        leases=message.leases,
        handoffs=message.handoffs,
        alive=message.alive,
    )
