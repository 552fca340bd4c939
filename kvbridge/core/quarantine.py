"""Quarantines: what they touch, directly and by derivation, and what is refused because of them.

1. A quarantine touches every payload that its target fits, and recursively every payload that derives from one of
   those. A payload that derives from something of which nothing is known is touched by every quarantine: it cannot be
   told apart from what is contaminated.
2. Whatever is touched is marked when the quarantine is imposed, and whatever is published later is marked when it is
   entered; so asking about a payload walks over nothing.
3. Lifting a quarantine ends it for payloads that are published from then on. What it touched stays refused: its tensors
   are gone, and whoever took them was told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvbridge.core.bounds import require_unix_time
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.catalog.texts import require_text
from kvbridge.core.descriptor import PayloadReference, check_key
from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.core.provenance import Mark, Origin, Provenance, Receipt, shown
from kvbridge.core.tags import TAG_FIELD_CHARACTERS_MAX, AlignerTag, ModelTag

WHY_CHARACTERS_MAX = 1024
"""Longest reason that a person gives."""
_WHY_CHARACTERS_SHOWN = 300
"""As much of it as fits into what consumers are told."""
_FITTING_TAGS_MAX = 4096
"""Tags for which it is remembered which quarantines fit them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerPattern:
    """Which aligner versions are meant."""

    name: str
    """The aligner's name; not empty."""
    version: str = ""
    """Its version; empty for any."""

    def __post_init__(self) -> None:
        """Refuse what no tag can hold.

        Raises:
            InvalidFieldError: a field is too long or does not print, or there is no name.
        """
        require_text("name", self.name, characters_max=TAG_FIELD_CHARACTERS_MAX, may_be_empty=False)
        require_text("version", self.version, characters_max=TAG_FIELD_CHARACTERS_MAX)

    def fits(self, tag: AlignerTag) -> bool:
        """Tell whether `tag` is meant."""
        return tag.name == self.name and self.version in {"", tag.version}


