"""Plans of several parts through the SDK: each part a cache or text, whatever becomes of the bridge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbridge import (
    ANY_TOKENS,
    ArgumentTypeError,
    ArgumentValueError,
    Bridge,
    NoCacheError,
    PayloadReference,
    PlanHandoff,
    Reason,
    connect,
)
from tests.harness import running_bridge, wait_for
from tests.integration.client.kv import MODEL, Contents


class Context:
    """Parts that stand one after another."""

    def __init__(self, bridge: Bridge, prefix: str, lengths: Sequence[int] = (4, 6, 3)) -> None:
        self.bridge = bridge
        self.parts: list[Contents] = []
        self.keys: list[str] = []
        for number, length in enumerate(lengths):
            part = Contents(seed=len(self.ids), tokens=length)
            key = f"{prefix}/{number}"
            assert part.publish(bridge, key, **self.behind(number), summary=f"summary of {number}").published
            self.parts.append(part)
            self.keys.append(key)

    @property
    def ids(self) -> list[int]:
        """Return the tokens of all parts."""
        return [token for part in self.parts for token in part.ids]

    def behind(self, number: int) -> dict[str, Any]:
        """Return what a producer says of what stood before a part."""
        before = [token for part in self.parts[:number] for token in part.ids]
        return {"first_position": len(before), "context": before or None}

    def acquire(self, keys: Sequence[str | PayloadReference] | None = None, **options: Any) -> PlanHandoff:
        """Ask for all parts."""
        arguments = {"model": MODEL, "tokens": [*self.ids, 900], "timeout": 10.0, **options}
        return self.bridge.acquire_plan(self.keys if keys is None else keys, **arguments)


def test_every_part_arrives_in_its_place(either: Bridge) -> None:
    """Bytes, tokens and positions of each part are those of its producer, in place and by value."""
    context = Context(either, "plan/whole")
    with context.acquire() as plan:
        assert len(plan) == 3
        assert (plan.cached_length, plan.leading_length) == (13, 13)
        assert plan.handoff_id
        for part, contents, at in zip(plan, context.parts, (0, 4, 10), strict=True):
            contents.assert_in(part)
            assert (part.first_position, part.tokens, part.valid_length) == (at, contents.ids, len(contents.ids))
        assert plan.still_valid()
    assert [part.kv for part in plan] == [None] * 3


def test_the_leases_come_home_together(bridge: Bridge) -> None:
    """There is one lease for each part, and the end of the block returns all."""
    context = Context(bridge, "plan/leases")
    with context.acquire():
        assert bridge.node().arena.leases == 3
    wait_for(lambda: bridge.node().arena.leases == 0)


def test_any_tokens_are_taken_from_the_producers(either: Bridge) -> None:
    """Who does not know the tokens finds those of each part."""
    context = Context(either, "plan/any")
    with context.acquire(tokens=ANY_TOKENS) as plan:
        assert [part.tokens for part in plan] == [part.ids for part in context.parts]


def test_generations_are_named_by_references(bridge: Bridge) -> None:
    """A bare key stands for the newest generation, a reference for its own."""
    context = Context(bridge, "plan/generations")
    again = context.parts[1].publish(bridge, context.keys[1], **context.behind(1))
    assert again.reference is not None
    older = PayloadReference(key=context.keys[1], generation=again.reference.generation - 1)
    for wanted, generation in ((context.keys[1], again.reference.generation), (older, older.generation)):
        with context.acquire([context.keys[0], wanted, context.keys[2]]) as plan:
            descriptor = plan.parts[1].descriptor
            assert descriptor is not None
            assert descriptor.reference.generation == generation


def test_text_in_between_keeps_its_place(either: Bridge) -> None:
    """A part of another model is text of known length: what is before it leads, and what is behind it is a cache."""
    context = Context(either, "plan/between")
    other = context.parts[1]
    foreign = replace(MODEL, revision="other")
    other.publish(either, context.keys[1], **context.behind(1), model=foreign, summary="short")
    with context.acquire() as plan:
        assert [part.reason for part in plan] == [None, Reason.MODEL_VERSION_MISMATCH, None]
        assert [len(plan.leading()), plan.leading_length, plan.cached_length] == [1, 4, 7]
        text = plan.parts[1]
        assert (text.text, text.summary, text.tokens) == (f"text of {context.keys[1]}", "short", other.ids)
        assert plan.layout is not None
        assert [span.cached for span in plan.layout.spans] == [True, False, True]
        mask = plan.mask(2)
        assert isinstance(mask, torch.Tensor)
        assert torch.equal(mask, torch.ones(1, 1, 2, 6, dtype=torch.bool).tril(4))


def test_a_lost_lease_shortens_what_leads(bridge: Bridge) -> None:
    """A part that is released or lost is no cache any more, and what follows it does not lead."""
    context = Context(bridge, "plan/lost")
    with context.acquire() as plan:
        plan.parts[1].release()
        assert plan.leading_length == 4
        assert plan.cached_length == 7
        assert not plan.still_valid()


def test_a_dead_bridge_is_text_in_every_part() -> None:
    """With the caller's own texts, its whole prompt known to it alone, and no layout."""
    with running_bridge() as process, connect(process.target) as bridge:
        context = Context(bridge, "plan/dead")
        process.kill()
        with context.acquire(timeout=0.5, texts=["one", None, "three"]) as plan:
            assert [part.reason for part in plan] == [Reason.BRIDGE_UNREACHABLE] * 3
            assert [part.text for part in plan] == ["one", None, "three"]
            assert [part.key for part in plan] == context.keys
            assert (plan.layout, plan.leading(), plan.cached_length, plan.handoff_id) == (None, (), 0, "")
            with pytest.raises(NoCacheError, match="BRIDGE_UNREACHABLE"):
                plan.as_transformers_cache()


def test_a_closed_bridge_is_text_in_every_part(bridge: Bridge) -> None:
    """An acquire never raises because a cache cannot be had."""
    bridge.close()
    plan = bridge.acquire_plan(["a", "b"], model=MODEL, tokens=[1])
    assert [part.reason for part in plan] == [Reason.BRIDGE_UNREACHABLE] * 2


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"keys": "a"}, "keys"),
    ({"keys": []}, "keys"),
    ({"keys": [f"k{number}" for number in range(65)]}, "keys"),
    ({"keys": ["a", 1]}, "key"),
    ({"keys": ["a", ""]}, "key"),
    ({"keys": ["a", "a"]}, "payloads"),
    ({"texts": ["one"]}, "texts"),
    ({"texts": "ab"}, "texts"),
    ({"texts": [1, 2]}, "text"),
    ({"depth": -1}, "depth"),
    ({"depth": 1 << 17}, "depth"),
    ({"edge": 1}, "edge"),
    ({"edge": "x" * 257}, "edge"),
    ({"affinity": b"a"}, "affinity"),
    ({"affinity": "a\n"}, "affinity"),
    ({"aligner": "name"}, "aligner"),
    ({"media": ["picture"]}, "media"),
    ({"media": 1}, "media"),
]


@pytest.mark.parametrize(("changes", "field"), MISTAKES)
def test_mistakes_name_the_argument(bridge: Bridge, changes: dict[str, Any], field: str) -> None:
    """What cannot be asked for is refused, here or by the bridge."""
    arguments: dict[str, Any] = {"keys": ["a", "b"], "model": MODEL, "tokens": [1], "timeout": 10.0, **changes}
    with pytest.raises((ArgumentTypeError, ArgumentValueError)) as caught:
        bridge.acquire_plan(arguments.pop("keys"), **arguments)
    assert caught.value.field == field
