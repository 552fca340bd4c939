"""Tiny models with random weights, one for each layout of a cache, and small things that many tests need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from kvbridge.core.geometry import CacheGeometry
from kvbridge.integrations.transformers import ExtractedCache, cache_argument, cache_geometry, cache_of, extract

VOCABULARY = 64
WINDOW = 7
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
"""Settings of all models. Without an end token, generation always runs to its length."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "llama-gqa": {"model_type": "llama"},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-mqa": {"model_type": "llama", "num_key_value_heads": 1},
    "mistral": {"model_type": "mistral", "sliding_window": WINDOW},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
}
"""Settings of each model beside the common ones."""


def config(layout: str = "llama-gqa", **changes: Any) -> Any:
    """Return the configuration of a layout with some settings changed."""
    settings = {**COMMON, **LAYOUTS[layout], **changes}
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def model(layout: str = "llama-gqa", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of a layout whose weights follow from the seed."""
    torch.manual_seed(seed)
    build: Any = AutoModelForCausalLM.from_config
    return build(config(layout, **changes)).to(dtype).eval()


def token_ids(count: int, *, seed: int = 1) -> list[int]:
    """Return token ids that follow from the seed, special ones excluded."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, VOCABULARY, (count,), generator=generator)]


def prefill(of: Any, ids: Sequence[int], **arguments: Any) -> Any:
    """Return the library's own cache after one forward pass over `ids`."""
    with torch.no_grad():
        return cache_of(of(torch.tensor([list(ids)]), use_cache=True, **arguments))


def forward(of: Any, ids: Sequence[int], cache: Any) -> torch.Tensor:
    """Return the logits `[tokens, vocabulary]` of `ids` behind a cache, which grows."""
    with torch.no_grad():
        logits: torch.Tensor = of(torch.tensor([list(ids)]), use_cache=True, **{cache_argument(): cache}).logits[0]
    return logits


def continue_greedily(of: Any, suffix: Sequence[int], cache: Any, *, count: int = 12) -> tuple[list[int], torch.Tensor]:
    """Return the next `count` tokens behind cache and suffix, and the logits of every pass one below the other."""
    logits = [forward(of, suffix, cache)]
    tokens = [int(logits[0][-1].argmax())]
    while len(tokens) < count:
        logits.append(forward(of, tokens[-1:], cache))
        tokens.append(int(logits[-1][-1].argmax()))
    return tokens, torch.cat(logits)


def generate(of: Any, ids: Sequence[int], cache: Any = None, **arguments: Any) -> list[int]:
    """Return the eight tokens that `generate` puts behind `ids`, of which a cache may hold a prefix."""
    if cache is not None:
        arguments[cache_argument()] = cache
    with torch.no_grad():
        output = of.generate(torch.tensor([list(ids)]), do_sample=False, max_new_tokens=8, **arguments)
    return [int(token) for token in output[0, -8:]]


def windows(
    extracted: ExtractedCache, *, headroom: int = 0, padding: int = 5
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield copies of all layers as memory with head-room, whose heads lie apart as in a mapped slot."""
    for layer in extracted.layers:
        yield layer.layer, _window(layer.keys, headroom, padding), _window(layer.values, headroom, padding)


def _window(stored: torch.Tensor, headroom: int, padding: int) -> torch.Tensor:
    heads, tokens, dim = stored.shape
    memory = torch.full((heads, tokens + headroom + padding, dim), float("nan"), dtype=stored.dtype)
    window = memory[None, :, : tokens + headroom]
    window[0, :, :tokens] = stored
    return window


def snapshot_of(of: Any, ids: Sequence[int]) -> tuple[CacheGeometry, ExtractedCache]:
    """Return a model's geometry, and what its cache over `ids` holds."""
    geometry = cache_geometry(of)
    return geometry, extract(prefill(of, ids), geometry)


def tokenizer(**changes: Any) -> Any:
    """Return a tokenizer of single letters with a chat template."""
    letters = ["<s>", "</s>", "<pad>", *(chr(ord("a") + index) for index in range(26))]
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": "{{ messages }}"}
    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=backend, **{**settings, **changes})
