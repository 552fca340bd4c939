"""What a node needs of another one, whatever moves the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvbridge.core.descriptor import FallbackText, PayloadDescriptor, PayloadReference
from kvbridge.core.errors import BridgeError
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferEncoding, TransferForm

HOLDERS_MAX = 16
"""Most nodes that an owner names for one payload."""


class OwnerUnreachableError(BridgeError):
    """The node that owns a payload did not answer, or is not known."""


class TransferFailedError(BridgeError):
    """The bytes did not arrive whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a way for bytes between two nodes can do."""

    name: str
    """Its name in records and metrics."""
    one_sided: bool
    """Whether bytes come without the owner's process doing anything for it."""
    abortable: bool
    """Whether nothing touches the memory any more once a pull that was cancelled has ended."""
    device_memory: bool
    """Whether bytes can come from and go to the memory of a GPU."""
    zero_copy: bool
    """Whether bytes go between an arena and the network without lying anywhere else in either process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A payload that its owner has leased to this node."""

    lease_token: str
    """Proves the lease."""
    ttl_seconds: float
    """How long it lasts if it is not renewed."""
    descriptor: PayloadDescriptor
    """What was sealed."""
    fallback: FallbackText
    """What consumers take instead."""
    epoch: int
    """The owner's boot epoch; another one means that everything it had is gone."""
    encodings: tuple[TransferEncoding, ...] = ()
    """In how few bits it can send the values; none from an owner that knows of no such thing."""
    holders: tuple[str, ...] = ()
    """Nodes that told the owner that they have a replica, which was true once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A payload that cannot be had from its owner."""

    reason: Reason
    """Why."""
    detail: str
    """The same for people."""
    fallback: FallbackText
    """What consumers take instead."""
    tokens: TokenSequence | None
    """The producer's tokens, if it gave them."""
    model: ModelTag | None
    """Who computed the cache, or was to; None if that is not known."""
    epoch: int
    """The owner's boot epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaNotice:
    """What a node tells the owner of a payload that it has brought over."""

    node_id: str
    """The node that has a replica now."""
    linger_seconds: float
    """How long it keeps it when nobody references it."""


class Sink(Protocol):
    """Where the bytes of a payload go: as they come, or straight into the memory that they belong to."""

    @property
    def remaining_bytes(self) -> int:
        """Return how many bytes are missing."""

    def write(self, chunk: memoryview) -> None:
        """Copy the next bytes to their places.

        Raises:
            BridgeError: there are too many, or the memory is not there any more.
        """

    def room(self) -> Sequence[memoryview]:
        """Return memory for some of the next bytes, in order, good until the next await; none at the end.

        It may be filled bit by bit.

        Raises:
            BridgeError: the memory is not there any more.
        """

    def advance(self, nbytes: int) -> None:
        """Note that so many more bytes were written into what `room` returned."""


@runtime_checkable
class Pace(Protocol):
    """What a sink has, besides, that does more with bytes than put them to their places."""

    @property
    def is_ready(self) -> bool:
        """Tell whether it takes more bytes at the moment."""

    async def ready(self) -> None:
        """Wait until it does."""


class _AnyPace:
    """The pace of a sink that takes bytes as they come."""

    @property
    def is_ready(self) -> bool:
        """Tell that it does."""
        return True

    async def ready(self) -> None:
        """Wait for nothing."""


def pace_of(sink: Sink) -> Pace:
    """Return the pace of a sink; to be asked for once, for to tell what a sink has takes a while."""
    return sink if isinstance(sink, Pace) else _AnyPace()


class Peer(Protocol):
    """Another node. Every call takes what time it may use, in seconds, and can be cancelled at any moment."""

    @property
    def capabilities(self) -> Capabilities:
        """Return what the way can do that the next bytes will try to take."""

    async def ping(self, *, seconds_max: float) -> int:
        """Return the node's boot epoch.

        Raises:
            OwnerUnreachableError: there was no answer in time, or another node answered.
        """

    async def open(
        self, tenant: str, reference: PayloadReference, *, seconds_max: float, owner_epoch: int = 0
    ) -> Opened | Closed:
        """Lease a payload of the node's own, or the replica that it has from a start `owner_epoch` of another node.

        Raises:
            OwnerUnreachableError: there was no answer in time.
        """

    async def pull(
        self, lease_token: str, sink: Sink, *, seconds_max: float, tenant: str = "", form: TransferForm = EXACT_FORM
    ) -> Capabilities:
        """Bring the canonical bytes of a leased payload over into `sink`, which nothing touches once this has ended.

        In another `form` than the exact one, which must be among its encodings, its frames come instead. Return which
        way they took. Without a `tenant`, here and below, the lease is one of this node's own.

        Raises:
            TransferFailedError: the stream broke off or took too long.
            BridgeError: the sink takes no more.
        """

    async def renew(self, lease_token: str, *, seconds_max: float, tenant: str = "") -> None:
        """Prolong a lease; what goes wrong is found out by the pull."""

    async def release(
        self, lease_token: str, *, seconds_max: float, tenant: str = "", replica: ReplicaNotice | None = None
    ) -> None:
        """Give a lease back, and tell of the replica that it left; what goes wrong is mended by its expiry."""

    async def close(self) -> None:
        """Hang up."""


class Peers(Protocol):
    """The other nodes."""

    def find(self, node_id: str) -> Peer | None:
        """Return the node of this name, or None if nobody knows where it is."""

    async def close(self) -> None:
        """Hang up on all of them."""


class NoPeers:
    """Knows nobody."""

    def find(self, node_id: str) -> Peer | None:
        """Return None."""
        del node_id
        return None

    async def close(self) -> None:
        """Do nothing."""
