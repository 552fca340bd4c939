"""What a bridge says about itself, for people and tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference
from kvbridge.core.tags import ModelTag
from kvbridge.v1 import inspect_service_pb2 as pb
from kvbridge.v1.access_file_pb2 import AccessRole
from kvbridge.wire import decode_descriptor, decode_duration, decode_model_tag, decode_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInspection:
    """Where the bytes of the caller's arena are."""

    arena_id: str
    """Which arena."""
    size_bytes: int
    """Size of the arena."""
    reserved_bytes: int
    """Lent to producers that are writing or being verified."""
    committed_bytes: int
    """In payloads that can be acquired."""
    draining_bytes: int
    """In payloads that wait for their last reference."""
    quarantined_bytes: int
    """Waiting for a client that may still be touching them."""
    free_bytes: int
    """Free."""
    largest_free_bytes: int
    """Largest free piece."""
    touched_bytes: int
    """Already backed by physical pages."""
    page_kind: str
    """What pages the arena has."""
    payloads: int
    """Payloads of all states."""
    leases: int
    """Live leases."""
    holds: int
    """Live holds."""
    reservations: int
    """Live reservations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourInspection:
    """Another node, as the one that was asked knows it."""

    node_id: str
    """Its name."""
    address: str
    """Where it is called."""
    epoch: int
    """Boot epoch; 0 if it never answered."""
    reachable: bool
    """Whether it answered last."""
    agrees: bool
    """Whether it knows of the same quarantines and kill switch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryInspection:
    """What a node knows of other nodes."""

    kind: str
    """Which directory it uses."""
    up: bool
    """Whether the directory answered last."""
    problem: str
    """Why it is not up."""
    age_seconds: float | None
    """How long ago it answered; absent if it never did."""
    neighbours: tuple[NeighbourInspection, ...]
    """Every other node that is known."""
    orders: int
    """Orders in force on all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInspection:
    """A node at one moment."""

    node_id: str
    """The node's name."""
    epoch: int
    """Boot epoch; changes with every start."""
    version: str
    """Release of kvbridge."""
    uptime_seconds: float
    """Time since the start."""
    draining: bool
    """Whether the node is shutting down."""
    descriptor_socket_path: str
    """Path of the descriptor socket on the node's host."""
    sessions: int
    """Live local clients, of the caller's tenant alone unless the caller is an admin."""
    principal: str
    """Who the caller is to the bridge."""
    tenant: str
    """The tenant that its calls are about."""
    roles: tuple[str, ...]
    """What it may do."""
    arena: ArenaInspection
    """The caller's arena."""
    limits: Mapping[str, float]
    """Limits in force, by their names in the configuration."""
    directory: DirectoryInspection | None = None
    """What it knows of other nodes; absent if it is on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadInspection:
    """One payload at one moment."""

    reference: PayloadReference
    """Key and generation."""
    state: str
    """Where it is in its life, such as `COMMITTED`."""
    model: ModelTag
    """Who computed it."""
    valid_length: int
    """Real tokens; 0 before commit."""
    slot_bytes: int
    """Bytes of its slot."""
    leases: int
    """Live leases."""
    holds: int
    """Live holds."""
    age_seconds: float
    """Time since it was reserved."""
    ends_in_seconds: float | None
    """Time until it ends if nothing happens; absent while it is referenced without limit."""
    descriptor: PayloadDescriptor | None = None
    """All that is known of it; only where it was asked for by itself, and after commit."""


def decode_node(message: pb.GetNodeResponse) -> NodeInspection:
    """Return the node in `message`."""
    arena = {field.name: getattr(message.arena, field.name) for field in pb.ArenaUsage.DESCRIPTOR.fields}
    known = ArenaInspection.__dataclass_fields__
    return NodeInspection(
        node_id=message.node_id,
        epoch=message.epoch,
        version=message.version,
        uptime_seconds=decode_duration(message.uptime, "uptime"),
        draining=message.draining,
        descriptor_socket_path=message.descriptor_socket_path,
        sessions=message.sessions,
        principal=message.caller.principal,
        tenant=message.caller.tenant,
        roles=tuple(AccessRole.Name(role).removeprefix("ACCESS_ROLE_").lower() for role in message.caller.roles),
        arena=ArenaInspection(**{name: value for name, value in arena.items() if name in known}),
        limits=MappingProxyType(dict(message.limits)),
        directory=_decode_directory(message.directory) if message.HasField("directory") else None,
    )


def _decode_directory(message: pb.DirectoryStatus) -> DirectoryInspection:
    return DirectoryInspection(
        kind=message.kind,
        up=message.up,
        problem=message.problem,
        age_seconds=decode_duration(message.age, "age") if message.HasField("age") else None,
        neighbours=tuple(
            NeighbourInspection(
                node_id=one.node_id,
                address=one.address,
                epoch=one.epoch,
                reachable=one.reachable,
                agrees=one.agrees,
            )
            for one in message.neighbours
        ),
        orders=message.orders,
    )


def decode_payload(message: pb.PayloadSummary, *, details: pb.GetPayloadResponse | None = None) -> PayloadInspection:
    """Return the payload in `message`, with its descriptor if there are `details`."""
    described = details is not None and details.HasField("descriptor")
    return PayloadInspection(
        reference=decode_reference(message.reference),
        state=_state(message.state),
        model=decode_model_tag(message.model),
        valid_length=message.valid_length,
        slot_bytes=message.slot_bytes,
        leases=message.leases,
        holds=message.holds,
        age_seconds=decode_duration(message.age, "age"),
        ends_in_seconds=(
            decode_duration(message.time_to_live, "time_to_live") if message.HasField("time_to_live") else None
        ),
        descriptor=decode_descriptor(details.descriptor) if details is not None and described else None,
    )


def _state(number: pb.PayloadState.ValueType) -> str:
    """Return a state's name; of one that a newer bridge knows, its number."""
    known = pb.PayloadState.DESCRIPTOR.values_by_number.get(number)
    return str(number) if known is None else known.name.removeprefix("PAYLOAD_STATE_")
