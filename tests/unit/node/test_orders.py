"""Orders at work on bridges that tell each other by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import LimitExceededError
from kvbridge.core.ledger import Committed, Tombstone
from kvbridge.core.orders import KillSwitchOrder, Order, OrderLimits, RevocationOrder
from kvbridge.core.reasons import Reason
from kvbridge.node.bridge import Bridge
from kvbridge.node.identity import Client
from kvbridge.node.lending import Lent
from kvbridge.node.orders import OrderKeeper
from kvbridge.wire import Seal
from tests import builders

CLIENT = Client(client_id="somebody-by-value", tenant="default", attached=False)
OTHER_NODE = Client(client_id="node.other.0123456789", tenant="default", attached=False)
BAD = ModelPattern(name="bad")


@asynccontextmanager
async def running(node_id: str, **settings: object) -> AsyncIterator[Bridge]:
    """Run a bridge without any server."""
    config = BridgeConfig(
        node_id=node_id,
        arena_bytes=1 << 20,
        pretouch=False,
        huge_pages=False,
        **settings,  # type: ignore[arg-type]
    )
    bridge = Bridge(config)
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


@asynccontextmanager
async def running_two() -> AsyncIterator[tuple[Bridge, Bridge]]:
    """Run two bridges."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(running("node-a"))
        yield first, await stack.enter_async_context(running("node-b"))


def meet(first: Bridge, second: Bridge) -> None:
    """Let one node call the other until both know the same."""
    for _ in range(2):
        first.cluster.orders.take(second.cluster.exchange(first.cluster.orders.news()))
    assert first.cluster.orders.digest == second.cluster.orders.digest


def in_force(bridge: Bridge) -> set[str]:
    """Return the names of the quarantines in force."""
    return {quarantine.quarantine_id for quarantine in bridge.containment.quarantines.in_force(CLIENT)}


async def publish(bridge: Bridge, key: str) -> PayloadReference:
    """Publish a payload that holds zeros, whatever its digests."""
    grant = bridge.reserve_for_stream(CLIENT, builders.spec(key=key))
    assert isinstance(await bridge.commit(CLIENT, grant.token, Seal()), Committed)
    return grant.reference


def keeper_of(bridge: Bridge, *, orders_max: int) -> OrderKeeper:
    """Return a keeper of a node's orders with room for so many."""
    return OrderKeeper(
        node_id="node-a",
        epoch=1,
        quarantines=bridge.containment.quarantines,
        catalog=bridge.catalog,
        limits=OrderLimits(orders_max=orders_max),
    )


async def test_a_quarantine_and_its_end_hold_on_both() -> None:
    """Whoever imposes it and whoever lifts it."""
    async with running_two() as (first, second):
        report = await first.containment.quarantines.quarantine(CLIENT, BAD, why="weights", dry_run=False)
        assert in_force(second) == set()
        meet(first, second)
        assert in_force(second) == {report.quarantine_id}
        await second.containment.quarantines.unquarantine(CLIENT, report.quarantine_id)
        meet(first, second)
        assert in_force(first) == in_force(second) == set()


async def test_a_dry_run_orders_nothing() -> None:
    """It changes nothing anywhere."""
    async with running("node-a") as bridge:
        await bridge.containment.quarantines.quarantine(CLIENT, BAD, why="", dry_run=True)
        assert len(bridge.cluster.orders) == 0


async def test_a_payload_goes_by_its_name_on_every_node() -> None:
    """What is `k` on its owner is its handoff reference elsewhere, and again `k` where it comes back."""
    async with running_two() as (first, second):
        await first.containment.quarantines.quarantine(
            CLIENT, PayloadReference(key="k", generation=2), why="", dry_run=False
        )
        meet(first, second)
        [there] = second.containment.quarantines.in_force(CLIENT)
        assert there.target == PayloadReference(key="kvb://node-a/k@2", generation=1)
        async with running("node-a") as again:
            meet(second, again)
            [back] = again.containment.quarantines.in_force(CLIENT)
            assert back.target == PayloadReference(key="k", generation=2)


async def test_another_reason_for_a_quarantine_holds_on_all_nodes() -> None:
    """On one that has ended the first one, too, and on one that hears of both at once."""
    async with running_two() as (first, second), running("node-c") as third:
        quarantines = [node.containment.quarantines for node in (first, second, third)]
        before = await quarantines[0].quarantine(CLIENT, BAD, why="odd answers", dry_run=False)
        meet(first, second)
        await quarantines[1].unquarantine(CLIENT, before.quarantine_id)
        after = await quarantines[0].quarantine(CLIENT, BAD, why="wrong branch", dry_run=False)
        meet(first, second)
        meet(second, third)
        for keeper in quarantines:
            [left] = keeper.in_force(CLIENT)
            assert (left.quarantine_id, left.why) == (after.quarantine_id, "wrong branch")
        assert first.cluster.orders.digest == second.cluster.orders.digest == third.cluster.orders.digest


