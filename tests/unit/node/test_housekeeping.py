"""Memory that is given back without being asked for."""

from __future__ import annotations

import asyncio

from kvbridge.core.layout import slot_layout
from kvbridge.core.ledger import Tombstone
from tests import builders
from tests.unit.node.nodes import Node
from tests.unit.node.virtual import run_virtually

SLOTS = 8
"""Payloads that fill the arena but for what does not hold another one."""


def arena_bytes() -> int:
    """Return the size of an arena for so many payloads."""
    spec = builders.spec()
    return SLOTS * slot_layout(spec.geometry, spec.capacity_tokens).slot_bytes


def test_nobody_has_to_ask_for_head_room() -> None:
    """Above the soft watermark the least recently used payloads go before the next reservation comes."""

    async def work() -> None:
        node = Node(arena_bytes=arena_bytes(), memory_soft_watermark=0.5)
        await node.bridge.start()
        started_at = asyncio.get_running_loop().time()
        for number in range(SLOTS):
            await node.publish(builders.spec(key=f"k/{number}"))
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert node.usage().payloads == SLOTS // 2
        assert asyncio.get_running_loop().time() - started_at < 0.1, "it was woken, and did not wait for its next turn"
        with node.bridge._tenancies["default"].ledger() as ledger:
            ended = [ledger.find(now=started_at + 1, key=f"k/{number}") for number in range(SLOTS)]
        assert [isinstance(found, Tombstone) for found in ended] == [True] * 4 + [False] * 4
        await node.close()

    run_virtually(work())


def test_what_expires_is_given_back_in_its_time() -> None:
    """Without any call in between."""

    async def work() -> None:
        node = Node(linger_seconds=5.0)
        await node.bridge.start()
        await node.publish(builders.spec(key="k"))
        await asyncio.sleep(4.9)
        assert node.usage().payloads == 1
        await asyncio.sleep(0.2)
        assert node.usage().payloads == 0
        await node.close()

    run_virtually(work())
