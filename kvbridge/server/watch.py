"""The method of `HandoffService` that streams events to those whom they concern."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from grpc import aio

from kvbridge.core.events import EventsLost
from kvbridge.node.bridge import Bridge
from kvbridge.server.calls import caller
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.events import encode_event

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class WatchMethods:
    """A part of `HandoffService`."""

    _bridge: Bridge

    async def Watch(self, request: pb.WatchRequest, context: _Context) -> AsyncIterator[pb.WatchResponse]:  # noqa: N802
        """Stream what happens to the payloads that the caller holds or held, until it or the node is gone."""
        client = caller(self._bridge.sessions, context)
        watch = self._bridge.containment.watchers.open(client.client_id, request.after_sequence)
        try:
            yield encode_event(watch.sequence, EventsLost() if watch.events_lost else None)
            async for sequence, event in watch:
                yield encode_event(sequence, event)
        finally:
            watch.close()