async def test_the_reason_of_whoever_speaks_last_holds_if_nodes_had_several() -> None:
    """Even if one of them, which is not the newest, has it already."""
    async with running_two() as (first, second):
        quarantines = [node.containment.quarantines for node in (first, second)]
        for keeper, why in zip(quarantines, ("odd answers", "wrong branch"), strict=True):
            await keeper.quarantine(CLIENT, BAD, why=why, dry_run=False)
        meet(first, second)
        older = second.containment.quarantines.in_force(CLIENT)[-1]
        await quarantines[1].quarantine(CLIENT, BAD, why=older.why, dry_run=False)
        meet(first, second)
        for keeper in quarantines:
            [left] = keeper.in_force(CLIENT)
            assert left.why == older.why


async def test_a_quarantine_whose_new_reason_nobody_can_be_told_of_stays() -> None:
    """Everything is text here; elsewhere the reason before holds."""
    async with running_two() as (first, second):
        keeper = keeper_of(first, orders_max=1)
        for why in ("odd answers", "wrong branch"):
            await first.containment.quarantines.quarantine(CLIENT, BAD, why=why, dry_run=False)
            second.cluster.orders.take(keeper.news())
        assert first.catalog.kill_switch_reason()
        [left] = second.containment.quarantines.in_force(CLIENT)
        assert left.why == "odd answers"


async def test_what_a_quarantine_touches_elsewhere_ends_there() -> None:
    """As if it had been imposed there."""
    async with running_two() as (first, second):
        reference = await publish(second, "touched")
        await first.containment.quarantines.quarantine(
            CLIENT, ModelPattern(name=builders.model_tag().name), why="weights", dry_run=False
        )
        meet(first, second)
        refused = second.lender.lend(OTHER_NODE, "default", reference)
        assert not isinstance(refused, Lent)
        assert refused.reason is Reason.QUARANTINED


async def test_the_kill_switch_is_on_when_in_doubt() -> None:
    """Two sides of a broken network: one turns it on again, the other turns it off."""
    async with running_two() as (first, second):
        first.catalog.set_kill_switch(engaged=True, why="first")
        meet(first, second)
        assert second.catalog.kill_switch_reason() == "first"
        first.catalog.set_kill_switch(engaged=True, why="again")
        second.catalog.set_kill_switch(engaged=False, why="")
        assert second.catalog.kill_switch_reason() is None
        meet(first, second)
        assert first.catalog.kill_switch_reason() == second.catalog.kill_switch_reason() == "again"
        second.catalog.set_kill_switch(engaged=False, why="")
        meet(first, second)
        assert first.catalog.kill_switch_reason() is None


async def test_the_log_tells_of_the_kill_switch_once(caplog: pytest.LogCaptureFixture) -> None:
    """On the node where it is set as on others, and with its reason if it has one."""
    async with running_two() as (first, second):
        first.catalog.set_kill_switch(engaged=True, why="first")
        meet(first, second)
        first.catalog.set_kill_switch(engaged=True, why="again")
        first.catalog.set_kill_switch(engaged=False, why="")
        meet(first, second)
        told = [record for record in caplog.records if "kill switch" in record.message]
    assert [(record.message, vars(record).get("why")) for record in told] == [
        ("kill switch on", "first"),
        ("kill switch on, as on other nodes", "first"),
        ("kill switch on", "again"),
        ("kill switch off", None),
        ("kill switch off, as on other nodes", None),
    ]


async def test_a_restarted_node_does_not_bring_back_what_was_lifted(tmp_path: Path) -> None:
    """Its files know a quarantine and a kill switch that have ended while it was away."""
    files = {"quarantine_file": str(tmp_path / "q.json"), "kill_switch_file": str(tmp_path / "k.json")}
    async with running("node-b") as other:
        async with running("node-a", **files) as node:
            report = await node.containment.quarantines.quarantine(CLIENT, BAD, why="", dry_run=False)
            node.catalog.set_kill_switch(engaged=True, why="stop")
            await node.catalog.save_kill_switch()
            meet(node, other)
        await other.containment.quarantines.unquarantine(CLIENT, report.quarantine_id)
        other.catalog.set_kill_switch(engaged=False, why="")
        async with running("node-a", **files) as again:
            assert in_force(again) == {report.quarantine_id}
            assert again.catalog.kill_switch_reason() == "stop"
            meet(again, other)
            assert in_force(again) == in_force(other) == set()
            assert again.catalog.kill_switch_reason() is None


