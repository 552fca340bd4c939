"""What health checks are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from kvbridge.core.errors import UnknownReferenceError
from kvbridge.server.health import Health

Response = health_pb2.HealthCheckResponse


def asked(service: str) -> Any:
    """Return a request."""
    return health_pb2.HealthCheckRequest(service=service)


def watch(health: Health, service: str) -> AsyncIterator[Any]:
    """Watch a service."""
    return health.Watch(asked(service), None)


async def told(watch: AsyncIterator[Any]) -> int:
    """Return what a watch is told next."""
    status: int = (await anext(watch)).status
    return status


async def test_a_check_tells_how_a_service_stands_now() -> None:
    """And that there is none of another name."""
    health = Health()
    await health.set("a", Response.SERVING)
    assert (await health.Check(asked("a"), None)).status == Response.SERVING
    with pytest.raises(UnknownReferenceError):
        await health.Check(asked("b"), None)
    await health.enter_graceful_shutdown()
    await health.set("a", Response.SERVING)
    assert (await health.Check(asked("a"), None)).status == Response.NOT_SERVING


async def test_everybody_who_watches_is_told_of_every_change() -> None:
    """Those, too, who stay when another one leaves; and of a service that comes later."""
    health = Health()
    watches = [watch(health, "a") for _ in range(3)]
    for each in watches:
        assert await told(each) == Response.SERVICE_UNKNOWN
    waiting = [asyncio.create_task(told(each)) for each in watches]
    await asyncio.sleep(0)
    waiting[-1].cancel()
    await asyncio.gather(waiting.pop(), return_exceptions=True)
    await health.set("a", Response.SERVING)
    assert await asyncio.gather(*waiting) == [Response.SERVING] * 2
    await health.enter_graceful_shutdown()
    assert [await told(each) for each in watches[:2]] == [Response.NOT_SERVING] * 2


async def test_names_that_nobody_has_set_leave_nothing_behind() -> None:
    """Anybody may ask for as many as there are."""
    health = Health()
    await health.set("", Response.SERVING)
    for number in range(100):
        assert await told(watch(health, f"none/{number}")) == Response.SERVICE_UNKNOWN
    assert len(health._statuses) == 1
    assert "SERVING" in repr(health)
