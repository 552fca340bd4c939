"""Pulls of values in fewer bits between real nodes: what arrives, how much crosses, and who may have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from kvbridge.cli import main
from kvbridge.core.catalog import PolicyOverrides, Route
from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.events import PayloadRevoked
from kvbridge.core.geometry import Dtype
from kvbridge.core.layout import PAGE_BYTES, slot_layout
from kvbridge.core.reasons import Reason
from kvbridge.core.transfer_encoding import TransferEncoding, TransferForm, form_of
from kvbridge.transform.encoded_layers import frames_of, stream_bytes
from kvbridge.transform.quantise import decode, encode, from_floats, to_floats
from kvbridge.v1 import catalog_service_pb2, inspect_service_pb2, types_pb2
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.wire.catalog import encode_route
from kvbridge.wire.transfers import decode_transfer_encoding
from tests import builders
from tests.api import CALL_SECONDS, collect, field_of, fill, request_id
from tests.events import watching
from tests.network.nodes import TOKENS, Pair, refusal, running_pair

LAYERS, HEADS, CHANNELS = 4, 4, 64
INT8 = form_of(TransferEncoding.INT8, 0)
LAYERED = form_of(TransferEncoding.INT8, 2)
INT4 = form_of(TransferEncoding.INT4, 0)
FORMS = pytest.mark.parametrize("form", [INT8, LAYERED, INT4], ids=str)
EDGES = {"int8": INT8, "layered": LAYERED, "int4": INT4}


def spec_of(key: str, **changes: Any) -> PayloadSpec:
    """Return a spec of four layers in bfloat16."""
    shape = {"layers": tuple(range(LAYERS)), "kv_heads": HEADS, "head_dim_k": CHANNELS, "head_dim_v": CHANNELS}
    geometry = builders.geometry(**{**shape, "dtype": Dtype.BFLOAT16, **changes})
    return builders.spec(key=key, geometry=geometry, capacity_tokens=TOKENS, tokens=builders.tokens(TOKENS))


def normal_values(spec: PayloadSpec) -> bytes:
    """Return canonical bytes of normal values."""
    count = slot_layout(spec.geometry, TOKENS).canonical_bytes(TOKENS) // 2
    return from_floats(np.random.default_rng(1).standard_normal(count, dtype=np.float32), Dtype.BFLOAT16)


def expected(spec: PayloadSpec, content: bytes, form: TransferForm) -> bytes:
    """Return what the encoder itself leaves of canonical bytes."""
    arrived, at = [], 0
    for region in slot_layout(spec.geometry, TOKENS).regions:
        nbytes = region.strip_count * region.stored_strip_bytes(TOKENS)
        piece, at = content[at : at + nbytes], at + nbytes
        if region.layer >= form.exact_layers_first and not form.is_exact:
            shape = (HEADS, TOKENS, CHANNELS)
            values = to_floats(memoryview(piece), Dtype.BFLOAT16).reshape(shape)
            coded = encode(values, region.role, form.encoding)
            piece = from_floats(decode(memoryview(coded), shape, region.role, form.encoding), Dtype.BFLOAT16)
        arrived.append(piece)
    return b"".join(arrived)


def edge_of(form: TransferForm) -> str:
    """Return the edge whose route allows a form."""
    return next(name for name, allowed in EDGES.items() if allowed == form)


@pytest.fixture(scope="module", name="module_pair", params=["grpc", "tcp"])
def running_without_a_catalog_file(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Run a pair whose puller takes routes by the API."""
    with running_pair(transport=request.param, puller_flags=("--unmeasured-tokens-min", "1")) as pair:
        yield pair


@pytest.fixture(name="routed")
def with_routes(pair: Pair) -> Pair:
    """Give the puller a route for each form."""
    for name, form in EDGES.items():
        overrides = PolicyOverrides(transfer_encoding=form.encoding, exact_layers_first=form.exact_layers_first)
        route = encode_route(Route(name=name, edge=name, overrides=overrides))
        request = catalog_service_pb2.PutRouteRequest(request_id=request_id(), route=route)
        stub: Any = CatalogServiceStub(pair.consumer.channel)
        stub.PutRoute(request, metadata=pair.consumer.metadata, timeout=CALL_SECONDS)
    return pair


def published(pair: Pair, key: str, content: bytes | None = None, **seal: Any) -> tuple[PayloadSpec, bytes]:
    """Have the producer publish values of bfloat16."""
    spec = spec_of(key)
    content = content or normal_values(spec)
    reserved = pair.producer.reserve(spec)
    fill(pair.producer.slot(reserved.location), spec, np.frombuffer(content, np.uint8))
    pair.producer.commit(reserved.reservation_token, **seal)
    return spec, content