async def test_what_others_ordered_survives_a_restart_of_the_node_alone(tmp_path: Path) -> None:
    """It is written to the node's own files."""
    files = {"quarantine_file": str(tmp_path / "q.json"), "kill_switch_file": str(tmp_path / "k.json")}
    async with running("node-a") as other:
        report = await other.containment.quarantines.quarantine(CLIENT, BAD, why="", dry_run=False)
        other.catalog.set_kill_switch(engaged=True, why="stop")
        async with running("node-b", **files) as node:
            meet(node, other)
    async with running("node-b", **files) as again:
        assert in_force(again) == {report.quarantine_id}
        assert again.catalog.kill_switch_reason() == "stop"


async def test_a_payload_found_bad_after_it_was_lent_is_revoked() -> None:
    """Nodes that replicated it are told; of one that nobody was lent nobody is."""
    async with running_two() as (first, second):
        lent, kept = await publish(first, "lent"), await publish(first, "kept")
        assert isinstance(first.lender.lend(OTHER_NODE, "default", lent), Lent)
        for reference in (lent, kept):
            with first._tenancies["default"].ledger() as ledger:
                found = ledger.occupant(key=reference.key)
                assert found is not None
                ledger.fail(
                    now=first._clock(), payload_id=found.payload_id, reason=Reason.PAYLOAD_CORRUPT, detail="a bit"
                )
        meet(first, second)
        [order] = second.cluster.orders.in_force()
        assert isinstance(order.content, RevocationOrder)
        assert order.content.reference.key == "kvb://node-a/lent@1"
        assert second.cluster.orders.is_revoked("default", "kvb://node-a/lent@1", first.epoch) == order
        assert second.cluster.orders.is_revoked("default", "kvb://node-a/lent@1", first.epoch + 1) is None


async def test_a_replica_that_is_revoked_ends() -> None:
    """Whoever asks for it hears what its owner found."""
    async with running("node-b") as bridge:
        grant = bridge.reserve_for_stream(_itself(), builders.spec(key="kvb://node-a/k@1"))
        assert isinstance(await bridge.commit(_itself(), grant.token, Seal()), Committed)
        content = RevocationOrder(
            tenant="default",
            reference=PayloadReference(key="kvb://node-a/k@1", generation=1),
            epoch=7,
            reason=Reason.VALUES_NOT_FINITE,
            detail="a NaN",
        )
        order = Order(order_id="r", origin="node-a", issued_at=bridge.cluster.orders._clock(), content=content)
        bridge.cluster.orders.hear(order)
        with bridge._tenancies["default"].ledger() as ledger:
            found = ledger.find(now=bridge._clock(), key="kvb://node-a/k@1")
        assert isinstance(found, Tombstone)
        assert found.reason is Reason.VALUES_NOT_FINITE


def _itself() -> Client:
    from kvbridge.node.byte_checks import NODE_CLIENT_ID  # noqa: PLC0415

    return Client(client_id=NODE_CLIENT_ID, tenant="default", attached=False)


async def test_more_orders_than_there_is_room_for_make_everything_text() -> None:
    """Until some are lifted: what cannot be held must not be passed over."""
    async with running("node-a", quarantines_max=1) as narrow, running("node-b") as wide:
        reports = [
            await wide.containment.quarantines.quarantine(CLIENT, ModelPattern(name=name), why="", dry_run=False)
            for name in ("one", "two")
        ]
        meet(narrow, wide)
        assert len(in_force(narrow)) == 1
        assert "more orders" in (narrow.catalog.kill_switch_reason() or "")
        [missing] = {report.quarantine_id for report in reports} - in_force(narrow)
        [held] = in_force(narrow)
        await wide.containment.quarantines.unquarantine(CLIENT, held)
        meet(narrow, wide)
        assert in_force(narrow) == {missing}
        assert narrow.catalog.kill_switch_reason() is None


async def test_a_directory_that_makes_up_orders_makes_text_and_nothing_else() -> None:
    """More of them than any node holds, and nothing of what people ordered is lost."""
    async with running("node-a") as bridge:
        keeper = keeper_of(bridge, orders_max=10)
        for number in range(20):
            keeper.hear(Order(order_id=f"{number}", origin="x", issued_at=1.0, content=KillSwitchOrder(why="lie")))
        assert len(keeper) == 10
        assert bridge.catalog.kill_switch_reason() is not None
        with pytest.raises(LimitExceededError):
            keeper._book.add(
                Order(order_id="more", origin="x", issued_at=1.0, content=KillSwitchOrder(why="lie")), now=1.0
            )
