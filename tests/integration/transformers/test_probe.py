"""Fingerprints made from models, and what they say of the caches that the models compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbridge.cli import main
from kvbridge.core.geometry import DimensionOrder, PositionKind
from kvbridge.core.tags import ModelTag
from kvbridge.demo import checkpoint, document
from kvbridge.integrations.transformers import ModelPort, cache_geometry, cache_of, extract, model_tag, probe
from kvbridge.integrations.transformers.checkpoints import load_local
from kvbridge.integrations.transformers.families import FAMILIES
from kvbridge.integrations.transformers.probe import (
    build_fingerprint,
    descriptor_of,
    likely_first_tokens,
    slot_of,
)
from kvbridge.probe import (
    Fingerprint,
    FingerprintBuildError,
    ProbeFinding,
    check_tokens,
    load_fingerprint,
    save_fingerprint,
)
from kvbridge.probe.fingerprint import FIRST_TOKENS_MAX
from tests import builders
from tests.integration.transformers.test_families import SCALINGS, family_model
from tests.integration.transformers.tiny import VOCABULARY, model, prefill, token_ids, tokenizer

TAG = builders.model_tag()
IDS = token_ids(40)


def probed(
    of: Any,
    fingerprint: Fingerprint,
    ids: Sequence[int] = IDS,
    *,
    declared: Sequence[int] | None = None,
    order: DimensionOrder = DimensionOrder.HND,
    **changes: Any,
) -> ProbeFinding:
    """Let a model compute the cache of `ids`, and probe it as that of the declared ones."""
    geometry = cache_geometry(of, order=order)
    cache = extract(prefill(of, ids), geometry)
    descriptor = descriptor_of(cache, geometry, fingerprint.model, ids if declared is None else declared)
    return check_tokens(fingerprint, replace(descriptor, **changes), slot_of(cache, geometry), sample_tokens=None)


ROTATING = [name for name, family in FAMILIES.items() if family.kind is PositionKind.ROPE]


@pytest.mark.parametrize("model_type", ROTATING)
def test_every_rotating_family_has_a_fingerprint(model_type: str) -> None:
    """Norms, biases, scaled embeddings and fused projections come out right, because the model computes them itself."""
    of = family_model(model_type)
    fingerprint = build_fingerprint(of, TAG, first_tokens=(1, 5))
    finding = probed(of, fingerprint, [5, *IDS], order=DimensionOrder.NHD)
    assert finding.problem is None
    assert finding.figures["key_error_max"] < 1e-3
    assert finding.figures["value_error_max"] < 1e-3
    wrong = probed(of, fingerprint, declared=[*IDS[1:], IDS[0]])
    assert wrong.problem is not None
    shifted = probed(of, fingerprint, first_position=1)
    turns = cache_geometry(of).group_of(0).position_encoding.kind is PositionKind.ROPE
    assert (shifted.problem is not None) is turns


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_rotations_are_turned_back(scaling: str) -> None:
    """Linear, Llama 3 and YaRN scaling, with the factor by which YaRN multiplies keys."""
    of = family_model("llama", rope_parameters=dict(SCALINGS[scaling]), head_dim=64)
    fingerprint = build_fingerprint(of, TAG, first_tokens=(IDS[0],))
    finding = probed(of, fingerprint)
    assert finding.problem is None
    assert finding.figures["key_layers_first_compared"] == len(cache_geometry(of).layers)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_in_16_bits_pass(dtype: str, tmp_path: Path) -> None:
    """A coarser type has wider limits, which other weights still exceed."""
    loaded = []
    for seed in range(2):
        model(seed=seed).save_pretrained(tmp_path / str(seed))
        tokenizer().save_pretrained(tmp_path / str(seed))
        loaded.append(load_local(tmp_path / str(seed), dtype=dtype)[0])
    fingerprint = build_fingerprint(loaded[0], TAG)
    assert probed(loaded[0], fingerprint).problem is None
    assert probed(loaded[1], fingerprint).problem is not None


def test_a_change_in_any_layer_shows_at_the_first_token() -> None:
    """Where layer 0 is the same, a known first token still tells another version."""
    of, other = model(), model()
    fingerprint = build_fingerprint(of, TAG, first_tokens=(IDS[0],))
    with torch.no_grad():
        other.model.layers[2].self_attn.v_proj.weight.mul_(1.5)
    finding = probed(other, fingerprint)
    assert finding.problem is not None
    assert "VALUE does not hold what the first token gives there in layer" in finding.problem
    assert "layer 0" not in finding.problem


def test_padding_tokens_in_a_text_are_right() -> None:
    """Their embedding is zero, and so may be their keys and values in all layers."""
    of = model()
    fingerprint = build_fingerprint(of, TAG)
    for ids in ([0], [0] * 40, [0, 0, *IDS], [*IDS, 0, 0]):
        assert probed(of, fingerprint, ids).problem is None


def test_models_that_add_positions_to_tokens_are_refused() -> None:
    """A token of theirs has another key at every position."""
    with pytest.raises(FingerprintBuildError, match="adds positions to its tokens"):
        build_fingerprint(family_model("gpt2"), TAG)


def test_a_model_in_training_is_refused() -> None:
    """Dropout would make its keys random."""
    with pytest.raises(FingerprintBuildError, match="call eval"):
        build_fingerprint(model().train(), TAG)


@pytest.mark.parametrize("first_tokens", [(VOCABULARY,), (-1,), (1, 1), tuple(range(FIRST_TOKENS_MAX + 1))])
def test_first_tokens_that_are_none_are_refused(first_tokens: tuple[int, ...]) -> None:
    """Outside the vocabulary, twice, or too many."""
    with pytest.raises(FingerprintBuildError, match="first_tokens"):
        build_fingerprint(model(), TAG, first_tokens=first_tokens)


def test_a_model_whose_own_caches_do_not_pass_gets_no_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a model computes one token otherwise than many, its fingerprint would refuse right caches."""
    of = model()
    forward = of.model.embed_tokens.forward

    def depends_on_the_length(tokens: torch.Tensor) -> Any:
        return forward(tokens) * (1 + 0.5 * (tokens.shape[1] > 1) * torch.rand(1, tokens.shape[1], 1))

    monkeypatch.setattr(of.model.layers[0].input_layernorm, "forward", lambda hidden: hidden)
    monkeypatch.setattr(of.model.embed_tokens, "forward", depends_on_the_length)
    with pytest.raises(FingerprintBuildError, match="a cache of its own does not pass"):
        build_fingerprint(of, TAG)


