"""Caches that went through an aligner, or have to: exactly the one that the catalog has for exactly two models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from kvbridge.core.descriptor import PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.wire import decode_aligner_tag, encode_aligner_tag, encode_model_tag
from tests import builders
from tests.api import CALL_SECONDS, ApiClient, request_id
from tests.harness import BridgeProcess, running_bridge
from tests.integration.server.refusals import refused

TARGET = builders.model_tag(name="target", revision="xxh3:0f")
ALIGNER = AlignerTag(name="bridge", version="1", digest="d1", source=builders.model_tag(), target=TARGET)
ALIGNER_CHANGES: list[dict[str, Any]] = [
    {"version": "2"},
    {"digest": "d2"},
    *({"source": replace(ALIGNER.source, **{each.name: "x"})} for each in fields(ModelTag)),
    *({"target": replace(ALIGNER.target, **{each.name: "x"})} for each in fields(ModelTag)),
]
"""Every field of the tag but the name, by which the catalog is searched."""


class Catalogued:
    """A bridge whose catalog is changed through the API, with a payload that was aligned and one that was not."""

    def __init__(self, bridge: BridgeProcess) -> None:
        self.client = ApiClient(bridge)
        self._catalog = CatalogServiceStub(self.client.channel)
        policy = catalog_pb.RoutePolicy(breaker=catalog_pb.BreakerPolicy(bad_share_max=1))
        self.call("PutRoute", catalog_pb.PutRouteRequest(route=catalog_pb.Route(name="all", policy=policy)))
        self.put(ALIGNER)
        self.plain = builders.spec(key="plain", linger_seconds=600.0)
        self.aligned = replace(self.plain, key="aligned", aligner=ALIGNER)
        for spec in (self.plain, self.aligned):
            self.client.publish(spec)

    def call(self, method: str, request: Any) -> Any:
        """Call a method of the catalog."""
        request.request_id = request_id()
        return getattr(self._catalog, method)(request, metadata=self.client.metadata, timeout=CALL_SECONDS)

    def put(self, tag: AlignerTag, **changes: Any) -> None:
        """Add an aligner that is good and validated, but for the changes."""
        entry = {
            "alignment_error": 0.01,
            "calibration": {"general_tokens": 9, "in_domain_tokens": 1},
            "validated": True,
        }
        aligner = catalog_pb.CatalogAligner(tag=encode_aligner_tag(tag), **{**entry, **changes})
        self.call("PutAligner", catalog_pb.PutAlignerRequest(aligner=aligner))

    def remove(self, tag: AlignerTag) -> None:
        """Take an aligner out of the catalog."""
        self.call("RemoveAligner", catalog_pb.RemoveAlignerRequest(tag=encode_aligner_tag(tag)))

    def acquire(self, spec: PayloadSpec, expected: AlignerTag | None, **changes: Any) -> pb.Part:
        """Ask for a payload as the target model that expects an aligner."""
        named = {} if expected is None else {"aligner": encode_aligner_tag(expected)}
        return self.client.acquire(spec, **{"model": encode_model_tag(TARGET), **named, **changes})


@pytest.fixture(scope="module")
def catalogued() -> Iterator[Catalogued]:
    """Run a bridge whose catalog is not read from a file."""
    with running_bridge("--unmeasured-tokens-min=1") as bridge:
        catalogued = Catalogued(bridge)
        yield catalogued
        catalogued.client.close()


def test_a_validated_aligner_bridges_exactly_its_two_models(catalogued: Catalogued) -> None:
    """Applied, expected, or both: the cache is handed over, and the answer says what is still to be applied."""
    for spec, expected, to_apply in [
        (catalogued.aligned, ALIGNER, None),
        (catalogued.aligned, None, None),
        (catalogued.plain, ALIGNER, ALIGNER),
    ]:
        part = catalogued.acquire(spec, expected)
        assert part.WhichOneof("directive") == "kv", part.text
        said = decode_aligner_tag(part.kv.aligner_to_apply) if part.kv.HasField("aligner_to_apply") else None
        assert said == to_apply


def test_without_an_aligner_two_models_do_not_meet(catalogued: Catalogued) -> None:
    """A consumer that names none is not given another model's cache, though there is an aligner for it."""
    refused(catalogued.acquire(catalogued.plain, None), Reason.MODEL_VERSION_MISMATCH, "name", "'target'", "'tiny'")


