"""Quarantines against a naive model that remembers everything and walks over all of it for each answer."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.provenance import Provenance, ProvenanceLimits, Receipt
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Quarantines, Target
from kvbridge.core.tags import AlignerTag, ModelTag
from tests.builders import model_tag

MODELS = [model_tag(name=name, revision=revision) for name in "mn" for revision in ("1", "2")]
ALIGNERS = [
    AlignerTag(name="map", version=version, source=source, target=MODELS[3], digest="d")
    for version in "12"
    for source in MODELS[:2]
]
PAYLOADS_MAX = 30
"""More than are named, so that some sources were never here."""
WINDOW = 5.0

references = st.integers(1, PAYLOADS_MAX).map(lambda number: PayloadReference(key="k", generation=number))
targets: st.SearchStrategy[Target] = st.one_of(
    references,
    st.builds(ModelPattern, name=st.sampled_from("mn"), revision=st.sampled_from(["", "1", "2"])),
    st.builds(AlignerPattern, name=st.just("map"), version=st.sampled_from(["", "1", "2"])),
)


@dataclass(kw_only=True)
class Fact:
    """All that was ever said of one payload."""

    model: ModelTag
    aligners: set[AlignerTag]
    sources: list[PayloadReference]
    blind: bool
    refused: bool = False


class Model:
    """Everything, forever."""

    def __init__(self) -> None:
        self.facts: dict[PayloadReference, Fact] = {}
        self.applied: dict[PayloadReference, set[AlignerTag]] = {}
        self.in_force: dict[str, Target] = {}

    def enter(
        self, reference: PayloadReference, model: ModelTag, aligner: AlignerTag | None, sources: list[PayloadReference]
    ) -> None:
        aligners = {aligner} if aligner else set()
        for source in sources:
            if source in self.facts and self.facts[source].model != model:
                aligners |= {tag for tag in self.applied.get(source, ()) if tag.target == model}
        blind = any(source not in self.facts for source in sources)
        self.facts[reference] = Fact(model=model, aligners=aligners, sources=sources, blind=blind)
        self.facts[reference].refused = any(
            self.touches(target, reference, through_blind=True) for target in self.in_force.values()
        )

    def touches(
        self,
        target: Target,
        reference: PayloadReference,
        *,
        through_blind: bool,
        seen: frozenset[PayloadReference] = frozenset(),
    ) -> bool:
        if reference == target:
            return True
        fact = self.facts.get(reference)
        if fact is None or reference in seen:
            return False
        if isinstance(target, ModelPattern) and target.fits(fact.model):
            return True
        if isinstance(target, AlignerPattern) and any(map(target.fits, fact.aligners)):
            return True
        if fact.blind and through_blind:
            return True
        return any(
            self.touches(target, source, through_blind=through_blind, seen=seen | {reference})
            for source in fact.sources
        )


class Machine(RuleBasedStateMachine):
    """Drives the quarantines and the model alike."""

    limits = ProvenanceLimits(seconds=1e9, payloads_max=1000, handoffs_max=1000)
    exact = True

    def __init__(self) -> None:
        """Start with nothing."""
        super().__init__()
        self.quarantines = Quarantines(Provenance(self.limits), quarantines_max=100)
        self.model = Model()
        self.now = 0.0
        self.generation = 0
        self.imposed = 0

    @rule(
        model=st.sampled_from(MODELS),
        aligner=st.none() | st.sampled_from(ALIGNERS),
        sources=st.lists(references, max_size=3, unique=True),
    )
    def publish(self, model: ModelTag, aligner: AlignerTag | None, sources: list[PayloadReference]) -> None:
        """Reserve a payload; most sources are older payloads, some were never here, some are yet to come."""
        if self.generation == PAYLOADS_MAX:
            return
        self.generation += 1
        reference = PayloadReference(key="k", generation=self.generation)
        self.quarantines.enter(reference=reference, model=model, aligner=aligner, derived_from=sources)
        self.model.enter(reference, model, aligner, sources)

    @rule(reference=references, aligner=st.none() | st.sampled_from(ALIGNERS))
    def receive(self, reference: PayloadReference, aligner: AlignerTag | None) -> None:
        """Hand a payload over."""
        if reference not in self.model.facts:
            return
        token = f"{self.now}/{len(self.model.applied)}/{self.quarantines.provenance.handoffs}/{reference.generation}"
        receipt = Receipt(client_id="c", handoff_id=token, lease_token=token, at=self.now, aligner=aligner)
        self.quarantines.provenance.receive(reference, receipt)
        if aligner is not None:
            self.model.applied.setdefault(reference, set()).add(aligner)

    @rule(reference=references)
    def end(self, reference: PayloadReference) -> None:
        """End a payload."""
        self.quarantines.provenance.end(reference, now=self.now)

    @rule(on=targets)
    def impose(self, on: Target) -> None:
        """Impose a quarantine: nothing comes twice, and everything that is touched is there."""
        target = on
        self.imposed += 1
        quarantine = Quarantine(quarantine_id=f"q{self.imposed}", target=target, why="", since=self.now)
        would = self.quarantines.touched(quarantine)
        touched = self.quarantines.impose(quarantine)
        assert touched == would
        found = [payload.reference for payload in touched]
        assert len(found) == len(set(found))
        expected = {
            reference
            for reference in [*self.model.facts, target]
            if isinstance(reference, PayloadReference) and self.model.touches(target, reference, through_blind=True)
        }
        remembered = {
            reference for reference in expected if self.quarantines.provenance.find(reference) or reference == target
        }
        assert set(found) >= remembered
        if self.exact:
            assert set(found) == remembered
        self.model.in_force[quarantine.quarantine_id] = target
        for reference in expected & self.model.facts.keys():
            self.model.facts[reference].refused = True

    @rule(choice=st.integers(0, 5))
    def lift(self, choice: int) -> None:
        """Lift a quarantine."""
        names = list(self.model.in_force)
        if choice < len(names):
            del self.model.in_force[names[choice]]
            assert self.quarantines.lift(names[choice])

    @rule(seconds=st.sampled_from([1.0, WINDOW]))
    def wait(self, seconds: float) -> None:
        """Let time pass, and what is past its window be forgotten."""
        self.now += seconds
        self.quarantines.provenance.advance(now=self.now, is_live=lambda _: False)

    @invariant()
    def nothing_refused_passes(self) -> None:
        """Whatever the model refuses is refused while it is remembered, and with room for all of it nothing else is."""
        for reference, fact in self.model.facts.items():
            if self.quarantines.provenance.find(reference) is None:
                continue
            problem = self.quarantines.problem(reference, fact.model, None, fact.sources)
            if fact.refused:
                assert problem is not None, reference
            elif self.exact:
                assert problem is None, (reference, problem)


class TightMachine(Machine):
    """The same with so little room that sources are forgotten all the time: never too little may be refused."""

    limits = ProvenanceLimits(seconds=WINDOW, payloads_max=2, handoffs_max=2)
    exact = False


TestQuarantines = Machine.TestCase
TestQuarantines.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestQuarantinesInLittleRoom = TightMachine.TestCase
TestQuarantinesInLittleRoom.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