def held(pair: Pair, part: pb.Part, spec: PayloadSpec) -> bytes:
    """Return the canonical bytes that a consumer was leased, and give them back."""
    content = collect(pair.consumer.slot(part.kv.location, writable=False), spec, TOKENS)
    pair.consumer.release(part.kv.lease_token)
    return content


def last_pull(pair: Pair) -> Any:
    """Return what the newest record says was brought over."""
    request = inspect_service_pb2.ExplainHandoffRequest(last=True)
    [part] = pair.consumer.call("ExplainHandoff", request).record.parts
    return part.pull


@FORMS
@pytest.mark.parametrize("verification", ["VERIFICATION_NONE", "VERIFICATION_FULL"])
def test_values_arrive_as_the_encoder_leaves_them(routed: Pair, form: TransferForm, verification: str) -> None:
    """Bit for bit, in fewer bytes than they have, and the descriptor and the listing say so."""
    spec, content = published(routed, f"{edge_of(form)}/{verification}")
    level = types_pb2.Verification.Value(verification)
    part = routed.acquire(spec, edge=edge_of(form), verification=level)
    said = part.kv.descriptor
    assert said.reference.key == f"kvb://owner/{spec.key}@1"
    encoding = decode_transfer_encoding(said.transfer_encoding, None, "encoding")
    assert (encoding, said.exact_layers_first) == (form.encoding, form.exact_layers_first)
    assert held(routed, part, spec) == expected(spec, content, form)
    frames = frames_of(spec.geometry, TOKENS, form)
    assert last_pull(routed).by == routed.transport
    assert last_pull(routed).bytes == stream_bytes(frames)
    assert stream_bytes(frames) < {INT8: 0.54, LAYERED: 0.78, INT4: 0.32}[form] * len(content)
    assert stream_bytes(frames) < routed.proxy.passed_bytes < 1.1 * stream_bytes(frames) + 100_000


def test_an_exact_consumer_beside_it_gets_exact_bytes(routed: Pair) -> None:
    """Whoever comes first: each has a replica of its own, and where an exact one is here, nothing else is brought."""
    spec, content = published(routed, "beside")
    assert held(routed, routed.acquire(spec, edge="int8"), spec) == expected(spec, content, INT8)
    exact = routed.acquire(spec)
    assert exact.kv.descriptor.transfer_encoding == types_pb2.TRANSFER_ENCODING_EXACT
    assert held(routed, exact, spec) == content
    assert held(routed, routed.acquire(spec, edge="int8"), spec) == content
    listed = routed.consumer.call(
        "ListPayloads", inspect_service_pb2.ListPayloadsRequest(key_prefix="kvb://owner/beside")
    )
    assert [one.reference.key for one in listed.payloads] == ["kvb://owner/beside@1", "kvb://owner/beside@1#INT8.0"]


def test_a_replica_serves_those_whose_route_allows_as_much_or_more(routed: Pair) -> None:
    """Layered values go to a route for INT8 and one for INT4, and are brought once."""
    spec, content = published(routed, "serves")
    layered = expected(spec, content, LAYERED)
    assert held(routed, routed.acquire(spec, edge="layered"), spec) == layered
    assert last_pull(routed).bytes
    for edge in ("int8", "int4"):
        assert held(routed, routed.acquire(spec, edge=edge), spec) == layered
        assert not last_pull(routed).bytes


def test_nobody_can_name_a_replica_that_lost_bits(routed: Pair) -> None:
    """It is reached by the reference and a route alone, and is not lent to other nodes."""
    spec, content = published(routed, "unnamed")
    held(routed, routed.acquire(spec, edge="int8"), spec)
    marked = types_pb2.PayloadReference(key="kvb://owner/unnamed@1#INT8.0")
    with pytest.raises(grpc.RpcError) as refused:
        routed.acquire(spec, payloads=[marked])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as unpublished:
        routed.consumer.reserve(spec_of("kvb://owner/unnamed@1#INT8.0"))
    assert unpublished.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert content


