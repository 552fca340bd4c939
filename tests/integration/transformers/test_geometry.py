"""The geometry says what the model's cache is, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvbridge.core.geometry import (
    CacheGeometry,
    DimensionOrder,
    Dtype,
    LayerGroup,
    LayerKind,
    PositionEncoding,
    PositionKind,
    RopeParameters,
)
from kvbridge.integrations.transformers import UnsupportedCacheError, UnsupportedModelError, cache_geometry
from tests.integration.transformers.tiny import LAYOUTS, WINDOW, config, model, prefill


def rope(**changes: Any) -> PositionEncoding:
    """Return a rotation by half-split pairs."""
    return PositionEncoding(kind=PositionKind.ROPE, rope=RopeParameters(**{"theta": 10_000.0, **changes}))


def group(*layers: int, **changes: Any) -> LayerGroup:
    """Return a group like those of the tiny Llama."""
    fields: dict[str, Any] = {
        "kv_heads": 2,
        "head_dim_k": 8,
        "head_dim_v": 8,
        "dtype": Dtype.FLOAT32,
        "position_encoding": rope(),
    }
    return LayerGroup(layers=layers, **{**fields, **changes})


SLIDING = {"kind": LayerKind.SLIDING, "window_tokens": WINDOW, "stored_tokens_max": WINDOW - 1}
WIDE = {"head_dim_k": 16, "head_dim_v": 16}
EXPECTED = {
    "llama-gqa": (group(0, 1, 2, 3),),
    "llama-mha": (group(0, 1, 2, 3, kv_heads=4),),
    "llama-mqa": (group(0, 1, 2, 3, kv_heads=1),),
    "mistral": (group(0, 1, 2, 3, **SLIDING),),
    "gemma3": (
        group(0, 2, **SLIDING, **WIDE),
        group(1, 3, **WIDE, position_encoding=rope(theta=1_000_000.0)),
    ),
    "qwen2": (group(0, 1), group(2, 3, **SLIDING)),
    "qwen3": (group(0, 1, 2, 3, **WIDE),),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout(layout: str) -> None:
    """Heads, dimensions, windows and rotations of every tiny model are those of its configuration."""
    assert cache_geometry(model(layout)) == CacheGeometry(groups=EXPECTED[layout])
    assert cache_geometry(config(layout), dtype="float32") == CacheGeometry(groups=EXPECTED[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [3, 6, 7, 8, 20])
def test_the_library_stores_what_is_declared(layout: str, tokens: int) -> None:
    """Each layer of a real cache has the declared number of tokens, heads and elements, around the window, too."""
    tiny = model(layout)
    geometry = cache_geometry(tiny)
    for layer, cached in enumerate(prefill(tiny, range(3, 3 + tokens)).layers):
        of = geometry.group_of(layer)
        assert cached.keys.shape == (1, of.kv_heads, of.stored_tokens(tokens), of.head_dim_k)
        assert cached.values.shape == (1, of.kv_heads, of.stored_tokens(tokens), of.head_dim_v)


def test_dtype_and_order_can_be_said() -> None:
    """The model's own dtype is the default; a caller who knows better says so."""
    assert cache_geometry(config(dtype="bfloat16")).groups[0].dtype is Dtype.BFLOAT16
    assert cache_geometry(config(), dtype=torch.float16).groups[0].dtype is Dtype.FLOAT16
    assert cache_geometry(model(), order=DimensionOrder.NHD).groups[0].order is DimensionOrder.NHD
    with pytest.raises(UnsupportedCacheError, match="float64"):
        cache_geometry(config(), dtype=torch.float64)
    with pytest.raises(UnsupportedCacheError, match="dtype"):
        cache_geometry(config())


CHANGES: dict[str, Callable[[], Any]] = {
    "plain": model,
    "theta": lambda: model(rope_theta=20_000.0),
    "linear scaling": lambda: model(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "other factor": lambda: model(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3": lambda: model(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    ),
    "yarn": lambda: model(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}),
    "yarn from longer": lambda: model(
        rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    ),
    "yarn, other attention": lambda: model(
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 2.0,
        }
    ),
    "heads": lambda: model("llama-mha"),
    "head dim": lambda: model(head_dim=16),
    "layers": lambda: model(num_hidden_layers=3),
    "window": lambda: model("mistral"),
    "other window": lambda: model("mistral", sliding_window=9),
    "gemma": lambda: model("gemma3"),
    "gemma, other local theta": lambda: model("gemma3", rope_local_base_freq=5_000.0),
    "gemma, other global theta": lambda: model("gemma3", rope_theta=5_000.0),
    "gemma, other layers": lambda: model("gemma3", layer_types=["full_attention", "sliding_attention"] * 2),
}


