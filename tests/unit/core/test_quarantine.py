"""What a quarantine touches and refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.core.provenance import Provenance, ProvenanceLimits, Receipt
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Quarantines, Target
from kvbridge.core.tags import AlignerTag
from tests.builders import model_tag

BAD = model_tag(name="bad")
ALIGNER = AlignerTag(name="map", version="1", source=BAD, target=model_tag(), digest="d")
ON_BAD = ModelPattern(name="bad")
LIMITS = ProvenanceLimits(seconds=10.0, payloads_max=10, handoffs_max=10)


def ref(key: str, generation: int = 1) -> PayloadReference:
    return PayloadReference(key=key, generation=generation)


class Desk:
    """Quarantines under short words."""

    def __init__(self, quarantines_max: int = 10) -> None:
        self.quarantines = Quarantines(Provenance(LIMITS), quarantines_max=quarantines_max)

    def publish(self, key: str, *sources: str, **changes: object) -> None:
        fields = {"model": model_tag(), "aligner": None, **changes}
        self.quarantines.enter(reference=ref(key), derived_from=[ref(source) for source in sources], **fields)  # type: ignore[arg-type]

    def impose(self, target: Target = ON_BAD, name: str = "q", why: str = "") -> list[str]:
        quarantine = Quarantine(quarantine_id=name, target=target, why=why, since=0.0)
        before = self.quarantines.touched(quarantine)
        touched = self.quarantines.impose(quarantine)
        assert touched == before == self.quarantines.touched(quarantine)
        return [payload.reference.key for payload in touched]

    def problem(self, key: str, aligner: AlignerTag | None = None, model: object = None) -> str | None:
        return self.quarantines.problem(ref(key), model or model_tag(), aligner, ())  # type: ignore[arg-type]


def test_a_model_touches_its_payloads_and_what_derives_from_them_however_far() -> None:
    """Direct ones first, then level by level; what has nothing to do with it is left alone."""
    desk = Desk()
    desk.publish("other")
    desk.publish("a", model=BAD)
    desk.publish("b", "a")
    desk.publish("c", "b", "other")
    desk.publish("z", model=BAD)
    desk.publish("innocent", "other")
    assert desk.impose(why="wrong weights") == ["a", "z", "b", "c"]
    words = "its model bad@xxh3:00 is quarantined: wrong weights"
    assert desk.problem("a") == words
    assert desk.problem("b") == f"it derives from a@1: {words}"
    assert desk.problem("c") == f"it derives from b@1, and so in 2 steps from a@1: {words}"
    assert desk.problem("other") is desk.problem("innocent") is None


@pytest.mark.parametrize(
    ("pattern", "touches"),
    [
        (ModelPattern(name="bad"), True),
        (ModelPattern(revision="xxh3:00"), True),
        (ModelPattern(name="bad", revision="other"), False),
        (ModelPattern(name="bad", adapter=""), True),
        (ModelPattern(name="bad", adapter="lora"), False),
    ],
)
def test_a_pattern_leaves_open_what_it_does_not_name(pattern: ModelPattern, touches: bool) -> None:
    """As patterns of routes do."""
    desk = Desk()
    desk.publish("a", model=BAD)
    assert desk.impose(pattern) == (["a"] if touches else [])


def test_what_is_published_later_is_refused_too() -> None:
    """By its own model, or by a source that is refused, be that forgotten or not."""
    desk = Desk()
    desk.publish("a", model=BAD)
    desk.impose()
    desk.publish("later", model=BAD)
    desk.publish("derived", "a")
    desk.publish("fine")
    assert desk.problem("later") is not None
    assert desk.problem("derived") is not None
    assert desk.problem("fine") is None
    provenance = desk.quarantines.provenance
    provenance.end(ref("a"), now=0.0)
    provenance.end(ref("derived"), now=0.0)
    provenance.advance(now=100.0, is_live=lambda _: False)
    assert provenance.find(ref("derived")) is None
    desk.publish("from the forgotten", "derived")
    assert "it derives from derived@1" in (desk.problem("from the forgotten") or "")


def test_one_payload_is_one_generation() -> None:
    """Others of the same key stay."""
    desk = Desk()
    desk.publish("a")
    desk.quarantines.enter(reference=ref("a", 2), model=model_tag(), aligner=None, derived_from=())
    desk.publish("b", "a")
    assert desk.impose(ref("a")) == ["a", "b"]
    assert desk.problem("a") == "the payload is quarantined"
    assert desk.quarantines.problem(ref("a", 2), model_tag(), None, ()) is None


def test_a_payload_that_was_never_here_can_be_quarantined() -> None:
    """What names it as a source is refused, before and after."""
    desk = Desk()
    desk.publish("before", "elsewhere")
    assert desk.impose(ref("elsewhere")) == ["elsewhere", "before"]
    desk.publish("after", "elsewhere")
    assert (
        desk.problem("before") == "it derives from elsewhere@1: the payload is quarantined; nothing else is known of it"
    )
    assert desk.problem("after") is not None


def test_a_quarantined_payload_is_known_by_its_quarantine_when_its_mark_is_forgotten() -> None:
    """Marks of what is not in the record are limited, quarantines are what they are."""
    desk = Desk(quarantines_max=100)
    desk.impose(ref("elsewhere"), "q")
    for number in range(LIMITS.payloads_max):
        desk.impose(ref("other", number + 1), f"q{number}")
    assert not desk.quarantines.provenance.marks(ref("elsewhere"))
    desk.publish("derived", "elsewhere")
    assert desk.problem("derived") == "it derives from elsewhere@1: the payload is quarantined"


def test_what_derives_from_the_unknown_is_touched_by_everything() -> None:
    """It cannot be told from what is quarantined; it comes last in the list, and so does what derives from it."""
    desk = Desk()
    desk.publish("blind", "elsewhere")
    desk.publish("child", "blind")
    desk.publish("a", model=BAD)
    assert desk.impose() == ["a", "blind", "child"]
    assert "of which nothing is known" in (desk.problem("blind") or "")
    desk.publish("later", "elsewhere too")
    assert desk.problem("later") is not None
    desk.quarantines.lift("q")
    desk.publish("after", "elsewhere too")
    assert desk.problem("after") is None


def test_an_aligner_touches_what_went_through_it() -> None:
    """Because its producer says so, or because it derives from what was handed over to be aligned."""
    desk = Desk()
    desk.publish("aligned", model=BAD, aligner=ALIGNER)
    desk.publish("raw", model=BAD)
    receipt = Receipt(client_id="c", handoff_id="h", lease_token="t", at=0.0, aligner=ALIGNER)
    desk.quarantines.provenance.receive(ref("raw"), receipt)
    desk.publish("computed", "raw")
    assert desk.impose(AlignerPattern(name="map", version="2"), "other") == []
    target = AlignerPattern(name="map")
    assert desk.impose(target) == ["aligned", "computed"]
    assert desk.problem("raw", model=BAD) is None
    assert desk.problem("raw", ALIGNER, BAD) == "the aligner map@1, which is quarantined"
    [quarantine] = desk.quarantines.on(target)
    words = "it was handed over for the aligner map@1, which is quarantined"
    assert desk.quarantines.receipts(quarantine) == [(ref("raw"), words, receipt)]


def test_any_number_of_quarantines_one_after_another_leaves_one_mark() -> None:
    """Payloads stay refused, by the newest reason; and those that are forgotten do, too."""
    desk = Desk()
    desk.publish("a", model=BAD)
    on_another = ref("elsewhere")
    for number in range(5):
        desk.impose(ON_BAD, f"model {number}", f"reason {number}")
        desk.impose(on_another, f"payload {number}", f"reason {number}")
        desk.quarantines.lift(f"model {number}")
        desk.quarantines.lift(f"payload {number}")
    for key in ("a", "elsewhere"):
        assert len(desk.quarantines.provenance.marks(ref(key))) == 1
        assert "quarantined: reason 4" in str(desk.problem(key))


def test_lifting_ends_a_quarantine_for_what_comes_later_alone() -> None:
    """What was touched stays refused, for its tensors are gone."""
    desk = Desk()
    desk.publish("a", model=BAD)
    desk.impose()
    assert desk.quarantines.lift("q")
    assert not desk.quarantines.lift("q")
    desk.publish("later", model=BAD)
    desk.publish("derived", "a")
    assert desk.problem("a") is not None
    assert desk.problem("later") is desk.problem("derived") is None
    assert desk.quarantines.in_force() == ()


def test_two_quarantines_on_one_payload_end_one_by_one() -> None:
    """The other one still refuses what derives from it."""
    desk = Desk()
    desk.publish("a", model=BAD)
    desk.impose(ON_BAD, "q1")
    desk.impose(ref("a"), "q2")
    desk.impose(ref("a"), "q3")
    desk.quarantines.lift("q1")
    desk.quarantines.lift("q2")
    desk.publish("derived", "a")
    assert desk.problem("derived") == "it derives from a@1: the payload is quarantined"
    desk.quarantines.lift("q3")
    desk.publish("free", "a")
    assert desk.problem("free") is None


def test_of_several_reasons_one_that_is_in_force_is_given() -> None:
    """For what was there, what derives from it, and what comes later."""
    desk = Desk()
    desk.publish("a", model=BAD)
    desk.publish("derived", "a")
    desk.impose(ON_BAD, "q1", why="odd answers")
    desk.impose(ON_BAD, "q2", why="weights of the wrong branch")
    assert [quarantine.quarantine_id for quarantine in desk.quarantines.on(ON_BAD)] == ["q2", "q1"]
    desk.quarantines.lift("q1")
    desk.publish("later", model=BAD)
    for key in ("a", "derived", "later"):
        assert (desk.problem(key) or "").endswith("is quarantined: weights of the wrong branch")


def test_what_the_record_does_not_know_is_judged_by_what_is_told_of_it() -> None:
    """Its model, its aligner and its sources."""
    desk = Desk()
    desk.publish("a", model=BAD)
    desk.impose()
    assert desk.quarantines.problem(ref("x"), BAD, None, ()) is not None
    assert desk.quarantines.problem(ref("x"), model_tag(), None, [ref("a")]) is not None
    assert desk.quarantines.problem(ref("x"), model_tag(), None, [ref("b")]) is None


def test_there_are_at_most_so_many() -> None:
    """One more is refused and changes nothing."""
    desk = Desk(quarantines_max=1)
    desk.publish("a")
    desk.impose()
    with pytest.raises(LimitExceededError, match="quarantines_max"):
        desk.quarantines.impose(Quarantine(quarantine_id="q2", target=ref("a"), why="", since=0.0))
    assert desk.problem("a") is None
    assert len(desk.quarantines) == 1


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Quarantine(quarantine_id="q", target=ModelPattern(), why="", since=0.0), "target.model"),
        (lambda: Quarantine(quarantine_id="q", target=ref("a", 0), why="", since=0.0), "target.payload.generation"),
        (lambda: Quarantine(quarantine_id="q", target=ref(""), why="", since=0.0), "key"),
        (lambda: Quarantine(quarantine_id="q", target=ref("a"), why="w" * 1025, since=0.0), "why"),
        (lambda: AlignerPattern(name=""), "name"),
        (lambda: AlignerPattern(name="a", version="v" * 257), "version"),
    ],
)
def test_what_names_nothing_or_cannot_be_shown_is_refused(make: Callable[[], object], field: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidFieldError) as caught:
        make()
    assert caught.value.field == field
