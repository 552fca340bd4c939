"""One table: every reason that a node can give, provoked through the real API by one thing that is wrong.

The other files show the many ways to a reason, and everything around it. This one shows that none is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import grpc
import pytest

from kvbridge.core.catalog import BreakerOverrides, ModelEntry, PolicyOverrides, Route, RouteMode
from kvbridge.core.descriptor import PayloadReference, PayloadSpec
from kvbridge.core.geometry import PositionEncoding, PositionKind
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason
from kvbridge.core.tags import AlignerTag
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.wire import encode_aligner_tag, encode_geometry, encode_model_tag, encode_reference, encode_tokens
from kvbridge.wire.catalog import encode_aligner, encode_model, encode_route
from tests import builders, catalogs
from tests.api import CALL_SECONDS, ApiClient, fill, random_content, request_id
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.server.refusals import refused

TARGET = builders.model_tag(name="target")
ALIGNER = AlignerTag(name="bridge", version="1", digest="d", source=builders.model_tag(), target=TARGET)


class Scene:
    """A producer and a consumer at one bridge, and the bridge's catalog."""

    def __init__(self, bridge: BridgeProcess) -> None:
        self.bridge = bridge
        self.producer, self.consumer = ApiClient(bridge), ApiClient(bridge)
        self._catalog = CatalogServiceStub(self.producer.channel)
        self._keys = 0

    def close(self) -> None:
        """Disconnect both."""
        self.producer.close()
        self.consumer.close()

    def spec(self, **changes: Any) -> PayloadSpec:
        """Return a spec under a key of its own."""
        self._keys += 1
        return builders.spec(**{"key": f"reason/{self._keys}", **changes})

    def published(self, **changes: Any) -> PayloadSpec:
        """Publish what a consumer that is right in everything gets."""
        spec = self.spec(**changes)
        answer, _ = self.producer.publish(spec)
        assert answer.WhichOneof("outcome") == "committed", answer
        assert self.consumer.acquire(spec).WhichOneof("directive") == "kv"
        return spec

    def declare(self, method: str, request: Any) -> None:
        """Change the catalog."""
        request.request_id = request_id()
        getattr(self._catalog, method)(request, metadata=self.producer.metadata, timeout=CALL_SECONDS)

    def on_a_route(self, edge: str, policy: PolicyOverrides, **changes: Any) -> pb.Part:
        """Ask along an edge on which a policy holds."""
        spec = self.published()
        route = encode_route(Route(name=edge, edge=edge, overrides=policy))
        self.declare("PutRoute", catalog_pb.PutRouteRequest(route=route))
        return self.consumer.acquire(spec, edge=edge, **changes)

    def aligned(self, expected: AlignerTag, **figures: Any) -> pb.Part:
        """Ask as the target model for what an aligner maps to it; without figures the catalog has no such aligner."""
        if figures:
            entry = catalogs.aligner(expected, **figures)
            self.declare("PutAligner", catalog_pb.PutAlignerRequest(aligner=encode_aligner(entry)))
        spec = self.published()
        return self.consumer.acquire(spec, model=encode_model_tag(TARGET), aligner=encode_aligner_tag(expected))


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Run a bridge whose catalog calls change."""
    with running_bridge("--catalog=", "--unmeasured-tokens-min", "1") as bridge:
        scene = Scene(bridge)
        # Half of what happens here is bad, which is no reason to stop.
        policy = PolicyOverrides(breaker=BreakerOverrides(bad_share_max=1.0))
        scene.declare("PutRoute", catalog_pb.PutRouteRequest(route=encode_route(Route(name="all", overrides=policy))))
        yield scene
        scene.close()


Provoker: TypeAlias = Callable[[Scene], pb.Part]
PROVOKED: dict[Reason, Provoker] = {}


def provokes(reason: Reason) -> Callable[[Provoker], Provoker]:
    """Put a function into the table."""

    def entered(provoker: Provoker) -> Provoker:
        assert reason not in PROVOKED, reason
        PROVOKED[reason] = provoker
        return provoker

    return entered


def wrong(**changes: Any) -> Provoker:
    """Return a consumer that is wrong in one term."""
    return lambda scene: scene.consumer.acquire(scene.published(), **changes)


PROVOKED |= {
    Reason.MODEL_VERSION_MISMATCH: wrong(model=encode_model_tag(builders.model_tag(revision="other"))),
    Reason.TOKENIZER_MISMATCH: wrong(model=encode_model_tag(builders.model_tag(tokenizer_digest="other"))),
    Reason.TOKENS_MISMATCH: wrong(tokens=pb.ExpectedTokens(prefix_of=encode_tokens(builders.tokens(10, first=1)))),
    Reason.VALID_LENGTH_INVALID: wrong(valid_length_min=11),
    Reason.GEOMETRY_MISMATCH: wrong(geometry=encode_geometry(builders.geometry(kv_heads=1))),
    Reason.POSITION_ENCODING_MISMATCH: wrong(
        geometry=encode_geometry(builders.geometry(position_encoding=PositionEncoding(kind=PositionKind.NONE)))
    ),
    Reason.ROUTE_OFF: lambda scene: scene.on_a_route("off", PolicyOverrides(mode=RouteMode.OFF)),
    Reason.CANARY_HOLDOUT: lambda scene: scene.on_a_route(
        "canary", PolicyOverrides(mode=RouteMode.CANARY, canary_percent=0.0)
    ),
    Reason.DEPTH_EXCEEDED: lambda scene: scene.on_a_route("deep", PolicyOverrides(depth_max=1), depth=2),
    Reason.TOO_SHORT_TO_PAY: lambda scene: scene.on_a_route("short", PolicyOverrides(tokens_min=11)),
    Reason.ALIGNER_MISSING: lambda scene: scene.aligned(replace(ALIGNER, name="unknown")),
    Reason.ALIGNER_VERSION_MISMATCH: lambda scene: scene.aligned(replace(ALIGNER, version="2"), validated=False),
    Reason.ALIGNMENT_ERROR_EXCEEDED: lambda scene: scene.aligned(ALIGNER, alignment_error=0.5),
}


@provokes(Reason.PAYLOAD_UNKNOWN)
def _never_published(scene: Scene) -> pb.Part:
    return scene.consumer.acquire(scene.spec())


@provokes(Reason.OWNER_UNREACHABLE)
def _of_a_node_that_nobody_knows(scene: Scene) -> pb.Part:
    reference = PayloadReference(key="kvb://elsewhere/key@1", generation=0)
    return scene.consumer.acquire(scene.spec(), payloads=[encode_reference(reference)])


@provokes(Reason.PAYLOAD_EXPIRED)
def _lingered_for_no_time(scene: Scene) -> pb.Part:
    spec = scene.spec(linger_seconds=0.0)
    scene.producer.publish(spec)
    return scene.consumer.acquire(spec)


@provokes(Reason.PAYLOAD_NOT_READY)
def _not_committed(scene: Scene) -> pb.Part:
    spec = scene.spec()
    scene.producer.reserve(spec)
    return scene.consumer.acquire(spec)


@provokes(Reason.PAYLOAD_CORRUPT)
def _not_what_was_digested(scene: Scene) -> pb.Part:
    spec = scene.spec()
    scene.producer.publish(spec, layer_digests=[bytes(16), bytes(16)])
    return scene.consumer.acquire(spec)


@provokes(Reason.VALUES_NOT_FINITE)
def _a_value_that_is_none(scene: Scene) -> pb.Part:
    spec = scene.spec()
    content = random_content(spec)
    content[4:8] = (0xFF, 0xFF, 0xFF, 0x7F)
    reserved = scene.producer.reserve(spec)
    fill(scene.producer.slot(reserved.location), spec, content)
    scene.producer.commit(reserved.reservation_token)
    return scene.consumer.acquire(spec)


@provokes(Reason.MEMORY_EXHAUSTED)
def _larger_than_the_arena(scene: Scene) -> pb.Part:
    spec = scene.spec(geometry=builders.geometry(layers=tuple(range(1000))), capacity_tokens=1000)
    with pytest.raises(grpc.RpcError, match="bytes was asked for"):
        scene.producer.reserve(spec)
    return scene.consumer.acquire(spec)


@provokes(Reason.PROBE_BELOW_THRESHOLD)
def _without_the_fingerprint_that_the_catalog_names(scene: Scene) -> pb.Part:
    spec = scene.spec(model=builders.model_tag(name="probed"))
    entry = encode_model(ModelEntry(tag=spec.model, fingerprint="/nowhere/fingerprint"))
    scene.declare("PutModel", catalog_pb.PutModelRequest(model=entry))
    scene.producer.publish(spec)
    return scene.consumer.acquire(spec)


@provokes(Reason.QUARANTINED)
def _quarantined(scene: Scene) -> pb.Part:
    spec = scene.published(model=builders.model_tag(name="contaminated"))
    target = catalog_pb.QuarantineTarget(model=catalog_pb.ModelPattern(name=spec.model.name))
    scene.declare("Quarantine", catalog_pb.QuarantineRequest(target=target, why="it is a test"))
    return scene.consumer.acquire(spec)


@provokes(Reason.DRAINING)
def _while_its_leases_come_home(_: Scene) -> pb.Part:
    with running_bridge("--drain-seconds", "60") as bridge:
        stopping = Scene(bridge)
        spec = stopping.published()
        lease = stopping.producer.acquire(spec).kv
        bridge.process.terminate()
        part: pb.Part = wait_for(
            lambda: (part := stopping.consumer.acquire(spec)).WhichOneof("directive") == "text" and part
        )
        stopping.producer.release(lease.lease_token)
        stopping.close()
    return part


@provokes(Reason.FORMAT_UNSUPPORTED)
def _of_a_later_release(_: Scene) -> pb.Part:
    with running_bridge(module="tests.future_bridge") as bridge:
        later = Scene(bridge)
        spec = later.spec()
        later.producer.publish(spec)
        assert later.consumer.acquire(spec, format_version_max=2).WhichOneof("directive") == "kv"
        part = later.consumer.acquire(spec, format_version_max=1)
        later.close()
    return part


ELSEWHERE = {
    Reason.TRANSFER_TIMEOUT: "it takes a payload of gigabytes, in test_deadlines",
    Reason.TRANSFER_FAILED: "it takes two nodes and a network between them that fails, in tests/network/test_pulls.py",
}
"""Reasons that this file does not provoke, and why."""
NO_TEXT = frozenset({Reason.PAYLOAD_UNKNOWN, Reason.OWNER_UNREACHABLE})
"""Reasons for which the node has no text, because it knows no payload."""


def test_no_reason_is_missing() -> None:
    """Each is provoked here, or it is said why not."""
    assert set(PROVOKED) | set(ELSEWHERE) == set(Reason) - SDK_ONLY_REASONS
    assert not set(PROVOKED) & set(ELSEWHERE)


@pytest.mark.parametrize("reason", PROVOKED)
def test_it_is_given_with_the_text(scene: Scene, reason: Reason) -> None:
    """The answer is text, with this reason and a detail, and the producer's words wherever the node has them."""
    part = PROVOKED[reason](scene)
    if reason not in NO_TEXT:
        refused(part, reason)
    assert part.text.reason == types_pb2.Reason.Value(f"REASON_{reason}")
    assert part.text.detail
