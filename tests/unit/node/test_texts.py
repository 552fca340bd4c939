"""A bridge that keeps texts: what it answers after a restart is what it would have answered of ended payloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.kept_text import GENERATIONS_OF_A_LIFE
from kvbridge.core.reasons import Reason
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, Leased
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import DEFAULT_TENANT, Client
from kvbridge.node.lending import Refused
from kvbridge.node.state_file import NotPersistedError
from kvbridge.node.text_file import TextStoreError
from kvbridge.wire import Seal
from tests import builders

OTHER_TENANT = "other"
RESTARTED = "the node was restarted since"


@asynccontextmanager
async def life(folder: Path, **changes: Any) -> AsyncIterator[Bridge]:
    """Run a node of two tenants, without a server, from start to a clean end."""
    fields: dict[str, Any] = {
        "socket": str(folder / "s"),
        "arena_bytes": 1 << 20,
        "pretouch": False,
        "huge_pages": False,
        "unmeasured_tokens_min": 1,
        "text_store": str(folder / "texts.db"),
    }
    bridge = Bridge(BridgeConfig(**{**fields, **changes}), tenants=(DEFAULT_TENANT, OTHER_TENANT))
    try:
        await bridge.start()
        yield bridge
    finally:
        await bridge.close()


def spec(key: str = "k", words: str = "the text", **changes: Any) -> PayloadSpec:
    """Return a spec whose text is as given."""
    return builders.spec(key=key, fallback=FallbackText(text=words), **changes)


async def publish(bridge: Bridge, client: Client, wanted: PayloadSpec) -> PayloadReference:
    """Publish zeroes."""
    grant = bridge.reserve_for_stream(client, wanted)
    await bridge.commit(client, grant.token, Seal())
    return grant.reference


async def ask(
    bridge: Bridge, client: Client, key: str = "k", generation: int = 0, **changes: Any
) -> tuple[Fallback | None, PayloadReference | None]:
    """Ask as a consumer that is right in everything; give a lease back at once."""
    wanted = builders.spec()
    terms = AcquireTerms(
        reference=PayloadReference(key=key, generation=generation),
        model=wanted.model,
        geometry=wanted.geometry,
        tokens=wanted.tokens,
        first_position=0,
    )
    asked = Acquisition(
        client=client, parts=(replace(terms, **changes),), verification=Verification.NONE, deadline_seconds=30.0
    )
    [part] = (await bridge.acquire(asked)).parts
    if isinstance(part, Leased):
        bridge.release(client, [part.grant.token])
        return None, part.descriptor.reference
    return part, None


async def told(bridge: Bridge, client: Client, key: str = "k", generation: int = 0) -> tuple[Reason, str, str | None]:
    """Ask, and return reason, detail and text of what is no cache."""
    part, _ = await ask(bridge, client, key, generation)
    assert part is not None
    return part.finding.reason, part.finding.problem or "", part.fallback.text


async def test_a_restart_ends_payloads_and_not_their_texts(tmp_path: Path) -> None:
    """By key and by generation, with tokens; whatever was published, a text for each generation."""
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        first = await publish(bridge, client, spec(words="old"))
        second = await publish(bridge, client, spec(words="new"))
        assert (first.generation, second.generation) == (1, 2)
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        expired = (Reason.PAYLOAD_EXPIRED, f"{RESTARTED} it was committed")
        assert await told(bridge, client) == (*expired, "new")
        assert await told(bridge, client, generation=1) == (*expired, "old")
        assert (await told(bridge, client, generation=3))[0] is Reason.PAYLOAD_UNKNOWN
        part, _ = await ask(bridge, client)
        assert part is not None
        assert part.tokens == builders.tokens()


async def test_a_name_of_an_earlier_life_never_means_something_newer(tmp_path: Path) -> None:
    """Generations go on above, although the store has lost everything; over several restarts."""
    for number in range(3):
        async with life(tmp_path, text_store_bytes_max=1) as bridge:  # Room for nothing.
            client = bridge.sessions.open(DEFAULT_TENANT)
            reference = await publish(bridge, client, spec(words=f"life {number}"))
            assert reference.generation == number * GENERATIONS_OF_A_LIFE + 1
            for earlier in range(number):
                generation = earlier * GENERATIONS_OF_A_LIFE + 1
                assert (await told(bridge, client, generation=generation))[0] is Reason.PAYLOAD_UNKNOWN
                name = f"kvb://{bridge.config.node_id}/k@{generation}"
                assert (await told(bridge, client, name))[0] is Reason.PAYLOAD_UNKNOWN


async def test_what_is_published_again_is_what_is_found(tmp_path: Path) -> None:
    """Its key means the new one, and the old one's name the old text."""
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        old = await publish(bridge, client, spec(words="old"))
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        new = await publish(bridge, client, spec(words="new"))
        assert await ask(bridge, client) == (None, new)
        assert (await told(bridge, client, generation=old.generation))[2] == "old"
        name = f"kvb://{bridge.config.node_id}/k@{old.generation}"
        assert (await told(bridge, client, name))[2] == "old"


