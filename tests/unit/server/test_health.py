"""What health checks are told."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvbridge.server.health import Health

Response = health_pb2.HealthCheckResponse


class Reader:
    """What a call has been told; a servicer's context as far as the service needs one."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[int] = asyncio.Queue()

    async def write(self, response: Any) -> None:
        self.told.put_nowait(response.status)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise LookupError(code, details)


def asked(service: str) -> Any:
    """Return a request."""
    return health_pb2.HealthCheckRequest(service=service)


async def test_a_check_tells_how_a_service_stands_now() -> None:
    """And that there is none of another name."""
    health = Health()
    await health.set("a", Response.SERVING)
    assert (await health.Check(asked("a"), Reader())).status == Response.SERVING
    with pytest.raises(LookupError):
        await health.Check(asked("b"), Reader())
    await health.enter_graceful_shutdown()
    await health.set("a", Response.SERVING)
    assert (await health.Check(asked("a"), Reader())).status == Response.NOT_SERVING


async def test_everybody_who_watches_is_told_of_every_change() -> None:
    """Those, too, who stay when another one leaves; and of a service that comes later."""
    health, readers = Health(), [Reader() for _ in range(3)]
    watching = [asyncio.create_task(health.Watch(asked("a"), reader)) for reader in readers]
    for reader in readers:
        assert await reader.told.get() == Response.SERVICE_UNKNOWN
    await health.set("a", Response.SERVING)
    for reader in readers:
        assert await reader.told.get() == Response.SERVING
    watching.pop().cancel()
    readers.pop()
    await asyncio.sleep(0)
    await health.enter_graceful_shutdown()
    for reader in readers:
        assert await reader.told.get() == Response.NOT_SERVING
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)


async def test_names_that_nobody_has_set_leave_nothing_behind() -> None:
    """Anybody may ask for as many as there are."""
    health = Health()
    await health.set("", Response.SERVING)
    for number in range(100):
        task = asyncio.create_task(health.Watch(asked(f"none/{number}"), reader := Reader()))
        assert await reader.told.get() == Response.SERVICE_UNKNOWN
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(health._statuses) == 1
    assert "SERVING" in repr(health)
