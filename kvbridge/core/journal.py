"""What the journal keeps of every handoff: who asked, what each check found, what was answered, what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique

from kvbridge.core.catalog.policy import RouteMode
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.gate import Verdict
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag


@unique
class HandoffUse(StrEnum):
    """What a consumer did with what it was handed."""

    USED = "USED"
    """It continued from the cache."""
    DISCARDED = "DISCARDED"
    """It had the cache and took the text all the same."""
    TEXT = "TEXT"
    """It took the text, as it was told."""


@unique
class HandoffQuality(StrEnum):
    """How good the result was."""

    GOOD = "GOOD"
    """As good as with the text."""
    BAD = "BAD"
    """Worse than with the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a consumer reported of a handoff."""

    use: HandoffUse
    """What it did."""
    quality: HandoffQuality | None = None
    """How good the result was; None if it does not know."""
    detail: str = ""
    """For people."""
    tokens_saved: int = 0
    """Tokens that it did not have to prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteKey:
    """What a breaker watches: one route between two model versions along one edge, as one tenant takes it."""

    route: str
    """Name of the route."""
    source: ModelTag
    """Who computed the cache."""
    target: ModelTag
    """Who takes it."""
    edge: str
    """The edge."""
    tenant: str = ""
    """Whose handoffs they are: what one tenant reports must not close a route to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Bytes that were brought over from another node for a part, or for others at the same time."""

    node_id: str
    """The node that they came from."""
    by: str
    """Which way they came, such as grpc or tcp."""
    nbytes: int
    """Bytes on the way so far: fewer than the payload has if it broke off or was not waited for."""
    seconds: float
    """How long that took."""
    from_replica: bool = False
    """Whether that node has a replica of the payload and does not own it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRecord:
    """What was decided on one part of a handoff."""

    reference: PayloadReference
    """What was asked for, with the generation that was found, if one was."""
    verdict: Verdict
    """Every finding of every check that was asked."""
    leased: bool
    """Whether a lease was given."""
    route: RouteKey | None
    """The route that applied; None if who computed the cache is not known."""
    route_mode: RouteMode
    """How far it is rolled out."""
    trial: bool = False
    """Whether it was a trial of a route whose breaker had tripped."""
    payload_id: int | None = None
    """The payload in its ledger; None if there is none."""
    valid_length: int = 0
    """Real tokens; 0 if that is not known."""
    payload_bytes: int = 0
    """Canonical bytes; 0 if there is no payload."""
    verified_at_commit: Verification | None = None
    """How far the bytes were checked at commit; None if there is no payload."""
    verified_now: Verification = Verification.NONE
    """How far they were checked for this handoff."""
    aligner: AlignerTag | None = None
    """The aligner that the cache went through, or has to."""
    aligner_applied: bool = False
    """Whether the producer applied it already."""
    pull: Pull | None = None
    """What was brought over for it; None if it was here, or nothing came."""

    @property
    def reason(self) -> Reason | None:
        """Return why the consumer was told to take the text; None with a lease."""
        failure = None if self.leased else self.verdict.failure
        return None if failure is None else failure.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRecord:
    """One handoff."""

    handoff_id: str
    """Unguessable name of the handoff."""
    at: float
    """When it was answered, in seconds since the epoch."""
    tenant: str
    """The caller's tenant."""
    client_id: str
    """The caller; a secret, to be shortened wherever it is shown."""
    principal: str = ""
    """The name of the caller's principal."""
    model: ModelTag
    """The consumer's model."""
    edge: str
    """The edge that was named."""
    depth: int
    """How many handoffs the context had been through."""
    seconds: float
    """From the arrival of the request to its answer."""
    deadline_seconds: float | None
    """What the caller's deadline left at arrival; None if it had none."""
    by_value: bool = False
    """Whether the caller shares no memory with the node, so that it downloads what it leases."""
    parts: tuple[PartRecord, ...]
    """One record for each part, in the order that was asked for."""
    outcome: Outcome | None = None
    """What the consumer reported; None if nothing yet."""
