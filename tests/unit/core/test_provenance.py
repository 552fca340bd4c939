"""The record of where payloads come from and who received them."""

from __future__ import annotations

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.provenance import Mark, Provenance, ProvenanceLimits, Receipt
from kvbridge.core.tags import AlignerTag
from tests.builders import model_tag

WINDOW = 10.0
NEXT_MODEL = model_tag(name="next")
ALIGNER = AlignerTag(name="map", version="1", source=model_tag(), target=NEXT_MODEL, digest="d")


def ref(key: str, generation: int = 1) -> PayloadReference:
    return PayloadReference(key=key, generation=generation)


class Record:
    """A record with a clock that tests turn by hand."""

    def __init__(self, *, payloads_max: int = 100, handoffs_max: int = 100) -> None:
        limits = ProvenanceLimits(seconds=WINDOW, payloads_max=payloads_max, handoffs_max=handoffs_max)
        self.provenance = Provenance(limits)
        self.now = 0.0
        self.live: set[str] = set()

    def publish(self, key: str, *sources: str, **changes: object) -> None:
        fields = {"model": model_tag(), "aligner": None, **changes}
        self.provenance.enter(reference=ref(key), derived_from=[ref(source) for source in sources], **fields)  # type: ignore[arg-type]

    def end(self, *keys: str) -> None:
        for key in keys:
            self.provenance.end(ref(key), now=self.now)

    def receive(self, key: str, token: str, *, client: str = "c", aligner: AlignerTag | None = None) -> None:
        receipt = Receipt(client_id=client, handoff_id=f"h-{token}", lease_token=token, at=self.now, aligner=aligner)
        self.provenance.receive(ref(key), receipt)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.provenance.advance(now=self.now, is_live=lambda receipt: receipt.lease_token in self.live)

    def knows(self, *keys: str) -> bool:
        return all(self.provenance.find(ref(key)) is not None for key in keys)

    def tokens(self, key: str) -> list[str]:
        origin = self.provenance.find(ref(key))
        return [] if origin is None else list(origin.receipts)


def test_a_payload_is_remembered_for_the_window_after_its_end() -> None:
    """And not a moment longer, if nothing needs it."""
    record = Record()
    record.publish("a")
    record.wait(5 * WINDOW)
    record.end("a")
    record.end("a")
    record.wait(WINDOW - 1)
    assert record.knows("a")
    record.wait(1)
    assert not record.knows("a")
    assert len(record.provenance) == 0


def test_a_source_is_remembered_for_as_long_as_what_derives_from_it() -> None:
    """When the last one goes, the whole chain goes with it."""
    record = Record()
    record.publish("a")
    record.publish("b", "a")
    record.publish("c", "b")
    record.end("a", "b")
    record.wait(5 * WINDOW)
    assert record.knows("a", "b", "c")
    record.end("c")
    record.wait(WINDOW)
    assert len(record.provenance) == 0
    assert list(record.provenance.derived(ref("a"))) == []


def test_a_payload_is_remembered_while_somebody_holds_it() -> None:
    """The window of a handoff begins when its lease was last seen live."""
    record = Record()
    record.publish("a")
    record.live = {"t"}
    record.receive("a", "t")
    record.end("a")
    record.wait(5 * WINDOW)
    assert record.tokens("a") == ["t"]
    record.live = set()
    record.wait(WINDOW - 1)
    assert record.tokens("a") == ["t"]
    record.wait(1)
    assert not record.knows("a")
    assert record.provenance.handoffs == 0


def test_of_too_many_ended_payloads_those_past_their_window_go_first() -> None:
    """Live payloads do not count; what derived from a forgotten one can no longer be followed."""
    record = Record(payloads_max=2)
    record.publish("old")
    record.publish("derived", "old")
    record.end("old")
    record.wait(WINDOW)
    record.publish("x")
    record.publish("y")
    record.end("x")
    assert record.knows("old", "derived", "x", "y")
    assert not list(record.provenance.unfollowable())
    record.end("y")
    assert record.knows("derived", "x", "y")
    assert not record.knows("old")
    [orphan] = record.provenance.unfollowable()
    assert (orphan.reference, orphan.unknown_source) == (ref("derived"), ref("old"))


