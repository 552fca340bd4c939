"""The service of health checks, as orchestrators and gRPC's own clients ask for it.

Everybody may call it, so what it keeps is small and bounded by `kvbridge.server.open_calls`: nothing of a name that
nobody has set, and one condition for all who watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2

from kvbridge.core.errors import UnknownReferenceError

_Response = health_pb2.HealthCheckResponse


class Health:
    """Tells how each service stands; the empty name is the node as a whole."""

    def __init__(self) -> None:
        """Know of no service."""
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._is_ending = False

    def __repr__(self) -> str:
        """Show how everything stands."""
        return f"<Health { ({name: _Response.ServingStatus.Name(status) for name, status in self._statuses.items()}) }>"

    async def set(self, service: str, status: int) -> None:
        """Say how a service stands, unless the node is ending."""
        if not self._is_ending:
            await self._put({service: status})

    async def enter_graceful_shutdown(self) -> None:
        """Say for good that nothing is served."""
        self._is_ending = True
        await self._put(dict.fromkeys(self._statuses, _Response.NOT_SERVING))

    async def _put(self, statuses: dict[str, int]) -> None:
        async with self._changed:
            self._statuses.update(statuses)
            self._changed.notify_all()

    # The service

    async def Check(self, request: Any, _: Any) -> Any:  # noqa: N802 - the service calls it so
        """Answer how a service stands.

        Raises:
            UnknownReferenceError: there is none of this name.
        """
        status = self._statuses.get(request.service)
        if status is None:
            # Not by way of the call: whoever aborts it in here can lose its place meanwhile, and none aborts twice.
            raise UnknownReferenceError("service", "there is none of this name")
        return _Response(status=status)

    async def Watch(self, request: Any, _: Any) -> AsyncIterator[Any]:  # noqa: N802 - the service calls it so
        """Stream how a service stands, now and whenever that changes; a service may come later."""
        told = None
        while True:
            told = await self._other_than(told, request.service)
            yield _Response(status=told)

    async def _other_than(self, told: int | None, service: str) -> int:
        async with self._changed:
            await self._changed.wait_for(lambda: self._status(service) != told)
        return self._status(service)

    def _status(self, service: str) -> int:
        return self._statuses.get(service, int(_Response.SERVICE_UNKNOWN))
