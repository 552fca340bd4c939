"""A bridge with a fingerprint in its catalog refuses, at commit, caches that are not those of their tokens."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbridge
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.integrations.transformers import cache_geometry, extract
from kvbridge.integrations.transformers.probe import build_fingerprint
from kvbridge.probe import save_fingerprint
from tests import builders
from tests.harness import BridgeProcess, running_bridge
from tests.integration.transformers.tiny import model, prefill, token_ids

TAG = builders.model_tag()
IDS = token_ids(40)
CATALOG = """\
defaults: {{tokens_min_unmeasured: 1, breaker: {{bad_share_max: 1}}}}
models:
  - tag:
      name: {tag.name}
      revision: "{tag.revision}"
      weight_dtype: {tag.weight_dtype}
      tokenizer_digest: {tag.tokenizer_digest}
    fingerprint: {fingerprint}
"""


@pytest.fixture(scope="module")
def llama() -> Any:
    """Return a tiny model."""
    return model()


@pytest.fixture(scope="module")
def probing_bridge(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BridgeProcess]:
    """Run a bridge that probes caches of the tiny model's version."""
    directory = tmp_path_factory.mktemp("catalog")
    fingerprint = directory / "tiny.fingerprint"
    save_fingerprint(build_fingerprint(llama, TAG, first_tokens=(IDS[0],)), fingerprint)
    yield from _bridge(directory, fingerprint)


def _bridge(directory: Path, fingerprint: Path) -> Iterator[BridgeProcess]:
    catalog = directory / "catalog.yaml"
    catalog.write_text(CATALOG.format(tag=TAG, fingerprint=fingerprint), encoding="utf-8")
    with running_bridge("--catalog", str(catalog)) as process:
        yield process


def handed_over(
    process: BridgeProcess, of: Any, ids: list[int], declared: list[int], **declares: Any
) -> kvbridge.Handoff:
    """Publish what the model computes for `ids` as the cache of `declared`, and acquire it."""
    geometry = cache_geometry(of)
    cache = extract(prefill(of, ids), geometry)
    with kvbridge.connect(process.target) as bridge:
        key = str(uuid.uuid4())
        publication = bridge.publish(key, model=TAG, geometry=geometry, tokens=declared, text="the text", **declares)
        with publication as slot:
            for layer, values in zip(geometry.layers, cache.layers, strict=True):
                slot.write(layer, values.keys, values.values)
        return bridge.acquire(
            key,
            model=TAG,
            tokens=declared,
            geometry=geometry,
            first_position=declares.get("first_position", 0),
            timeout=10.0,
        )


def test_a_right_cache_passes_and_its_figures_are_kept(probing_bridge: BridgeProcess, llama: Any) -> None:
    """The probe lets a right cache through, and an explanation of the handoff shows what it measured."""
    handoff = handed_over(probing_bridge, llama, IDS, IDS)
    assert handoff.kv is not None, (handoff.reason, handoff.detail)


WRONG: list[tuple[str, list[int], dict[str, Any]]] = [
    ("another text", token_ids(40, seed=9), {}),
    ("a sequence shifted by one", [*IDS[1:], IDS[0]], {}),
    ("halves that changed places", [*IDS[20:], *IDS[:20]], {}),
    ("other positions", IDS, {"first_position": 3}),
]


@pytest.mark.parametrize(("declared", "declares"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_cache_that_is_not_that_of_its_tokens_is_refused(
    probing_bridge: BridgeProcess, llama: Any, declared: list[int], declares: dict[str, Any]
) -> None:
    """Whoever asks for it gets the text, because the values do not belong to the declared tokens."""
    handoff = handed_over(probing_bridge, llama, IDS, declared, **declares)
    assert handoff.reason is Reason.PROBE_BELOW_THRESHOLD
    assert handoff.text == "the text"


def test_a_cache_of_another_revision_is_refused(probing_bridge: BridgeProcess) -> None:
    """Weights from another seed under the same tag do not pass."""
    handoff = handed_over(probing_bridge, model(seed=7), IDS, IDS)
    assert handoff.reason is Reason.PROBE_BELOW_THRESHOLD


def test_a_fingerprint_that_cannot_be_had_lets_nothing_pass(llama: Any, tmp_path: Path) -> None:
    """A catalog that asks for a probe which cannot be made gives the text."""
    for process in _bridge(tmp_path, tmp_path / "missing.fingerprint"):
        handoff = handed_over(process, llama, IDS, IDS)
        assert handoff.reason is Reason.PROBE_BELOW_THRESHOLD
        assert "cannot be used" in handoff.detail


def test_a_fingerprint_of_another_version_lets_nothing_pass(llama: Any, tmp_path: Path) -> None:
    """A file that the catalog names for the wrong version is not believed."""
    other = ModelTag(name="other", revision="r", weight_dtype="float32", tokenizer_digest="t0")
    save_fingerprint(build_fingerprint(llama, other, first_tokens=(IDS[0],)), tmp_path / "other.fingerprint")
    for process in _bridge(tmp_path, tmp_path / "other.fingerprint"):
        assert handed_over(process, llama, IDS, IDS).reason is Reason.PROBE_BELOW_THRESHOLD
