"""What every directory does, whoever keeps it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvbridge.core.orders import KillSwitchOrder, Order
from kvbridge.directory import Beat, Directory, DirectoryUnavailableError, Entry
from tests.directory.worlds import TIMEOUT_SECONDS, A, B, C, Ear, World

ENTRY = Entry(tenant="default", key="plan/7", generation=3, committed_at=1000.0)
BOUND_SECONDS = 10 * TIMEOUT_SECONDS
"""What a test allows for a call that is bounded by its timeout, on a machine that does other things, too."""


def order(order_id: str) -> Order:
    """Return an order."""
    return Order(order_id=order_id, origin="node-a", issued_at=1000.0, content=KillSwitchOrder(why="a test"))


@asynccontextmanager
async def opened(world: World) -> AsyncIterator[tuple[Directory, Directory, Ear]]:
    """Open both nodes' views; the second one hears orders."""
    first, second = world.open(), world.open()
    ear = Ear()
    await first.start(lambda _: None)
    await second.start(ear)
    try:
        yield first, second, ear
    finally:
        await first.close()
        await second.close()


async def beat_again(directory: Directory) -> Beat:
    """Return the first beat of the second node that is answered."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await directory.beat(B)
            except DirectoryUnavailableError:
                await asyncio.sleep(0)


async def test_nodes_find_each_other_and_what_they_own(world: World) -> None:
    """Keys of one tenant, and the newest generation of each."""
    async with opened(world) as (first, second, _):
        await first.beat(A)
        members = (await second.beat(B)).members
        assert members["node-a"].target == A.target
        await world.own(first, A, ENTRY, replace(ENTRY, key="other", generation=1))
        await world.own(first, A, replace(ENTRY, generation=4, committed_at=2000.0))
        found = await second.locate("default", ["plan/7", "nowhere", "other"])
        assert set(found) == {"plan/7", "other"}
        [location] = found["plan/7"]
        assert (location.node_id, location.generation, location.committed_at) == ("node-a", 4, 2000.0)
        assert location.epoch in {A.epoch, 0}
        assert await second.locate("another", ["plan/7"]) == {}
        await world.own(first, A, replace(ENTRY, generation=0))
        assert set(await second.locate("default", ["plan/7", "other"])) == {"other"}


async def test_each_owner_of_a_key_is_told(world: World) -> None:
    """Whoever asks chooses."""
    async with opened(world) as (first, second, _):
        third = world.open()
        for directory, member in ((first, A), (third, C), (second, B)):
            await directory.beat(member)
        await world.own(first, A, ENTRY)
        await world.own(third, C, replace(ENTRY, generation=1))
        found = await second.locate("default", ["plan/7"])
        assert {location.node_id: location.generation for location in found["plan/7"]} == {"node-a": 3, "node-c": 1}
        await third.close()


@pytest.mark.parametrize("how", ["freeze", "lose"])
async def test_a_directory_that_is_lost_costs_a_bounded_time_and_comes_back(world: World, how: str) -> None:
    """Frozen or gone, each call says so; once it is back, everything can be told and found again."""
    async with opened(world) as (first, second, _):
        await first.beat(A)
        await second.beat(B)
        getattr(world, how)()
        began_at = time.monotonic()
        with pytest.raises(DirectoryUnavailableError):
            await second.locate("default", ["plan/7"])
        assert time.monotonic() - began_at < BOUND_SECONDS
        {"freeze": world.thaw, "lose": world.restore}[how]()
        await beat_again(second)
        await first.beat(A)
        await world.own(first, A, ENTRY)
        async with asyncio.timeout(20):
            while True:
                if "plan/7" in await second.locate("default", ["plan/7"]):
                    break
                await asyncio.sleep(0.1)  # One that did not answer is left out for a while.


async def test_look_ups_at_once_are_all_answered(world: World) -> None:
    """Each with its own."""
    async with opened(world) as (first, second, _):
        await first.beat(A)
        await second.beat(B)
        await world.own(first, A, *(replace(ENTRY, key=f"k{number}", generation=number + 1) for number in range(100)))
        found = await asyncio.gather(*(second.locate("default", [f"k{number}", "none"]) for number in range(100)))
        assert [one[f"k{number}"][0].generation for number, one in enumerate(found)] == list(range(1, 101))


async def test_orders_reach_who_listens_and_who_comes_later(keeping: World) -> None:
    """By name, as often as they are told; a lifted one is told to nobody new."""
    async with opened(keeping) as (first, _, ear):
        await first.beat(A)
        await first.publish([order("one"), order("two")], [])
        assert await ear.wait_for("one") == order("one")
        await ear.wait_for("two")
        await first.publish([], ["one"])
        late, later = keeping.open(), Ear()
        await late.start(later)
        await later.wait_for("two")
        await late.close()
        assert "one" not in later.heard


@pytest.mark.parametrize("how", ["freeze", "lose"])
async def test_orders_given_after_a_loss_arrive(keeping: World, how: str) -> None:
    """The listener goes on from where it was, or from the beginning of what is there."""
    async with opened(keeping) as (first, second, ear):
        await first.beat(A)
        await first.publish([order("before")], [])
        await ear.wait_for("before")
        getattr(keeping, how)()
        with pytest.raises(DirectoryUnavailableError):
            await first.publish([order("during")], [])
        {"freeze": keeping.thaw, "lose": keeping.restore}[how]()
        await beat_again(second)
        await first.beat(A)
        await first.publish([order("after")], [])
        await ear.wait_for("after")


async def test_a_directory_that_forgot_says_so(keeping: World) -> None:
    """So that everything is told again."""
    async with opened(keeping) as (first, _, __):
        assert (await first.beat(A)).is_forgetful
        assert not (await first.beat(A)).is_forgetful
        assert (await first.beat(replace(A, epoch=99))).is_forgetful
        keeping.lose()
        keeping.restore()
        async with asyncio.timeout(20):
            while True:
                try:
                    assert (await first.beat(replace(A, epoch=99))).is_forgetful
                    break
                except DirectoryUnavailableError:
                    await asyncio.sleep(0)


async def test_who_leaves_is_no_longer_there(keeping: World) -> None:
    """At once, not only after its time."""
    async with opened(keeping) as (first, second, _):
        await first.beat(A)
        assert "node-a" in (await second.beat(B)).members
        await first.close()
        assert "node-a" not in (await second.beat(B)).members