def test_a_model_whose_tokens_are_all_alike_gets_no_fingerprint() -> None:
    """It would confirm anything."""
    of = model()
    with torch.no_grad():
        of.model.embed_tokens.weight.copy_(of.model.embed_tokens.weight[1:2].clone())
    with pytest.raises(FingerprintBuildError, match="do not tell tokens apart"):
        build_fingerprint(of, TAG)


def test_the_model_is_as_it_was() -> None:
    """Neither weights nor later passes change."""
    of = model()
    before, tag = prefill(of, IDS).layers[3].keys, model_tag(of, tokenizer())
    build_fingerprint(of, TAG)
    assert model_tag(of, tokenizer()) == tag
    assert torch.equal(prefill(of, IDS).layers[3].keys, before)


def test_first_tokens_are_found() -> None:
    """What the configuration and the tokenizer begin with, and what a chat template does, each once."""
    chat = "{% for message in messages %}c{{ message['content'] }}{% endfor %}"
    assert likely_first_tokens(model(), tokenizer(chat_template=chat)) == (1, 0, 5)
    assert likely_first_tokens(model(bos_token_id=None), None) == ()
    refusing = tokenizer(chat_template="{{ raise_exception('no') }}", bos_token=None)
    assert likely_first_tokens(model(bos_token_id=VOCABULARY), refusing) == ()


def test_the_command_makes_what_producers_publish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder's fingerprint has the tag that a port over the same folder has, and shows what it holds."""
    monkeypatch.setattr(probe, "SEQUENCES", 2)
    folder, file = tmp_path / "model", tmp_path / "f.kvprobe"
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    arguments = ["probe", "build", "--model", str(folder), "--output", str(file), "--name", "tiny"]
    assert main([*arguments, "--first-token", "9"]) == 0
    port = ModelPort(*load_local(folder), name="tiny")
    fingerprint = load_fingerprint(file, model=port.tag)
    assert fingerprint.first_tokens == (1, 0, 20, 9)
    capsys.readouterr()
    assert main(["probe", "show", str(file)]) == 0
    assert port.tag.revision in capsys.readouterr().out
    assert main(["probe", "show", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["vocabulary"] == VOCABULARY


def test_the_command_tells_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No folder, no such element type, no checkpoint in it, and no fingerprint: one line each, and status 1."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    for arguments, problem in (
        (["build", "--model", str(tmp_path), "--output", "x"], "is not a folder with a config.json"),
        (["build", "--model", str(empty), "--output", "x", "--dtype", "int3"], "is not a floating"),
        (["build", "--model", str(empty), "--output", "x"], "cannot be loaded"),
        (["show", str(empty / "config.json")], "is not a fingerprint"),
    ):
        assert main(["probe", *arguments]) == 1
        assert problem in capsys.readouterr().err


@pytest.mark.model
def test_a_real_model_tells_its_own_caches(tmp_path: Path) -> None:
    """A real cache passes; another text, version, position and order of layers do not."""
    of, words = checkpoint.load(checkpoint.prepare())
    tag = ModelTag(name="real", revision="r", weight_dtype="float32", tokenizer_digest="t")
    save_fingerprint(build_fingerprint(of, tag, first_tokens=likely_first_tokens(of, words)), tmp_path / "f")
    fingerprint = load_fingerprint(tmp_path / "f", model=tag)
    assert (tmp_path / "f").stat().st_size < 10 << 20
    ids = document.token_ids(words)[:100]
    geometry = cache_geometry(of)
    with torch.inference_mode():
        cache = extract(cache_of(of(torch.tensor([ids]), use_cache=True)), geometry)
    slot, right = slot_of(cache, geometry), descriptor_of(cache, geometry, tag, ids)
    assert check_tokens(fingerprint, right, slot).problem is None
    for wrong in (replace(right, first_position=1), descriptor_of(cache, geometry, tag, [*ids[1:], ids[0]])):
        assert check_tokens(fingerprint, wrong, slot).problem is not None
    layers = list(cache.layers)
    layers[9], layers[21] = replace(layers[21], layer=9), replace(layers[9], layer=21)
    finding = check_tokens(fingerprint, right, slot_of(replace(cache, layers=tuple(layers)), geometry))
    assert finding.problem == "KEY looks like another layer in layers 9, 21"
    checkpoint.drift(of)
    with torch.inference_mode():
        drifted = extract(cache_of(of(torch.tensor([ids]), use_cache=True)), geometry)
    assert check_tokens(fingerprint, right, slot_of(drifted, geometry)).problem is not None
    assert np.isfinite(list(finding.figures.values())).all()
