"""Messages: what clients, other nodes and bridges send."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import Message

from kvbridge.client.inspection import decode_node, decode_payload
from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.core.catalog import (
    BreakerOverrides,
    Catalog,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.core.events import EventsLost, LeaseExpiring, NodeDraining, PayloadQuarantined, PayloadRevoked
from kvbridge.core.geometry import DimensionOrder, LayerKind, PositionEncoding, PositionKind
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.media import MediaItem
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.core.quarantine import Target as QuarantineTarget
from kvbridge.core.reasons import Reason
from kvbridge.link.grpc_peer import _decode_answer
from kvbridge.node.identity import Client, SessionEndedError, Sessions
from kvbridge.node.reports import Report
from kvbridge.server.inspect import _decode_cursor
from kvbridge.server.pages import decode_page_token, encode_page_token
from kvbridge.server.reports import take_report
from kvbridge.server.terms import decode_acquisition, encode_layout
from kvbridge.v1 import catalog_service_pb2, handoff_service_pb2, inspect_service_pb2, peer_service_pb2, types_pb2
from kvbridge.wire import (
    Seal,
    decode_descriptor,
    decode_seal,
    decode_spec,
    encode_descriptor,
    encode_duration,
    encode_fallback,
    encode_model_tag,
    encode_reason,
    encode_reference,
    encode_seal,
    encode_spec,
    encode_tokens,
)
from kvbridge.wire.catalog import (
    decode_aligner,
    decode_catalog,
    decode_model,
    decode_route,
    encode_aligner,
    encode_catalog,
    encode_model,
    encode_route,
)
from kvbridge.wire.chunks import DOWNLOAD_CHUNK_TAG, UPLOAD_CHUNK_TAG, encode_chunk, split_chunk
from kvbridge.wire.events import decode_event, encode_event
from kvbridge.wire.journal import RecordEncoder, parse_record
from kvbridge.wire.layouts import decode_layout
from kvbridge.wire.quarantines import decode_quarantine, decode_target, encode_quarantine, encode_target
from tests import builders, catalogs, records
from tests.api import acquire_request
from tests.fuzz.target import Target, message_target

CLIENT = Client(client_id="a-client-by-value", tenant="default", attached=False)
_ALIGNER = catalogs.aligner_tag(builders.model_tag())


def _specs() -> list[PayloadSpec]:
    sliding = builders.geometry(
        kind=LayerKind.SLIDING,
        window_tokens=8,
        stored_tokens_max=7,
        order=DimensionOrder.NHD,
        position_encoding=PositionEncoding(kind=PositionKind.NONE),
        k_scales=(0.5, 1.0),
        v_scales=(0.5, 1.0),
    )
    full = builders.spec(
        **builders.piece(1),
        geometry=sliding,
        derived_from=(PayloadReference(key="kvb://node/source@3", generation=1),),
        linger_seconds=1.5,
        ttl_seconds=60.0,
        aligner=_ALIGNER,
        media=(MediaItem(token_index=3, digest=b"m" * 32),),
        fallback=FallbackText(text_uri="file:///text", summary="short"),
    )
    return [builders.spec(), full]


def _descriptor(spec: PayloadSpec) -> Any:
    return seal(
        spec,
        generation=3,
        valid_length=None,
        tokens=None,
        layer_digests=(b"d" * 16, b"e" * 16),
        verification=Verification.FULL,
    )


def _seals() -> list[Message]:
    full = Seal(
        valid_length=7,
        tokens=builders.tokens(),
        fallback=FallbackText(text="other"),
        layer_digests=(b"d" * 16,),
        verification=Verification.DIGEST,
        hold=True,
    )
    return [encode_seal(Seal()), encode_seal(full)]


def _acquisitions() -> list[Message]:
    full = acquire_request(
        _specs()[1],
        request_id="full",
        payloads=[encode_reference(PayloadReference(key=f"kvb://node/k{n}@1", generation=n)) for n in range(3)],
        aligner=encode_spec(_specs()[1]).aligner,
        edge="plan",
        depth=2,
        affinity="user",
        valid_length_min=4,
        verification=3,
    )
    anything = acquire_request(builders.spec(), request_id="any", tokens=handoff_service_pb2.ExpectedTokens(any=True))
    return [acquire_request(builders.spec(), request_id="one"), full, anything]


def _decode_acquisition(message: handoff_service_pb2.AcquireRequest) -> object:
    return decode_acquisition(message, CLIENT, 0.0, 1.0)


def _catalogs() -> list[Message]:
    return [encode_catalog(Catalog()), encode_catalog(_catalog())]


def _catalog() -> Catalog:
    tags = (_ALIGNER.source, _ALIGNER.target)
    return Catalog(
        kill_switch=True,
        models=[ModelEntry(tag=tag, family="f", geometry=builders.geometry(), fingerprint="fp") for tag in tags],
        aligners=[catalogs.aligner(_ALIGNER)],
        routes=[_route()],
    )


def _route() -> Route:
    overrides = PolicyOverrides(
        mode=RouteMode.CANARY,
        canary_percent=12.5,
        tokens_min=100,
        depth_max=3,
        breaker=BreakerOverrides(window_seconds=60.0, bad_share_max=0.5, open_seconds=1.25),
    )
    source, target = (
        ModelPattern(name="tiny", revision="", adapter=""),
        ModelPattern(name="", revision="", adapter=None),
    )
    return Route(name="r", source=source, target=target, edge="plan", overrides=overrides)


def _targets() -> list[QuarantineTarget]:
    return [
        ModelPattern(name="tiny", revision="1", adapter=None),
        AlignerPattern(name="bridge", version="1"),
        PayloadReference(key="conversation/1", generation=2),
    ]


def _quarantines() -> list[Message]:
    return [
        encode_quarantine(Quarantine(quarantine_id="q1", target=target, why="because", since=1_796_000_000.25))
        for target in _targets()
    ]


def _pass_on(message: catalog_service_pb2.QuarantineRecord) -> Quarantine:
    """Take a quarantine, which has to be such that it can be told again."""
    quarantine = decode_quarantine(message)
    decode_quarantine(encode_quarantine(quarantine))
    return quarantine


def _events() -> list[Message]:
    reference = PayloadReference(key="k", generation=1)
    events = [
        None,
        EventsLost(),
        PayloadRevoked(reference=reference, reason=Reason.PAYLOAD_EXPIRED, detail="over"),
        PayloadQuarantined(reference=reference, detail="bad", handoff_ids=("h1", "h2"), held=True),
        NodeDraining(seconds_left=2.5),
        LeaseExpiring(lease_token="t" * 32, seconds_left=1.0),
    ]
    return [encode_event(number, event) for number, event in enumerate(events)]


def _layouts() -> list[Message]:
    spans = (
        AttentionSpan(first_position=0, length=10, cached=True),
        AttentionSpan(first_position=10, length=5, cached=False),
    )
    return [encode_layout(AttentionLayout(spans=spans))]


def _decode_route(message: catalog_service_pb2.Route) -> Route:
    """Return a route that a catalog takes: ranges are judged with what is inherited."""
    route = decode_route(message)
    route.overrides.resolve(RoutePolicy())
    return route


class _Listening:
    """Takes reports as a node does, and keeps none."""

    def take(self, client: Client, report: Report) -> None:
        assert client is CLIENT
        assert report.handoff_id

    def measure(self, *_: object, **__: object) -> None:
        return


def _take_report(message: handoff_service_pb2.ReportRequest) -> object:
    reports: Any = _Listening()
    return take_report(reports, CLIENT, message)


def _reports() -> list[Message]:
    second = encode_duration(1.5)
    return [
        handoff_service_pb2.ReportRequest(
            handoff_id="h",
            use=handoff_service_pb2.HANDOFF_USE_USED,
            quality=handoff_service_pb2.HANDOFF_QUALITY_GOOD,
            detail="fine",
            tokens_saved=10,
        ),
        handoff_service_pb2.ReportRequest(
            model=encode_model_tag(builders.model_tag()),
            prefill=handoff_service_pb2.MeasuredPrefill(tokens=1000, duration=second),
            scatter=handoff_service_pb2.MeasuredTransfer(bytes=1000, duration=second),
        ),
    ]


def _peer_answers() -> list[Message]:
    owner = peer_service_pb2.PingResponse(node_id="node", epoch=7, bulk_port=4000)
    opened = peer_service_pb2.OpenPayloadResponse(owner=owner)
    opened.opened.lease_token = "t" * 32
    opened.opened.time_to_live.CopyFrom(encode_duration(30.0))
    opened.opened.descriptor.CopyFrom(encode_descriptor(_descriptor(_specs()[0]), with_ids=True))
    opened.opened.fallback.CopyFrom(encode_fallback(FallbackText(text="the text")))
    closed = peer_service_pb2.OpenPayloadResponse(owner=owner)
    closed.closed.reason = encode_reason(Reason.PAYLOAD_EXPIRED)
    closed.closed.detail = "over"
    closed.closed.tokens.CopyFrom(encode_tokens(builders.tokens()))
    closed.closed.model.CopyFrom(encode_model_tag(builders.model_tag()))
    return [opened, closed]


def _nodes() -> list[Message]:
    node = inspect_service_pb2.GetNodeResponse(node_id="node", epoch=1, limits={"payloads_max": 1.0})
    node.uptime.CopyFrom(encode_duration(5.0))
    node.arena.size_bytes = 1 << 20
    return [node]


def _payloads() -> list[Message]:
    message = inspect_service_pb2.GetPayloadResponse(
        descriptor=encode_descriptor(_descriptor(_specs()[0]), with_ids=True)
    )
    message.summary.reference.CopyFrom(encode_reference(PayloadReference(key="k", generation=1)))
    message.summary.state = inspect_service_pb2.PAYLOAD_STATE_COMMITTED
    message.summary.model.CopyFrom(encode_model_tag(builders.model_tag()))
    message.summary.age.CopyFrom(encode_duration(1.0))
    return [message]


def _decode_payload(message: inspect_service_pb2.GetPayloadResponse) -> object:
    return decode_payload(message.summary, details=message)


def _run_chunks(content: bytes) -> None:
    """Compare what is found by hand with what protobuf finds."""
    for tag, kind in (
        (UPLOAD_CHUNK_TAG, handoff_service_pb2.UploadRequest),
        (DOWNLOAD_CHUNK_TAG, handoff_service_pb2.DownloadResponse),
    ):
        chunk = split_chunk(content, tag)
        if chunk is not None:
            assert kind.FromString(content).chunk == chunk, tag
        packed = encode_chunk([memoryview(content)], tag)
        assert bytes(split_chunk(packed, tag) or b"") == content
        assert kind.FromString(packed).chunk == content


def _chunks() -> list[bytes]:
    contents = [b"", b"x", b"y" * 200, b"z" * 20_000]
    return [encode_chunk([memoryview(content)], UPLOAD_CHUNK_TAG) for content in contents]


def _run_record(content: bytes) -> None:
    """Parse a record as the journal's reader does, which has read it from JSON."""
    from google.protobuf.json_format import ParseError  # noqa: PLC0415 - this alone needs it

    try:
        plain = json.loads(content)
    except (ValueError, RecursionError):
        return
    if not isinstance(plain, dict):
        return
    try:
        parse_record(plain)
    except ParseError:
        return


