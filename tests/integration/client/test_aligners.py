"""Caches of another model's: handed over where the catalog has an aligner, and never used as the consumer's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import torch

from kvbridge import AlignerNotAppliedError, AlignerTag, ArgumentValueError, Bridge, Handoff, Reason, connect
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.wire import encode_aligner_tag
from tests.api import CALL_SECONDS, request_id
from tests.harness import running_bridge
from tests.integration.client.kv import DIM, HEADS, MODEL, SHAPE, Contents

TARGET = replace(MODEL, name="target", revision="xxh3:0f")
ALIGNER = AlignerTag(name="bridge", version="1", digest="d1", source=MODEL, target=TARGET)


@pytest.fixture(scope="module")
def bridge() -> Iterator[Bridge]:
    """Connect to a bridge whose catalog has the aligner."""
    with running_bridge("--unmeasured-tokens-min=1") as process:
        with grpc.insecure_channel(process.target) as channel:
            entry = pb.CatalogAligner(
                tag=encode_aligner_tag(ALIGNER), calibration=pb.CalibrationData(general_tokens=1), validated=True
            )
            CatalogServiceStub(channel).PutAligner(
                pb.PutAlignerRequest(request_id=request_id(), aligner=entry),
                metadata=(("kvbridge-client", "by-value-catalog-changer"),),
                timeout=CALL_SECONDS,
            )
        with connect(process.target) as bridge:
            yield bridge


def acquire(contents: Contents, bridge: Bridge, key: str, **options: Any) -> Handoff:
    """Ask as the target model."""
    return contents.acquire(bridge, key, **{"model": TARGET, "geometry": SHAPE, **options})


def test_an_aligned_cache_is_the_targets_own(bridge: Bridge) -> None:
    """What its producer has aligned is read by the target as if it had computed it, and by the source not at all."""
    contents = Contents()
    assert contents.publish(bridge, "aligned", aligner=ALIGNER).published
    for named in (ALIGNER, None):
        with acquire(contents, bridge, "aligned", aligner=named) as handoff:
            contents.assert_in(handoff)
            assert handoff.aligner_to_apply is None
            assert handoff.descriptor is not None
            assert handoff.descriptor.aligner == ALIGNER
            handoff.scatter_paged(0, _blocks(), range(8))
    with contents.acquire(bridge, "aligned") as handoff:
        assert handoff.reason is Reason.ALIGNER_VERSION_MISMATCH


def test_what_is_still_to_be_aligned_is_not_read_by_accident(bridge: Bridge) -> None:
    """Who named the aligner reads the source's layers to apply it; whatever would use them as they are refuses."""
    contents = Contents()
    contents.publish(bridge, "plain")
    with acquire(contents, bridge, "plain", aligner=ALIGNER) as handoff:
        assert handoff.aligner_to_apply == ALIGNER
        contents.assert_in(handoff)
        assert torch.equal(handoff.copy_layer(0)[0], contents.layers[0][0])
        with pytest.raises(AlignerNotAppliedError, match="bridge"):
            handoff.scatter_paged(0, _blocks(), range(8))
        with pytest.raises(AlignerNotAppliedError):
            handoff.as_transformers_cache()
    keys = ["plain"]
    with bridge.acquire_plan(keys, model=TARGET, tokens=contents.ids, aligner=ALIGNER, timeout=10) as plan:
        assert plan.leading()[0].aligner_to_apply == ALIGNER
        with pytest.raises(AlignerNotAppliedError):
            plan.as_transformers_cache()
    batch = bridge.acquire_batch(keys, model=TARGET, tokens=[contents.ids], aligner=ALIGNER, timeout=10)
    with batch, pytest.raises(AlignerNotAppliedError):
        batch.collate()


def test_who_names_no_aligner_is_not_given_another_models_cache(bridge: Bridge) -> None:
    """Nor is who names one that the catalog does not have."""
    contents = Contents()
    contents.publish(bridge, "not named")
    with acquire(contents, bridge, "not named") as handoff:
        assert handoff.reason is Reason.MODEL_VERSION_MISMATCH
    with acquire(contents, bridge, "not named", aligner=replace(ALIGNER, name="other")) as handoff:
        assert handoff.reason is Reason.ALIGNER_MISSING
    with acquire(contents, bridge, "not named", aligner=replace(ALIGNER, version="2")) as handoff:
        assert handoff.reason is Reason.ALIGNER_VERSION_MISMATCH


def test_an_aligner_of_another_source_cannot_have_been_applied(bridge: Bridge) -> None:
    """The producer's model is the aligner's source; anything else is a mistake."""
    with pytest.raises(ArgumentValueError, match=r"aligner\.source"):
        Contents().publish(bridge, "mistake", aligner=replace(ALIGNER, source=TARGET))


def _blocks() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (8, 4, HEADS, DIM)
    return torch.zeros(shape), torch.zeros(shape)