def test_every_change_of_the_cache_changes_the_geometry() -> None:
    """No two models whose caches differ in shape or angles share a geometry."""
    geometries = {name: cache_geometry(build()) for name, build in CHANGES.items()}
    for name, geometry in geometries.items():
        assert [other for other, same in geometries.items() if same == geometry] == [name]


def test_spellings_of_one_rotation_agree() -> None:
    """Old and new forms of the configuration give one geometry."""
    new = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
    }
    assert cache_geometry(model("gemma3", rope_parameters=new)) == cache_geometry(
        model("gemma3", rope_theta=5e5, rope_local_base_freq=7e3)
    )
    assert cache_geometry(model(rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == cache_geometry(
        model(rope_theta=5e5)
    )
    explicit = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    assert cache_geometry(model(rope_parameters={**yarn, **explicit})) == cache_geometry(
        model(rope_parameters=dict(yarn))
    )


def test_gemma_with_only_local_layers() -> None:
    """A configuration whose layers are all of one type keeps both rotations; each layer has its own."""
    tiny = model("gemma3", layer_types=["sliding_attention"] * 4)
    (only,) = cache_geometry(tiny).groups
    assert only == group(0, 1, 2, 3, **SLIDING, **WIDE)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "t5": ("T5Config", {}),
    "gemma3": ("Gemma3Config", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "llama4_text": ("llama4_text", {}),
    "qwen3_next": ("qwen3_next", {}),
    "gemma3n_text": ("gemma3n_text", {}),
    "bloom": ("bloom", {}),
    "bert": ("bert", {}),
    "falcon_h1": ("falcon_h1", {}),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_architectures_are_refused_by_name(model_type: str) -> None:
    """Recurrent, encoder-decoder, multimodal, latent, chunked, hybrid and sharing models are not guessed at."""
    name, settings = REFUSED[model_type]
    with pytest.raises(UnsupportedCacheError) as refusal:
        cache_geometry(AutoConfig.for_model(model_type, **settings), dtype="float32")
    assert refusal.value.name == name


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("dynamic", lambda: config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})),
        (
            "longrope",
            lambda: config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 32,
                }
            ),
        ),
        ("partial_rotary_factor", lambda: config(partial_rotary_factor=0.5)),
        ("sliding_window", lambda: config("mistral", sliding_window=1)),
        ("use_bidirectional_attention", lambda: config("gemma3", use_bidirectional_attention=True)),
        ("num_kv_shared_layers", lambda: _with(config(), num_kv_shared_layers=2)),
        ("attention_chunk_size", lambda: _with(config(), attention_chunk_size=8)),
        ("chunked_attention", lambda: _with(config(), layer_types=["chunked_attention"] * 4)),
        ("linear_attention", lambda: _with(config(), layer_types=["linear_attention"] * 4)),
        ("rope_parameters", lambda: _with(config(), rope_parameters=None)),
        ("rope_theta", lambda: _with(config(), rope_parameters={"rope_type": "default", "rope_theta": None})),
        ("factor", lambda: _with(config(), rope_parameters={"rope_type": "linear", "rope_theta": 1e4})),
        ("invented", lambda: _with(config(), rope_parameters={"rope_type": "invented", "rope_theta": 1e4})),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(name: str, build: Callable[[], Any]) -> None:
    """Angles that depend on the length at hand, shared or chunked layers and unknown settings are refused."""
    with pytest.raises(UnsupportedCacheError) as refusal:
        cache_geometry(build(), dtype="float32")
    assert refusal.value.name == name


def _with(of: Any, **changes: Any) -> Any:
    for name, value in changes.items():
        setattr(of, name, value)
    return of


def test_frequencies_that_were_cast_are_refused() -> None:
    """Casting a whole model to bfloat16 rounds its frequencies, and with them every key."""
    with pytest.raises(UnsupportedCacheError, match="frequencies of layer 0"):
        cache_geometry(model(dtype=torch.bfloat16, head_dim=32))


def test_frequencies_that_were_patched_are_refused() -> None:
    """A model whose rotation somebody stretched by hand does not compute what its configuration says."""
    for layout, name in (("llama-gqa", "inv_freq"), ("gemma3", "full_attention_inv_freq")):
        tiny = model(layout)
        getattr(tiny.model.rotary_emb, name).mul_(0.5)
        with pytest.raises(UnsupportedCacheError, match="frequencies"):
            cache_geometry(tiny)
    tiny = model()
    tiny.model.rotary_emb.attention_scaling = 2.0
    with pytest.raises(UnsupportedCacheError, match="frequencies"):
        cache_geometry(tiny)


def test_shards_and_strangers_are_refused() -> None:
    """A part of a model, and a model that is none of the library's, have no geometry here."""
    tiny = model()
    tiny._tp_size = 2
    with pytest.raises(UnsupportedCacheError, match="2 tensor-parallel ranks"):
        cache_geometry(tiny)
    with pytest.raises(UnsupportedModelError, match="Linear"):
        cache_geometry(torch.nn.Linear(2, 2))