def _records() -> list[bytes]:
    encoder = RecordEncoder("node", client_key=b"k")
    made = (records.record(), records.record(records.refused()))
    return [json.dumps(encoder.record(record)).encode() for record in made]


def _run_reference(content: bytes) -> None:
    text = content.decode("utf-8", "surrogateescape")
    try:
        reference = HandoffReference.parse(text)
    except InvalidFieldError:
        return
    assert str(reference) == text
    assert HandoffReference.parse(str(reference)) == reference


def _references() -> list[bytes]:
    names = [("a", "k", 1), ("node.example-1_x", "conversation/1@2", (1 << 64) - 1)]
    return [
        str(HandoffReference(node_id=node, payload=PayloadReference(key=key, generation=generation))).encode()
        for node, key, generation in names
    ]


def _run_page_token(content: bytes) -> None:
    token = content.decode("utf-8", "surrogateescape")
    for decode in (decode_page_token, _decode_cursor):
        try:
            decode(token)
        except InvalidFieldError:
            continue


def _page_tokens() -> list[bytes]:
    return [encode_page_token(("name", "revision")).encode(), b"AAAAAAAAAAE="]


def _run_client_name(content: bytes) -> None:
    sessions = Sessions(1, lambda: "the-token")
    sessions.open("tenant")
    name = content.decode("ascii", "replace")
    try:
        client = sessions.identify(name)
    except (InvalidFieldError, SessionEndedError):
        return
    assert name in client.client_id
    assert client.attached is (name == "session.the-token")