async def test_a_tenant_has_its_own_texts(tmp_path: Path) -> None:
    """Another one's answer as what never was; the same key of both is two texts."""
    async with life(tmp_path) as bridge:
        for tenant in (DEFAULT_TENANT, OTHER_TENANT):
            await publish(bridge, bridge.sessions.open(tenant), spec(words=f"text of {tenant}"))
        await publish(bridge, bridge.sessions.open(OTHER_TENANT), spec("theirs"))
    async with life(tmp_path) as bridge:
        mine, theirs = bridge.sessions.open(DEFAULT_TENANT), bridge.sessions.open(OTHER_TENANT)
        assert (await told(bridge, mine))[2] == f"text of {DEFAULT_TENANT}"
        assert (await told(bridge, theirs))[2] == f"text of {OTHER_TENANT}"
        (found, _), (nobodys, _) = await ask(bridge, mine, "theirs"), await ask(bridge, mine, "never")
        assert found is not None
        assert nobodys is not None
        assert (found.finding.reason, found.finding.problem, found.fallback, found.tokens) == (
            Reason.PAYLOAD_UNKNOWN,
            nobodys.finding.problem,
            FallbackText(),
            None,
        )


async def test_other_words_for_the_same_tokens_are_not_given(tmp_path: Path) -> None:
    """A consumer with another tokenizer has the text and not the ids, as it would of an ended payload."""
    async with life(tmp_path) as bridge:
        await publish(bridge, bridge.sessions.open(DEFAULT_TENANT), spec())
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        part, _ = await ask(bridge, client, model=builders.model_tag(tokenizer_digest="t1"))
        assert part is not None
        assert (part.fallback.text, part.tokens) == ("the text", None)


async def test_a_quarantined_payload_stays_quarantined(tmp_path: Path) -> None:
    """Be it alive or ended when that was imposed, derived, or refused at its commit; there is no `quarantine_file`."""
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        root = await publish(bridge, client, spec("alive", model=builders.model_tag(name="bad")))
        await publish(bridge, client, spec("ended", linger_seconds=0.0, model=builders.model_tag(name="bad")))
        await publish(bridge, client, spec("derived", derived_from=(root,)))
        await publish(bridge, client, spec("innocent"))
        quarantines = bridge.containment.quarantines
        await quarantines.quarantine(client, ModelPattern(name="bad"), why="wrong weights", dry_run=False)
        await publish(bridge, client, spec("refused", model=builders.model_tag(name="bad")))
        before = {key: await told(bridge, client, key) for key in ("alive", "ended", "derived", "refused")}
        assert {reason for reason, _, _ in before.values()} == {Reason.QUARANTINED}
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        assert not bridge.containment.quarantines.in_force(client)
        for key, (reason, detail, text) in before.items():
            assert await told(bridge, client, key) == (reason, f"{detail}; {RESTARTED}", text)
        assert (await told(bridge, client, "innocent"))[0] is Reason.PAYLOAD_EXPIRED


