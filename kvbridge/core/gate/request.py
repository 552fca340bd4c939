"""What the gate looks at: the consumer's terms, what the node knows of the payload, and what holds around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge.core.catalog.entries import AlignerEntry
from kvbridge.core.catalog.policy import RoutePolicy
from kvbridge.core.descriptor import FORMAT_VERSION, PayloadDescriptor, PayloadReference
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.media import MediaItem
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireTerms:
    """What a consumer asks for and accepts, of one part of its plan."""

    reference: PayloadReference
    """Key and generation; generation 0 stands for the newest."""
    model: ModelTag
    """The consumer's own model."""
    geometry: CacheGeometry | None = None
    """The geometry that it can read; None if it reads any unsharded and unscaled geometry of its model version."""
    tokens: TokenSequence | None
    """The consumer's whole prompt; None if the consumer said that it takes any tokens."""
    token_offset: int | None = 0
    """Index in the prompt at which the part must start; None if the length of an earlier part is not known."""
    earlier_ids: tuple[bytes, ...] | None = ()
    """Packed ids of the earlier parts, for a consumer that takes any tokens; None if they are not known."""
    first_position: int = 0
    """The position at which it will place the first token of its prompt."""
    valid_length_min: int = 1
    """Fewest valid tokens that it can use."""
    format_version_max: int = FORMAT_VERSION
    """Newest format version that it reads."""
    media: tuple[MediaItem, ...] = ()
    """What is not text in the consumer's prompt, in order, by index in the prompt."""
    aligner: AlignerTag | None = None
    """The aligner that it expects to have been applied, or will apply itself; None for none."""
    edge: str = ""
    """The edge of the agents' graph that the handoff runs along."""
    depth: int = 0
    """How many handoffs the context has been through before this one."""
    affinity: str = ""
    """What a canary sticks to; empty for the key."""
    cached_segments_nearer: int = 0
    """Parts between this one and the consumer's new tokens that are handed over as caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the node knows of the payload that was asked for."""

    node_draining: bool = False
    """Whether the node is shutting down."""
    known: bool
    """Whether the node knows, or remembers, anything under this key."""
    not_asked: str = ""
    """Why no other node was asked for a key that may be one's, where that could not be done; else empty."""
    ended: Reason | None = None
    """Why the payload's tensors are gone or cannot be had, if so."""
    ended_detail: str = ""
    """The finding that ended it."""
    descriptor: PayloadDescriptor | None = None
    """Present exactly if the payload is committed and alive."""
    quarantine: str | None = None
    """What about it is quarantined, for people; None if nothing is."""
    probe_figures: Mapping[str, float] = field(default_factory=dict)
    """What the probe of its tokens measured at commit; empty if it was not probed, or that is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerStanding:
    """What the catalog says of the aligner that bridges the two models."""

    name_known: bool = False
    """Whether there is any version of an aligner of this name."""
    entry: AlignerEntry | None = None
    """Exactly this version, if it is there."""
    nearest: AlignerTag | None = None
    """If it is not: the one of this name that differs in the fewest fields, as far as one is known."""
    problem: str | None = None
    """Why it cannot be used as it stands, such as that nobody has validated it; None if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the handoff and the prefill that it replaces are estimated to cost, and what time there is."""

    problem: str | None = None
    """Why the handoff does not pay by these estimates; None if it does."""
    prefill_seconds: float | None = None
    """The prefill; None if nothing is measured."""
    handoff_seconds: float | None = None
    """The handoff; None if nothing is measured."""
    bytes_seconds: float = 0.0
    """What must pass before the bytes are there and checked; 0 if they are here and need no check."""
    deadline_seconds: float | None = None
    """What the caller's deadline leaves; None if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What holds around a handoff: catalog, route, breaker and costs at this moment."""

    kill_switch: str | None = None
    """Why every handoff is text; None if it is not."""
    route: str = "default"
    """Name of the route that applies."""
    policy: RoutePolicy = field(default_factory=RoutePolicy)
    """What it demands."""
    breaker: str | None = None
    """Why the route's breaker refuses; None if it does not."""
    canary_share: float = 0.0
    """Where the conversation falls, in [0, 1): a canary of N percent hands caches to those below N / 100."""
    source_family: str | None = None
    """Family of the model that computed the cache; None if the catalog does not say."""
    target_family: str | None = None
    """Family of the consumer's model; None if the catalog does not say."""
    target_geometry: CacheGeometry | None = None
    """What consumers of this model read according to the catalog, for those who do not say it themselves."""
    aligner: AlignerStanding = field(default_factory=AlignerStanding)
    """What is known of the aligner that is claimed; of no meaning if none is."""
    costs: Costs = field(default_factory=Costs)
    """What it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One part of one handoff, as the checks see it."""

    terms: AcquireTerms
    """What the consumer asks for."""
    candidate: Candidate
    """What the node has."""
    conditions: Conditions
    """What holds around both."""

    @property
    def descriptor(self) -> PayloadDescriptor:
        """Return the descriptor; only checks that need one are asked with one."""
        assert self.candidate.descriptor is not None, "terms are compared only once there is a descriptor"
        return self.candidate.descriptor

    @property
    def aligner(self) -> AlignerTag | None:
        """Return the aligner that is claimed to bridge the two models: applied already, or expected."""
        return self.descriptor.aligner or self.terms.aligner

    @property
    def geometry(self) -> CacheGeometry | None:
        """Return the geometry that the consumer reads, by its own word or by the catalog's; None if neither says."""
        if self.terms.geometry is not None:
            return self.terms.geometry
        # A cache that the consumer will align itself is still shaped as the model that computed it shapes it.
        unaligned = self.terms.aligner is not None and self.descriptor.aligner is None
        return None if unaligned else self.conditions.target_geometry