def _run_errors(content: bytes) -> None:
    """Give a core error any words: it still becomes a status."""
    from kvbridge.server.errors import to_status  # noqa: PLC0415 - this alone needs it

    words = content.decode("utf-8", "surrogateescape")
    for error in (InvalidFieldError(words, words), BridgeError(words)):
        to_status(error)


def _words() -> list[bytes]:
    return [b"a-name-of-sixteen-characters", b"session.the-token", b"\xff\xfe"]


def _encode_full_descriptor(value: Any) -> Message:
    return encode_descriptor(value, with_ids=True)


MESSAGES: dict[str, Target] = {
    "acquire": message_target(handoff_service_pb2.AcquireRequest, _decode_acquisition, seeds=_acquisitions),
    "catalog": message_target(catalog_service_pb2.Catalog, decode_catalog, encode_catalog, seeds=_catalogs),
    "catalog_aligner": message_target(
        catalog_service_pb2.CatalogAligner,
        decode_aligner,
        encode_aligner,
        seeds=lambda: [encode_aligner(catalogs.aligner())],
    ),
    "catalog_model": message_target(
        catalog_service_pb2.CatalogModel,
        decode_model,
        encode_model,
        seeds=lambda: [encode_model(entry) for entry in _catalog().models],
    ),
    "catalog_route": message_target(
        catalog_service_pb2.Route, _decode_route, encode_route, seeds=lambda: [encode_route(_route())]
    ),
    "chunks": Target(run=_run_chunks, seeds=_chunks),
    "client_name": Target(run=_run_client_name, seeds=_words),
    "descriptor": message_target(
        types_pb2.PayloadDescriptor,
        decode_descriptor,
        _encode_full_descriptor,
        seeds=lambda: [_encode_full_descriptor(_descriptor(spec)) for spec in _specs()],
    ),
    "errors": Target(run=_run_errors, seeds=_words),
    "event": message_target(handoff_service_pb2.WatchResponse, decode_event, seeds=_events),
    "handoff_reference": Target(run=_run_reference, seeds=_references),
    "journal_record": Target(run=_run_record, seeds=_records),
    "layout": message_target(handoff_service_pb2.AttentionLayout, decode_layout, encode_layout, seeds=_layouts),
    "node": message_target(inspect_service_pb2.GetNodeResponse, decode_node, seeds=_nodes),
    "page_token": Target(run=_run_page_token, seeds=_page_tokens),
    "payload": message_target(inspect_service_pb2.GetPayloadResponse, _decode_payload, seeds=_payloads),
    "peer_answer": message_target(peer_service_pb2.OpenPayloadResponse, _decode_answer, seeds=_peer_answers),
    "quarantine": message_target(catalog_service_pb2.QuarantineRecord, _pass_on, seeds=_quarantines),
    "quarantine_target": message_target(
        catalog_service_pb2.QuarantineTarget,
        decode_target,
        encode_target,
        seeds=lambda: [encode_target(target) for target in _targets()],
    ),
    "report": message_target(handoff_service_pb2.ReportRequest, _take_report, seeds=_reports),
    "seal": message_target(handoff_service_pb2.PayloadSeal, decode_seal, encode_seal, seeds=_seals),
    "spec": message_target(
        types_pb2.PayloadSpec, decode_spec, encode_spec, seeds=lambda: [encode_spec(spec) for spec in _specs()]
    ),
}