async def test_a_quarantine_in_force_holds_for_earlier_lives(tmp_path: Path) -> None:
    """Whoever imposes it after the restart means these payloads, too."""
    async with life(tmp_path) as bridge:
        await publish(bridge, bridge.sessions.open(DEFAULT_TENANT), spec())
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        target = PayloadReference(key="k", generation=1)
        await bridge.containment.quarantines.quarantine(client, target, why="bad", dry_run=False)
        assert (await told(bridge, client))[0] is Reason.QUARANTINED
    async with life(tmp_path) as bridge:
        assert (await told(bridge, bridge.sessions.open(DEFAULT_TENANT)))[0] is Reason.QUARANTINED


async def test_a_quarantine_that_is_not_on_disk_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in force; whoever imposed it knows that it may be forgotten, and can do it again."""
    monkeypatch.setattr("kvbridge.node.texts._SETTLE_SECONDS_MAX", 0.05)
    async with life(tmp_path) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        await publish(bridge, client, spec())
        store = bridge.texts.store
        assert store is not None
        assert await store.settle(30.0)
        assert store._file is not None
        connection = store._file._connection
        connection.execute("PRAGMA query_only = ON")
        with pytest.raises(NotPersistedError, match="in force, and 1 payloads are refused, but only until"):
            await bridge.containment.quarantines.quarantine(
                client, PayloadReference(key="k", generation=1), why="bad", dry_run=False
            )
        assert (await told(bridge, client))[0] is Reason.QUARANTINED
        connection.execute("PRAGMA query_only = OFF")


async def test_texts_are_found_that_the_ledger_forgot(tmp_path: Path) -> None:
    """In the same life: the store may hold more than tombstones may."""
    async with life(tmp_path, tombstones_max=1) as bridge:
        client = bridge.sessions.open(DEFAULT_TENANT)
        for number in range(5):
            await publish(bridge, client, spec(f"k{number}", f"text {number}", linger_seconds=0.0))
        assert bridge.texts.store is not None
        await told(bridge, client, "k4")  # Whose end is noted by then.
        assert await bridge.texts.store.settle(30.0)
        for number in range(5):
            found = await told(bridge, client, f"k{number}")
            assert found == (Reason.PAYLOAD_EXPIRED, "nobody referenced it for 0 s", f"text {number}")


async def test_replicas_leave_nothing(tmp_path: Path) -> None:
    """Their owner keeps the text, and says what became of the payload."""
    async with life(tmp_path) as bridge:
        node = Client(client_id="node", tenant=DEFAULT_TENANT, attached=False)
        grant = None
        for tenancy in bridge._tenancies.values():
            with tenancy.ledger() as ledger:
                grant = ledger.reserve(
                    now=bridge._clock(),
                    client_id=node.client_id,
                    attached=True,
                    spec=spec("kvb://owner/k@1"),
                    slot_bytes=4096,
                )
                ledger.abort(now=bridge._clock(), client_id=node.client_id, token=grant.token)
        assert bridge.texts.store is not None
        assert await bridge.texts.store.settle(30.0)
        assert bridge.texts.store.rows == 0


async def test_another_node_is_told_the_same(tmp_path: Path) -> None:
    """It asks for a payload of an earlier life by its name, and has text and reason for its consumers."""
    async with life(tmp_path) as bridge:
        reference = await publish(bridge, bridge.sessions.open(DEFAULT_TENANT), spec())
    async with life(tmp_path) as bridge:
        peer = Client(client_id="peer", tenant=DEFAULT_TENANT, attached=False)
        for tenant, reason, text in (
            (DEFAULT_TENANT, Reason.PAYLOAD_EXPIRED, "the text"),
            (OTHER_TENANT, Reason.PAYLOAD_UNKNOWN, None),
            ("nobody", Reason.PAYLOAD_UNKNOWN, None),
        ):
            kept = await bridge.lender.recall(tenant, reference)
            answer = bridge.lender.lend(peer, tenant, reference, kept=kept)
            assert isinstance(answer, Refused)
            assert (answer.reason, answer.fallback.text) == (reason, text)


async def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    """And generations begin at 1, as ever."""
    for _ in range(2):
        async with life(tmp_path, text_store="") as bridge:
            client = bridge.sessions.open(DEFAULT_TENANT)
            assert (await told(bridge, client))[0] is Reason.PAYLOAD_UNKNOWN
            assert (await publish(bridge, client, spec())).generation == 1
    assert not (tmp_path / "texts.db").exists()


async def test_a_store_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    """Nothing is left running that would give out generations of an earlier life."""
    (tmp_path / "texts.db").write_text("something else " * 1000, encoding="utf-8")
    with pytest.raises(TextStoreError, match=r"texts\.db is damaged or no file of texts"):
        async with life(tmp_path):
            pytest.fail("it started")


# A ledger's answers before and after a restart

GENERATIONS = 12
"""More than the steps below make."""
UNKNOWN = (Reason.PAYLOAD_UNKNOWN, FallbackText(), None)


async def _publish_step(bridge: Bridge, client: Client, key: str, words: str, *, linger: float | None) -> None:
    fallback = FallbackText() if words == "none" else FallbackText(text=words)
    await publish(bridge, client, builders.spec(key=key, fallback=fallback, linger_seconds=linger))


async def _abort_step(bridge: Bridge, client: Client, key: str, words: str) -> None:
    grant = bridge.reserve_for_stream(client, spec(key, words))
    bridge.abort(client, grant.token)


async def _corrupt_step(bridge: Bridge, client: Client, key: str) -> None:
    payload = bridge.stock.payload(client, key, 0)
    if payload is not None and payload.committed_at is not None:
        with bridge._tenancy(client).ledger() as ledger:
            ledger.fail(
                now=bridge._clock(), payload_id=payload.payload_id, reason=Reason.PAYLOAD_CORRUPT, detail="bits flipped"
            )


async def _quarantine_step(bridge: Bridge, client: Client, key: str, generation: int) -> None:
    target = PayloadReference(key=key, generation=generation)
    await bridge.containment.quarantines.quarantine(client, target, why="a test", dry_run=False)


keys = st.sampled_from("ab")
steps = st.one_of(
    st.tuples(st.just(_publish_step), keys, st.sampled_from(["x", "y", "none"])),
    st.tuples(st.just(_abort_step), keys, st.sampled_from(["x", "y"])),
    st.tuples(st.just(_corrupt_step), keys),
    st.tuples(st.just(_quarantine_step), keys, st.integers(1, 4)),
)


@settings(max_examples=40, deadline=None)
@given(chosen=st.lists(st.tuples(steps, st.sampled_from([0.0, None])), max_size=10))
def test_a_store_answers_as_the_ledger_did(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[tuple[tuple[Any, ...], float | None]]
) -> None:
    """Same reason, text and tokens for every key and generation; what could be leased has expired with its text."""
    folder = tmp_path_factory.mktemp("life")

    async def before_and_after() -> None:
        async with life(folder) as bridge:
            client = bridge.sessions.open(DEFAULT_TENANT)
            for (step, *arguments), linger in chosen:
                named = {"linger": linger} if step is _publish_step else {}
                await step(bridge, client, *arguments, **named)
            before = await _answers(bridge, client)
            expected = _once_ended(bridge, client, before)
        async with life(folder) as bridge:
            after = await _answers(bridge, bridge.sessions.open(DEFAULT_TENANT))
        assert after == expected

    asyncio.run(before_and_after())


async def _answers(bridge: Bridge, client: Client) -> dict[tuple[str, int], Any]:
    answers: dict[tuple[str, int], Any] = {}
    for key in "ab":
        for generation in range(GENERATIONS):
            part, _ = await ask(bridge, client, key, generation)
            answers[key, generation] = None if part is None else (part.finding.reason, part.fallback, part.tokens)
    return answers


def _once_ended(bridge: Bridge, client: Client, before: dict[tuple[str, int], Any]) -> dict[tuple[str, int], Any]:
    """Return what a ledger would answer if all that can be leased ended: a key then means its newest generation."""
    expected = dict(before)
    for (key, generation), answer in before.items():
        if answer is None and generation:
            payload = bridge.stock.payload(client, key, generation)
            assert payload is not None
            expected[key, generation] = (Reason.PAYLOAD_EXPIRED, payload.fallback, payload.tokens)
    for key in "ab":
        if before[key, 0] is None:
            known = [number for number in range(1, GENERATIONS) if before[key, number] != UNKNOWN]
            expected[key, 0] = expected[key, known[-1]]
    return expected