Target: TypeAlias = ModelPattern | AlignerPattern | PayloadReference
"""What a quarantine is on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """One quarantine."""

    quarantine_id: str
    """Its name."""
    target: Target
    """What it is on."""
    why: str
    """Why, for people."""
    since: float
    """When it was imposed, in seconds since the epoch."""

    def __post_init__(self) -> None:
        """Refuse what would touch everything or nothing, or could not be shown.

        Raises:
            InvalidFieldError: the field is named.
        """
        check_target(self.target)
        require_text("why", self.why, characters_max=WHY_CHARACTERS_MAX)
        require_unix_time("since", self.since)


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """One payload that a quarantine touches."""

    reference: PayloadReference
    """Key and generation."""
    because: str
    """How it comes to be touched, for people."""


def check_target(target: Target) -> None:
    """Refuse a target that names nothing.

    Raises:
        InvalidFieldError: naming the field below `target`.
    """
    if isinstance(target, PayloadReference):
        check_key(target.key)
        _check_reference(target.key)
        if target.generation < 1:
            raise InvalidFieldError("target.payload.generation", "is required: another one is another payload")
    elif isinstance(target, ModelPattern) and target == ModelPattern():
        raise InvalidFieldError("target.model", "must name something; the kill switch is what stops everything")


def _check_reference(key: str) -> None:
    """Refuse what is meant for a payload of another node and names none: it would be in force and stop nothing."""
    if is_handoff_reference(key):
        try:
            HandoffReference.parse(key)
        except InvalidFieldError as error:
            raise InvalidFieldError("target.payload.key", error.problem) from error


class Quarantines:
    """The quarantines in force for one tenant, over the origins of its payloads."""

    def __init__(self, provenance: Provenance, *, quarantines_max: int) -> None:
        """Start with none; nothing but this object enters payloads into `provenance`."""
        self.provenance = provenance
        self._quarantines_max = quarantines_max
        self._in_force: dict[str, Quarantine] = {}
        self._on_models = _Fitting[ModelTag]()
        self._on_aligners = _Fitting[AlignerTag]()
        self._on_payloads: dict[PayloadReference, Quarantine] = {}

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Quarantines: {len(self._in_force)} of at most {self._quarantines_max}, {self.provenance!r}>"

    def __len__(self) -> int:
        """Return how many are in force."""
        return len(self._in_force)

    def __contains__(self, quarantine_id: str) -> bool:
        """Tell whether a quarantine of this name is in force."""
        return quarantine_id in self._in_force

    def in_force(self) -> tuple[Quarantine, ...]:
        """Return the quarantines in force, newest first."""
        return tuple(reversed(self._in_force.values()))

    def on(self, target: Target) -> tuple[Quarantine, ...]:
        """Return the quarantines that are in force on exactly this target, newest first; nodes may impose several."""
        return tuple(quarantine for quarantine in self.in_force() if quarantine.target == target)

    # What happens

    def enter(
        self,
        *,
        reference: PayloadReference,
        life: PayloadReference | None = None,
        model: ModelTag,
        aligner: AlignerTag | None,
        derived_from: Iterable[PayloadReference],
    ) -> None:
        """Remember a payload that was reserved, and mark it if it is refused from the start."""
        origin = self.provenance.enter(
            reference=reference, life=life, model=model, aligner=aligner, derived_from=derived_from
        )
        if self._in_force:
            for mark in self._marks(origin):
                self.provenance.mark(reference, mark, in_force=self._in_force)

    def impose(self, quarantine: Quarantine) -> tuple[Touched, ...]:
        """Put a quarantine into force and return what it touches, as `touched` does.

        Raises:
            LimitExceededError: there are too many.
        """
        assert quarantine.quarantine_id not in self._in_force, quarantine
        if len(self._in_force) >= self._quarantines_max:
            raise LimitExceededError("quarantines_max", self._quarantines_max)
        self._in_force[quarantine.quarantine_id] = quarantine
        target = quarantine.target
        if isinstance(target, PayloadReference):
            self._on_payloads.setdefault(target, quarantine)
        elif isinstance(target, AlignerPattern):
            self._on_aligners.add(quarantine, target.fits)
        else:
            self._on_models.add(quarantine, target.fits)
        marks = self._walk(quarantine)
        for reference, mark in marks.items():
            self.provenance.mark(reference, mark, in_force=self._in_force)
        return _touched(marks)

    def lift(self, quarantine_id: str) -> bool:
        """End a quarantine for what is published from now on, and tell whether there was one."""
        quarantine = self._in_force.pop(quarantine_id, None)
        if quarantine is None:
            return False
        target = quarantine.target
        if not isinstance(target, PayloadReference):
            (self._on_aligners if isinstance(target, AlignerPattern) else self._on_models).remove(quarantine)
        elif self._on_payloads[target] is quarantine:
            others = self.on(target)
            if others:
                self._on_payloads[target] = others[0]
            else:
                del self._on_payloads[target]
        return True

    # What follows

    def touched(self, quarantine: Quarantine) -> tuple[Touched, ...]:
        """Return what a quarantine touches, or would: what it is on, then what derives from that, level by level."""
        return _touched(self._walk(quarantine))

    def receipts(self, quarantine: Quarantine) -> list[tuple[PayloadReference, str, Receipt]]:
        """Return what clients received to apply a quarantined aligner to it themselves: payload, words and receipt."""
        target = quarantine.target
        if not isinstance(target, AlignerPattern):
            return []
        return [
            (origin.reference, f"it was handed over for {_aligner_words(quarantine, receipt.aligner)}", receipt)
            for origin, receipt in self.provenance.applied(target.fits)
            if receipt.aligner is not None
        ]

    def problem(
        self,
        reference: PayloadReference,
        model: ModelTag,
        aligner: AlignerTag | None,
        derived_from: Iterable[PayloadReference],
    ) -> str | None:
        """Say why a payload is refused, or None; `aligner` is what it went through or what it is to go through.

        A reason that is in force is given before one that is not: people may have said the same more exactly since.
        """
        marks = self.provenance.marks(reference)
        mark = next((marks[name] for name in marks if name in self._in_force), next(iter(marks.values()), None))
        if mark is not None:
            return str(mark)
        if not self._in_force:
            return None
        if aligner is not None and self._on_aligners.of(aligner):
            return _aligner_words(self._on_aligners.of(aligner)[0], aligner)
        if self.provenance.find(reference) is not None:
            return None  # It would be marked.
        unremembered = Origin(
            reference=reference, model=model, aligners=(), sources=tuple(derived_from), unknown_source=None
        )
        return next((str(mark) for mark in self._marks(unremembered)), None)

    # The parts of these

    def _walk(self, quarantine: Quarantine) -> dict[PayloadReference, Mark]:
        """Return the mark of everything that is touched, in order."""
        marks = {origin.reference: _own_mark(origin, quarantine) for origin in self._direct(quarantine)}
        target = quarantine.target
        if isinstance(target, PayloadReference):
            marks[target] = _payload_mark(quarantine, target, known=self.provenance.find(target) is not None)
        self._descend(marks, marks)
        blind = {
            origin.reference: _blind_mark(origin, quarantine)
            for origin in self.provenance.unfollowable()
            if origin.reference not in marks
        }
        marks |= blind
        self._descend(marks, blind)
        return marks

    def _descend(self, marks: dict[PayloadReference, Mark], start: Iterable[PayloadReference]) -> None:
        waiting = deque(start)
        while waiting:
            parent = waiting.popleft()
            for reference in self.provenance.derived(parent):
                if reference not in marks:  # Nobody is reached twice, whatever producers claim.
                    marks[reference] = marks[parent].inherited(parent)
                    waiting.append(reference)

    def _direct(self, quarantine: Quarantine) -> Iterable[Origin]:
        target = quarantine.target
        if isinstance(target, PayloadReference):
            return ()
        if isinstance(target, AlignerPattern):
            return self.provenance.of_aligner(target.fits)
        return self.provenance.of_model(target.fits)

    def _marks(self, origin: Origin) -> Iterable[Mark]:
        """Yield the marks that a payload bears from the start, at most one for each quarantine in force counting."""
        for quarantine in self._fitting(origin):
            yield _own_mark(origin, quarantine)
        on_itself = self._on_payloads.get(origin.reference)
        if on_itself is not None:
            yield _payload_mark(on_itself, origin.reference, known=True)
        for source in origin.sources:
            for quarantine_id, mark in self.provenance.marks(source).items():
                if quarantine_id in self._in_force:
                    yield mark.inherited(source)
            on_source = self._on_payloads.get(source)
            if on_source is not None:
                yield _payload_mark(on_source, source, known=True).inherited(source)
        if origin.unknown_source is not None:
            for quarantine in self._in_force.values():
                yield _blind_mark(origin, quarantine)

    def _fitting(self, origin: Origin) -> Iterable[Quarantine]:
        yield from self._on_models.of(origin.model)
        for tag in origin.aligners:
            yield from self._on_aligners.of(tag)


_Tag = TypeVar("_Tag", ModelTag, AlignerTag)
Fits: TypeAlias = Callable[[_Tag], bool]
"""Tells whether a version is meant."""


class _Fitting(Generic[_Tag]):
    """Quarantines on versions, and for the tags that were asked for lately, which of them fit."""

    def __init__(self) -> None:
        self._patterns: dict[str, tuple[Quarantine, Fits[_Tag]]] = {}
        self._known: dict[_Tag, tuple[Quarantine, ...]] = {}

    def add(self, quarantine: Quarantine, fits: Fits[_Tag]) -> None:
        self._patterns[quarantine.quarantine_id] = quarantine, fits
        self._known.clear()

    def remove(self, quarantine: Quarantine) -> None:
        del self._patterns[quarantine.quarantine_id]
        self._known.clear()

    def of(self, tag: _Tag) -> tuple[Quarantine, ...]:
        known = self._known.get(tag)
        if known is None:
            if len(self._known) >= _FITTING_TAGS_MAX:
                self._known.clear()
            known = tuple(quarantine for quarantine, fits in self._patterns.values() if fits(tag))
            self._known[tag] = known
        return known


def _touched(marks: dict[PayloadReference, Mark]) -> tuple[Touched, ...]:
    return tuple(Touched(reference=reference, because=str(mark)) for reference, mark in marks.items())


def _own_mark(origin: Origin, quarantine: Quarantine) -> Mark:
    if isinstance(quarantine.target, AlignerPattern):
        fits = quarantine.target.fits
        words = f"it went through {_aligner_words(quarantine, next(tag for tag in origin.aligners if fits(tag)))}"
    else:
        model = origin.model
        adapter = f"+{model.adapter}" if model.adapter else ""
        words = f"its model {model.name}@{model.revision}{adapter} is quarantined{_because(quarantine)}"
    return Mark(quarantine_id=quarantine.quarantine_id, root=origin.reference, words=words)


def _payload_mark(quarantine: Quarantine, reference: PayloadReference, *, known: bool) -> Mark:
    words = f"the payload is quarantined{_because(quarantine)}" + ("" if known else "; nothing else is known of it")
    return Mark(quarantine_id=quarantine.quarantine_id, root=reference, words=words)


def _blind_mark(origin: Origin, quarantine: Quarantine) -> Mark:
    assert origin.unknown_source is not None, origin
    words = (
        f"it derives from {shown(origin.unknown_source)}, of which nothing is known, "
        f"so it cannot be told from what is quarantined{_because(quarantine)}"
    )
    return Mark(quarantine_id=quarantine.quarantine_id, root=origin.reference, words=words)


def _aligner_words(quarantine: Quarantine, aligner: AlignerTag) -> str:
    return f"the aligner {aligner.name}@{aligner.version}, which is quarantined{_because(quarantine)}"


def _because(quarantine: Quarantine) -> str:
    return f": {quarantine.why[:_WHY_CHARACTERS_SHOWN]}" if quarantine.why else ""
