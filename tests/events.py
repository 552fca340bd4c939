"""A client that quarantines and watches through the raw API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.events import Event
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.wire import encode_reference
from kvbridge.wire.events import decode_event
from tests.api import CALL_SECONDS, ApiClient, request_id


def on_model(name: str = "", revision: str = "") -> catalog_pb.QuarantineTarget:
    """Return a target of all versions that fit."""
    return catalog_pb.QuarantineTarget(model=catalog_pb.ModelPattern(name=name, revision=revision))


def on_payload(key: str, generation: int = 1) -> catalog_pb.QuarantineTarget:
    """Return a target of one payload."""
    return catalog_pb.QuarantineTarget(payload=encode_reference(PayloadReference(key=key, generation=generation)))


def quarantine(
    client: ApiClient, target: catalog_pb.QuarantineTarget, *, why: str = "", dry_run: bool = False
) -> catalog_pb.QuarantineResponse:
    """Quarantine something, or ask what that would touch."""
    request = catalog_pb.QuarantineRequest(request_id=request_id(), target=target, why=why, dry_run=dry_run)
    return cast("catalog_pb.QuarantineResponse", _catalog(client, "Quarantine", request))


def unquarantine(client: ApiClient, quarantine_id: str) -> None:
    """End a quarantine."""
    request = catalog_pb.UnquarantineRequest(request_id=request_id(), quarantine_id=quarantine_id)
    _catalog(client, "Unquarantine", request)


def quarantines(client: ApiClient) -> list[catalog_pb.QuarantineRecord]:
    """Return those in force."""
    return list(_catalog(client, "ListQuarantines", catalog_pb.ListQuarantinesRequest()).quarantines)


class Stream:
    """A stream of events. Reading waits, and fails when the call's deadline passes."""

    def __init__(self, client: ApiClient, after_sequence: int = 0) -> None:
        """Open it and wait until it is open."""
        watch: Any = HandoffServiceStub(client.channel).Watch
        request = pb.WatchRequest(after_sequence=after_sequence)
        self._call = watch(request, metadata=client.metadata, timeout=CALL_SECONDS)
        self.sequence = 0
        started: pb.WatchResponse = next(self._call)
        assert started.WhichOneof("event") == "started"
        self.sequence = started.sequence
        self.events_lost: bool = started.started.events_lost

    def next(self) -> Event:
        """Wait for the next event."""
        message = next(self._call)
        assert message.sequence > self.sequence
        self.sequence = message.sequence
        event = decode_event(message)
        assert event is not None
        return event

    def rest(self) -> list[Event]:
        """Wait for the end and return everything that comes before it."""
        return [cast("Event", decode_event(message)) for message in self._call]

    def close(self) -> None:
        """Stop listening."""
        self._call.cancel()


@contextmanager
def watching(client: ApiClient, after_sequence: int = 0) -> Iterator[Stream]:
    """Watch for as long as the context lasts."""
    stream = Stream(client, after_sequence)
    try:
        yield stream
    finally:
        stream.close()


def _catalog(client: ApiClient, method: str, request: Any) -> Any:
    return getattr(CatalogServiceStub(client.channel), method)(request, metadata=client.metadata, timeout=CALL_SECONDS)
