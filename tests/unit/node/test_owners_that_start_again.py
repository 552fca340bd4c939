"""Owners that start again while a holder sends what they had: what is known to be over is not handed over."""

from __future__ import annotations

import asyncio

from kvbridge.core.reasons import Reason
from kvbridge.node.answers import Fallback
from tests.unit.node.test_visits_to_holders import FAST_SECONDS, Trio, play


def test_bytes_of_a_start_that_is_over_are_not_handed_over() -> None:
    """The holder goes on sending although the owner has gone; that it has started again is heard meanwhile."""

    async def scene(trio: Trio) -> None:
        asking = asyncio.create_task(trio.acquire())
        await asyncio.sleep(FAST_SECONDS / 2)
        trio.owner.restart()
        trio.node.bridge.replicas.hear("owner", trio.owner.epoch)
        answer = await asking
        assert isinstance(answer, Fallback)
        assert answer.finding.reason is Reason.TRANSFER_FAILED
        assert trio.counts == (0, 1)

    play(scene)


def test_a_holder_tells_which_start_of_it_answers() -> None:
    """So what it owns itself, and was brought over from an earlier start, counts no more."""

    async def scene(trio: Trio) -> None:
        trio.holder.epoch = 7
        await trio.take()
        assert trio.node.bridge.replicas._visitor.incarnations.of("holder") == 7

    play(scene)