def test_without_any_past_its_window_the_one_that_ended_first_is_forgotten() -> None:
    """The limit holds whatever the window says."""
    record = Record(payloads_max=2)
    for key in ("x", "y", "z"):
        record.publish(key)
        record.end(key)
    assert not record.knows("x")
    assert record.knows("y", "z")


def test_of_too_many_handoffs_the_oldest_is_forgotten() -> None:
    """Whoever received the payload by it will not be told."""
    record = Record(handoffs_max=2)
    record.publish("a")
    for token in ("1", "2", "3"):
        record.receive("a", token)
    assert record.tokens("a") == ["2", "3"]
    record.receive("never published", "4")
    assert record.provenance.handoffs == 2


def test_a_source_that_was_never_here_leaves_a_gap() -> None:
    """Its descendants are known by its name all the same."""
    record = Record()
    record.publish("a", "elsewhere")
    assert [origin.reference for origin in record.provenance.unfollowable()] == [ref("a")]
    assert list(record.provenance.derived(ref("elsewhere"))) == [ref("a")]


def test_what_a_consumer_aligned_is_known_of_what_it_publishes() -> None:
    """It names the aligner when it acquires; what it computes from that has the aligner's target model."""
    record = Record()
    record.publish("a")
    record.publish("same", "a")
    record.receive("a", "t", aligner=ALIGNER)
    record.publish("b", "a", model=NEXT_MODEL)
    record.publish("elsewhere", "a", model=model_tag(name="third"))
    record.publish("c", "a")
    record.publish("d", model=model_tag(), aligner=ALIGNER)
    went_through = [origin.reference.key for origin in record.provenance.of_aligner(lambda tag: tag == ALIGNER)]
    assert went_through == ["b", "d"]
    [(origin, receipt)] = record.provenance.applied(lambda tag: tag == ALIGNER)
    assert (origin.reference, receipt.handoff_id) == (ref("a"), "h-t")
    record.wait(WINDOW)
    assert list(record.provenance.applied(lambda _: True)) == []


def test_marks_outlive_the_record() -> None:
    """Of a forgotten payload the marks stay, up to the limit."""
    record = Record(payloads_max=1)
    mark = Mark(quarantine_id="q", root=ref("a"), words="w")
    record.publish("a")
    record.provenance.mark(ref("a"), mark, in_force={"q"})
    record.end("a")
    record.wait(WINDOW)
    assert not record.knows("a")
    assert record.provenance.marks(ref("a")) == {"q": mark}
    record.provenance.mark(ref("never published"), mark, in_force={"q"})
    assert record.provenance.marks(ref("a")) == {}
    assert record.provenance.marks(ref("never published")) == {"q": mark}


def test_a_payload_that_claims_to_derive_from_itself_goes_nowhere() -> None:
    """Producers may guess names; a circle is forgotten under pressure like anything else."""
    record = Record(payloads_max=1)
    record.publish("a", "a", "b")
    record.publish("b", "a")
    record.end("a", "b")
    record.wait(WINDOW)
    record.publish("c")
    record.end("c")
    assert record.knows("c")
    assert len(record.provenance) == 1


def test_the_path_of_a_mark_is_told_in_words_of_constant_length() -> None:
    """The root, the nearest source, and how far it is."""
    mark = Mark(quarantine_id="q", root=ref("a"), words="w")
    assert str(mark) == "w"
    assert str(mark.inherited(ref("a"))) == "it derives from a@1: w"
    far = mark.inherited(ref("a")).inherited(ref("b"))
    assert str(far) == "it derives from b@1, and so in 2 steps from a@1: w"


def test_a_replica_that_comes_again_is_the_same_payload() -> None:
    """It has ended when none of them is left, and what was known of it stays known."""
    record = Record()
    key = "kvb://node/a@1"

    def bring(life: int) -> None:
        record.provenance.enter(
            reference=ref(key), life=ref(key, life), model=model_tag(), aligner=None, derived_from=()
        )

    def end(life: int) -> None:
        record.provenance.end(ref(key), life=ref(key, life), now=record.now)

    bring(1)
    bring(2)
    end(1)
    end(1)
    record.wait(2 * WINDOW)
    assert record.knows(key)
    end(2)
    bring(3)
    record.wait(2 * WINDOW)
    assert record.knows(key)
    end(3)
    record.wait(WINDOW)
    assert len(record.provenance) == 0