def test_commands_say_of_whose_payloads_replicas_are(routed: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """By the names that they list, which every other command takes; and they say where to ask for what is not here."""
    spec, _ = published(routed, "shown")
    held(routed, routed.acquire(spec, edge="int8"), spec)
    target, name = f"--target={routed.puller.target}", "kvb://owner/shown@1"
    assert main(["payloads", "--prefix", name, target]) == 0
    assert capsys.readouterr().out.endswith(f"  {name}#INT8.0\n")
    assert main(["payload", f"{name}#INT8.0", target]) == 0
    assert json.loads(capsys.readouterr().out)["replica_of_node"] == "owner"
    assert main(["payload", name, target]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "no replica of this payload occupies memory under this key and generation",
        "it is a payload of node owner: ask there for the key and generation behind kvb://owner/",
        f"there is a replica that lost bits: {name}#INT8.0",
    ]
    assert main(["payload", "shown@1", target]) == 1
    assert "kvb://NODE/KEY@GENERATION" in capsys.readouterr().out
    assert main(["quarantine", "--payload", f"{name}#INT8.0", "--dry-run", target]) == 0
    assert f"  {name}  (in memory, 0 leases, 1 handoff)" in capsys.readouterr().out


def test_clients_are_sent_the_bytes_as_they_lie_there(routed: Pair) -> None:
    """Encoding is work that a node does for nodes alone."""
    spec, _ = published(routed, "clients")
    part = routed.producer.acquire(spec)
    request = pb.DownloadRequest(lease_token=part.kv.lease_token, encoding=types_pb2.TRANSFER_ENCODING_INT8)
    stub: Any = HandoffServiceStub(routed.producer.channel)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Download(request, metadata=routed.producer.metadata, timeout=CALL_SECONDS))
    assert field_of(refused.value) == "encoding"
    routed.producer.release(part.kv.lease_token)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_changed_byte_in_a_frame_is_text(routed: Pair, share: float) -> None:
    """Nothing of it is handed over, and the next one who asks may have it whole."""
    spec, content = published(routed, f"changed/{share}")
    nbytes = stream_bytes(frames_of(spec.geometry, TOKENS, INT8))
    routed.proxy.behave(flip_at_byte=int(nbytes * share))
    assert refusal(routed.acquire(spec, edge="int8"), spec) is Reason.TRANSFER_FAILED
    routed.proxy.behave()
    assert held(routed, routed.acquire(spec, edge="int8"), spec) == expected(spec, content, INT8)


def test_values_that_have_no_scale_come_exactly(routed: Pair) -> None:
    """A payload that was not checked for finite values may hold others: it is brought over with all its bits."""
    spec = spec_of("endless")
    content = bytearray(normal_values(spec))
    content[-2:] = b"\x80\x7f"  # Infinity.
    published(routed, "endless", bytes(content), verification=types_pb2.VERIFICATION_DIGEST)
    part = routed.acquire(spec, edge="int8")
    assert part.kv.descriptor.transfer_encoding == types_pb2.TRANSFER_ENCODING_EXACT
    assert held(routed, part, spec) == bytes(content)


def test_who_holds_values_that_turn_out_bad_is_told_by_the_name_that_it_knows(routed: Pair) -> None:
    """A check digests the replica as it was decoded, and its holders are told of the reference."""
    spec, content = published(routed, "flipped")
    kept = routed.acquire(spec, edge="int8")
    with watching(routed.consumer) as told:
        routed.consumer.slot(kept.kv.location)[PAGE_BYTES] ^= 1
        again = routed.acquire(spec, edge="int8", verification=types_pb2.VERIFICATION_DIGEST)
        assert refusal(again, spec) is Reason.PAYLOAD_CORRUPT
        event = told.next()
        assert isinstance(event, PayloadRevoked)
        assert event.reference.key == kept.kv.descriptor.reference.key == "kvb://owner/flipped@1"
    routed.consumer.release(kept.kv.lease_token)
    assert held(routed, routed.acquire(spec, edge="int8"), spec) == expected(spec, content, INT8)


def test_what_is_quarantined_is_refused_in_every_form(routed: Pair) -> None:
    """One name on all nodes, however its values came."""
    spec, _ = published(routed, "bad")
    held(routed, routed.acquire(spec, edge="int8"), spec)
    bad = types_pb2.PayloadReference(key="kvb://owner/bad@1", generation=1)
    target = catalog_service_pb2.QuarantineTarget(payload=bad)
    request = catalog_service_pb2.QuarantineRequest(request_id=request_id(), target=target, why="a test")
    stub: Any = CatalogServiceStub(routed.consumer.channel)
    stub.Quarantine(request, metadata=routed.consumer.metadata, timeout=CALL_SECONDS)
    assert refusal(routed.acquire(spec, edge="int8"), spec) is Reason.QUARANTINED
    listed = routed.consumer.call("ListPayloads", inspect_service_pb2.ListPayloadsRequest(key_prefix="kvb://owner/bad"))
    assert not listed.payloads
