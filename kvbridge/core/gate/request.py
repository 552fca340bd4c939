"""What the gate looks at: the consumer's terms, and what the node knows of the payload."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.descriptor import FORMAT_VERSION, PayloadDescriptor, PayloadReference
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.core.tokens import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireTerms:
    """What a consumer asks for and accepts."""

    reference: PayloadReference
    """Key and generation; generation 0 stands for the newest."""
    model: ModelTag
    """The consumer's own model."""
    geometry: CacheGeometry | None = None
    """The geometry that it can read; None if it reads any geometry of its model version."""
    tokens: TokenSequence | None
    """The cached tokens must be a prefix of these; None if the consumer said that it takes any."""
    first_position: int = 0
    """The position at which it will place the first token."""
    valid_length_min: int = 1
    """Fewest valid tokens that it can use."""
    format_version_max: int = FORMAT_VERSION
    """Newest format version that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the node knows of the payload that was asked for."""

    node_draining: bool = False
    """Whether the node is shutting down."""
    known: bool
    """Whether the node knows, or remembers, anything under this key."""
    ended: Reason | None = None
    """Why the payload's tensors are gone, if they are."""
    ended_detail: str = ""
    """The finding that ended it."""
    descriptor: PayloadDescriptor | None = None
    """Present exactly if the payload is committed and alive."""
