"""Where payloads come from and who received them: a record that outlives them, so that contamination can be followed.

1. **Origins.** Every payload that is reserved gets an origin, which is kept while the payload is alive, for the
   retention window after its end, and after that for as long as something derived from it is remembered or somebody
   still holds it. Live payloads are bounded by their ledger; of the ended ones at most `payloads_max` are kept.
2. **Gaps.** A source that is not in the record, because it was never published here or had to be forgotten, leaves its
   descendants *unfollowable*: whoever decides on them must assume the worst. Descendants inherit that by derivation.
3. **Receipts.** A handoff is remembered for the retention window after its lease was last seen live, and of all
   receipts at most `handoffs_max`, the newest.
4. Every event takes O(1) amortised, or O(number of sources) where a payload is entered.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.tags import AlignerTag, ModelTag


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceLimits:
    """How much is remembered, and for how long."""

    seconds: float
    """Retention window: how long an ended payload and an ended handoff are remembered."""
    payloads_max: int
    """Most ended payloads."""
    handoffs_max: int
    """Most handoffs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Why a quarantine touches a payload."""

    quarantine_id: str
    """The quarantine."""
    root: PayloadReference
    """The payload that it touches by itself, from which this one derives or which it is."""
    words: str
    """How it touches the root, for people."""
    parent: PayloadReference | None = None
    """The source over which the mark came; None if this is the root."""
    steps: int = 0
    """How many derivations lie between the root and this payload."""

    def inherited(self, parent: PayloadReference) -> Mark:
        """Return the mark of what derives from `parent`, which bears this one."""
        return Mark(
            quarantine_id=self.quarantine_id, root=self.root, words=self.words, parent=parent, steps=self.steps + 1
        )

    def __str__(self) -> str:
        """Return the path in words; its length does not grow with the number of steps."""
        if self.parent is None:
            return self.words
        if self.steps == 1:
            return f"it derives from {shown(self.root)}: {self.words}"
        return (
            f"it derives from {shown(self.parent)}, and so in {self.steps} steps from {shown(self.root)}: {self.words}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One payload as one client received it."""

    client_id: str
    """Who received it; a secret."""
    handoff_id: str
    """By which handoff."""
    lease_token: str
    """The lease that came with it; a secret."""
    at: float
    """When, by the caller's clock."""
    aligner: AlignerTag | None = None
    """What the client was to apply to it; None if nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class Origin:
    """What is remembered of one payload."""

    reference: PayloadReference
    """Key and generation."""
    model: ModelTag
    """Who computed it."""
    aligners: tuple[AlignerTag, ...]
    """What it went through, as far as its producer or the handoffs of its sources tell."""
    sources: tuple[PayloadReference, ...]
    """What it directly derives from."""
    unknown_source: PayloadReference | None
    """A source of which nothing is known; None if all are known."""
    lives: set[PayloadReference] = field(default_factory=set)
    """What it is called where it can be leased, or is not committed yet: more than one for replicas of one payload."""
    ended_at: float | None = None
    """When the last of these ended; None while there is one."""
    lent: bool = False
    """Whether another node was lent it."""
    receipts: dict[str, Receipt] = field(default_factory=dict)
    """Who received it, by lease token, oldest first."""
    applied: dict[AlignerTag, None] = field(default_factory=dict)
    """What those who received it were to apply to it, even if their receipts are forgotten."""
    marks: dict[str, Mark] = field(default_factory=dict)
    """Why it is refused, by quarantine."""


class Provenance:
    """The origins of one tenant's payloads."""

    def __init__(self, limits: ProvenanceLimits) -> None:
        """Start empty."""
        self._limits = limits
        self._origins: dict[PayloadReference, Origin] = {}
        self._derived: dict[PayloadReference, dict[PayloadReference, None]] = {}
        self._by_model: dict[ModelTag, dict[PayloadReference, Origin]] = {}
        self._by_aligner: dict[AlignerTag, dict[PayloadReference, Origin]] = {}
        self._applied: dict[AlignerTag, dict[str, tuple[Origin, Receipt]]] = {}
        self._unfollowable: dict[PayloadReference, Origin] = {}
        self._ended: OrderedDict[PayloadReference, Origin] = OrderedDict()
        self._pinned: OrderedDict[PayloadReference, Origin] = OrderedDict()
        self._receipts: deque[tuple[float, Origin, str]] = deque()
        self._marks_of_forgotten: OrderedDict[PayloadReference, dict[str, Mark]] = OrderedDict()

    def __repr__(self) -> str:
        """Show how much is remembered."""
        return (
            f"<Provenance of {len(self._origins)} payloads, {len(self._ended) + len(self._pinned)} of them ended, "
            f"{len(self._receipts)} handoffs, {len(self._unfollowable)} unfollowable>"
        )

    def __len__(self) -> int:
        """Return how many payloads are remembered."""
        return len(self._origins)

    @property
    def handoffs(self) -> int:
        """Return how many handoffs are remembered."""
        return len(self._receipts)

    # What happens

    def enter(
        self,
        *,
        reference: PayloadReference,
        life: PayloadReference | None = None,
        model: ModelTag,
        aligner: AlignerTag | None,
        derived_from: Iterable[PayloadReference],
    ) -> Origin:
        """Remember a payload that was reserved under a new reference, or was brought once more from another node.

        Each replica is a `life` of its own; what is known of the payload is what was known when it came first.
        """
        known = self._origins.get(reference)
        if known is not None:
            assert is_handoff_reference(reference.key), reference
            known.lives.add(life or reference)
            self._revive(known)
            return known
        sources = tuple(dict.fromkeys(derived_from))
        origin = Origin(
            reference=reference,
            model=model,
            aligners=self._aligners(model, aligner, sources),
            sources=sources,
            unknown_source=next((source for source in sources if source not in self._origins), None),
            lives={life or reference},
        )
        self._origins[reference] = origin
        self._by_model.setdefault(model, {})[reference] = origin
        for tag in origin.aligners:
            self._by_aligner.setdefault(tag, {})[reference] = origin
        for source in sources:
            self._derived.setdefault(source, {})[reference] = None
        if origin.unknown_source is not None:
            self._unfollowable[reference] = origin
        return origin

    def receive(self, reference: PayloadReference, receipt: Receipt) -> None:
        """Remember that a client received a payload."""
        origin = self._origins.get(reference)
        if origin is None:
            return
        origin.receipts[receipt.lease_token] = receipt
        self._receipts.append((receipt.at, origin, receipt.lease_token))
        if receipt.aligner is not None:
            origin.applied[receipt.aligner] = None
            self._applied.setdefault(receipt.aligner, {})[receipt.lease_token] = (origin, receipt)
        while len(self._receipts) > self._limits.handoffs_max:
            _, oldest, token = self._receipts.popleft()
            self._drop_receipt(oldest, token)

    def end(self, reference: PayloadReference, *, life: PayloadReference | None = None, now: float) -> None:
        """Note that a payload, or one replica of it, can no longer be leased; a second time changes nothing."""
        origin = self._origins.get(reference)
        if origin is None or origin.ended_at is not None:
            return
        origin.lives.discard(life or reference)
        if origin.lives:
            return
        origin.ended_at = now
        self._ended[reference] = origin
        while len(self._ended) + len(self._pinned) > self._limits.payloads_max:
            # What is pinned is past its window, and what derives from it is from now on taken to be the worst.
            oldest = self._pinned or self._ended
            self._forget(next(iter(oldest.values())))

    def advance(self, *, now: float, is_live: Callable[[Receipt], bool]) -> None:
        """Forget what is past its window; `is_live` tells whether the lease of a receipt is."""
        due = now - self._limits.seconds
        while self._receipts and self._receipts[0][0] <= due:
            _, origin, token = self._receipts.popleft()
            receipt = origin.receipts.get(token)
            if receipt is not None and is_live(receipt):
                self._receipts.append((now, origin, token))
            else:
                self._drop_receipt(origin, token)
        while self._ended:
            reference, origin = next(iter(self._ended.items()))
            if origin.ended_at is None or origin.ended_at > due:
                return
            del self._ended[reference]
            self._pinned[reference] = origin
            self._forget_unpinned(origin)

    def mark(self, reference: PayloadReference, mark: Mark, *, in_force: Container[str]) -> None:
        """Mark a payload, remembered or not, unless the same quarantine has marked it already.

        Marks of quarantines that are not `in_force` go: people may impose one after another without end, and one mark
        is as good as many to refuse it.
        """
        assert mark.quarantine_id in in_force, mark
        origin = self._origins.get(reference)
        if origin is not None:
            origin.marks.setdefault(mark.quarantine_id, mark)
        else:
            self._remember_marks(reference, {mark.quarantine_id: mark})
        marks = self.marks(reference)
        for lifted in [name for name in marks if name not in in_force]:
            del marks[lifted]

    # What is known

    def find(self, reference: PayloadReference) -> Origin | None:
        """Return what is remembered of a payload."""
        return self._origins.get(reference)

    def marks(self, reference: PayloadReference) -> dict[str, Mark]:
        """Return the marks of a payload, remembered or not, by quarantine."""
        origin = self._origins.get(reference)
        return self._marks_of_forgotten.get(reference, {}) if origin is None else origin.marks

    def derived(self, reference: PayloadReference) -> Iterable[PayloadReference]:
        """Return what directly derives from a payload, remembered or not, in the order in which it was entered."""
        return self._derived.get(reference, ())

    def of_model(self, fits: Callable[[ModelTag], bool]) -> Iterator[Origin]:
        """Yield the payloads of the model versions that fit."""
        for tag, origins in self._by_model.items():
            if fits(tag):
                yield from origins.values()

    def of_aligner(self, fits: Callable[[AlignerTag], bool]) -> Iterator[Origin]:
        """Yield the payloads that went through an aligner version that fits."""
        for tag, origins in self._by_aligner.items():
            if fits(tag):
                yield from origins.values()

    def applied(self, fits: Callable[[AlignerTag], bool]) -> Iterator[tuple[Origin, Receipt]]:
        """Yield what clients received in order to apply an aligner version that fits."""
        for tag, receipts in self._applied.items():
            if fits(tag):
                yield from receipts.values()

    def unfollowable(self) -> Iterable[Origin]:
        """Return the payloads that name a source of which nothing is known."""
        return self._unfollowable.values()

    # The parts of these

    def _aligners(
        self, model: ModelTag, aligner: AlignerTag | None, sources: Iterable[PayloadReference]
    ) -> tuple[AlignerTag, ...]:
        """Return what a payload went through: what it says, and what its sources were aligned to its model by.

        A consumer that aligned what it received says so when it acquires, not when it publishes what came of it.
        """
        found = {} if aligner is None else {aligner: None}
        for source in sources:
            origin = self._origins.get(source)
            if origin is None or origin.model == model:
                continue
            found |= {tag: None for tag in origin.applied if tag.target == model}
        return tuple(found)

    def _revive(self, origin: Origin) -> None:
        origin.ended_at = None
        self._ended.pop(origin.reference, None)
        self._pinned.pop(origin.reference, None)

    def _drop_receipt(self, origin: Origin, token: str) -> None:
        receipt = origin.receipts.pop(token, None)
        if receipt is not None and receipt.aligner is not None:
            _discard(self._applied, receipt.aligner, token)
        self._forget_unpinned(origin)

    def _forget_unpinned(self, origin: Origin) -> None:
        """Forget a payload past its window if nothing needs it, and then those that only it had needed."""
        waiting = [origin]
        while waiting:
            checked = waiting.pop()
            reference = checked.reference
            if reference in self._pinned and reference not in self._derived and not checked.receipts:
                self._forget(checked)
                sources = (self._origins.get(source) for source in checked.sources)
                waiting += [source for source in sources if source is not None]

    def _forget(self, origin: Origin) -> None:
        reference = origin.reference
        del self._origins[reference]
        self._ended.pop(reference, None)
        self._pinned.pop(reference, None)
        self._unfollowable.pop(reference, None)
        _discard(self._by_model, origin.model, reference)
        for tag in origin.aligners:
            _discard(self._by_aligner, tag, reference)
        for source in origin.sources:
            _discard(self._derived, source, reference)
        for receipt in origin.receipts.values():
            if receipt.aligner is not None:
                _discard(self._applied, receipt.aligner, receipt.lease_token)
        origin.receipts.clear()
        for descendant in self._derived.get(reference, ()):
            orphan = self._origins[descendant]
            orphan.unknown_source = orphan.unknown_source or reference
            self._unfollowable[descendant] = orphan
        if origin.marks:
            self._remember_marks(reference, origin.marks)

    def _remember_marks(self, reference: PayloadReference, marks: dict[str, Mark]) -> None:
        """Keep the marks of a payload that is forgotten; of too many the oldest go, and count as unknown sources."""
        known = self._marks_of_forgotten.setdefault(reference, {})
        for quarantine_id, mark in marks.items():
            known.setdefault(quarantine_id, mark)
        if len(self._marks_of_forgotten) > self._limits.payloads_max:
            self._marks_of_forgotten.popitem(last=False)


def shown(reference: PayloadReference) -> str:
    """Return a reference for people; a name that holds on every node has its generation in it."""
    return reference.key if is_handoff_reference(reference.key) else f"{reference.key}@{reference.generation}"


def _discard(index: dict, group: object, member: object) -> None:  # type: ignore[type-arg] # of any of the indices
    members = index[group]
    del members[member]
    if not members:
        del index[group]