@pytest.mark.parametrize("changes", ALIGNER_CHANGES)
def test_another_aligner_is_expected_than_was_applied(catalogued: Catalogued, changes: dict[str, Any]) -> None:
    """Whatever field differs, the detail names it and both values, whether or not the catalog has the other."""
    expected = replace(ALIGNER, **changes)
    [difference] = expected.differences(ALIGNER)
    refused(catalogued.acquire(catalogued.aligned, expected), Reason.ALIGNER_VERSION_MISMATCH, str(difference))
    catalogued.put(expected)
    refused(catalogued.acquire(catalogued.aligned, expected), Reason.ALIGNER_VERSION_MISMATCH, str(difference))
    catalogued.remove(expected)


@pytest.mark.parametrize("changes", ALIGNER_CHANGES)
def test_another_aligner_is_expected_than_the_catalog_has(catalogued: Catalogued, changes: dict[str, Any]) -> None:
    """The consumer would apply it itself: it must be in the catalog, and bound to exactly these two models."""
    expected = replace(ALIGNER, **changes)
    [listed] = expected.differences(ALIGNER)
    named = (listed.field, repr(listed.expected), repr(listed.found))
    refused(catalogued.acquire(catalogued.plain, expected), Reason.ALIGNER_VERSION_MISMATCH, *named)
    catalogued.put(expected)
    bound = (expected.source, expected.target) == (ALIGNER.source, ALIGNER.target)
    part = catalogued.acquire(catalogued.plain, expected)
    if bound:
        assert decode_aligner_tag(part.kv.aligner_to_apply) == expected
    else:
        [difference] = expected.differences(ALIGNER)
        refused(part, Reason.ALIGNER_VERSION_MISMATCH, difference.field, difference.expected, difference.found)
    catalogued.remove(expected)
    refused(catalogued.acquire(catalogued.plain, expected), Reason.ALIGNER_VERSION_MISMATCH)


@pytest.mark.parametrize("changes", ALIGNER_CHANGES)
def test_another_aligner_was_applied_than_the_catalog_has(catalogued: Catalogued, changes: dict[str, Any]) -> None:
    """What a producer applied must be in the catalog, field by field, and lead to the consumer's model."""
    applied = replace(ALIGNER, **changes)
    spec = replace(catalogued.aligned, key=f"aligned/{changes}", aligner=applied, model=applied.source)
    catalogued.client.publish(spec)
    [listed] = applied.differences(ALIGNER)
    named = (listed.field, repr(listed.expected), repr(listed.found))
    refused(catalogued.acquire(spec, None), Reason.ALIGNER_VERSION_MISMATCH, *named)
    catalogued.put(applied)
    part = catalogued.acquire(spec, None)
    if applied.target != TARGET:
        [difference] = TARGET.differences(applied.target)
        refused(part, Reason.ALIGNER_VERSION_MISMATCH, f"target.{difference}")
    elif applied.source.tokenizer_digest != TARGET.tokenizer_digest:
        refused(part, Reason.TOKENIZER_MISMATCH, "tokenizer_digest", "'t0'", "'x'")
    else:
        assert part.WhichOneof("directive") == "kv", part.text
    catalogued.remove(applied)


@pytest.mark.parametrize("spec_name", ["plain", "aligned"])
def test_an_aligner_of_another_name_is_missing(catalogued: Catalogued, spec_name: str) -> None:
    """The catalog has none of that name."""
    spec: PayloadSpec = getattr(catalogued, spec_name)
    unknown = replace(ALIGNER, name="unknown")
    if spec.aligner is not None:
        spec = replace(spec, key="aligned by an unknown one", aligner=unknown)
        catalogued.client.publish(spec)
    refused(catalogued.acquire(spec, unknown), Reason.ALIGNER_MISSING, "'unknown'")


def test_an_aligner_that_nobody_validated_is_refused(catalogued: Catalogued) -> None:
    """It is in the catalog, and nobody has said that it may be used."""
    unvalidated = replace(ALIGNER, version="3")
    catalogued.put(unvalidated, validated=False)
    refused(catalogued.acquire(catalogued.plain, unvalidated), Reason.ALIGNER_VERSION_MISMATCH, "validated")


def test_an_aligner_with_too_large_an_error_is_refused(catalogued: Catalogued) -> None:
    """The route's limit and the measured error are both named."""
    poor = replace(ALIGNER, version="4")
    catalogued.put(poor, alignment_error=0.5)
    refused(catalogued.acquire(catalogued.plain, poor), Reason.ALIGNMENT_ERROR_EXCEEDED, 0.5, 0.1)
