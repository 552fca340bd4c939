"""The digest of a tokenizer: of everything that decides which ids a text or a conversation becomes."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from kvbridge.integrations.transformers.errors import UnsupportedModelError

_SWITCHES = ("add_bos_token", "add_eos_token", "split_special_tokens")
"""Settings beside a fast tokenizer's own description that change ids."""
_STATE_OF_A_CALL = ("padding", "truncation")
"""What a call like `tokenizer(text, padding=True)` leaves behind in a fast tokenizer's description."""
_WITHOUT_INFLUENCE = frozenset(
    {
        "chat_template",
        "clean_up_tokenization_spaces",
        "merges_file",
        "model_max_length",
        "name_or_path",
        "pad_token",
        "padding_side",
        "processor_class",
        "special_tokens_map_file",
        "tokenizer_class",
        "tokenizer_file",
        "truncation_side",
        "vocab_file",
    }
)
"""Settings of a slow tokenizer that are recorded elsewhere, or change no id of an unpadded, uncut text."""


def tokenizer_digest(tokenizer: Any) -> str:
    """Return `sha256:` and 64 hex digits over vocabulary, rules, special tokens and chat template.

    Padding and truncation, which calls switch on and off, are left out, and so is which token pads, unless the chat
    template uses it: neither changes the ids of a text. A tokenizer gives the same digest before and after saving and
    loading, and under all supported releases.

    Raises:
        UnsupportedModelError: the class is not the library's own, so that the description may not say all; the error
            names it. Pass an explicit digest for such a tokenizer.
    """
    kind = type(tokenizer)
    if not kind.__module__.startswith("transformers."):
        raise UnsupportedModelError(
            kind.__name__,
            f"is defined in {kind.__module__}, not in transformers; pass tokenizer_digest= with a digest of your own",
        )
    rules = _fast_rules(tokenizer) if getattr(tokenizer, "is_fast", False) else _slow_rules(tokenizer)
    template = json.dumps(getattr(tokenizer, "chat_template", None), sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    if "pad_token" not in template:
        special.pop("pad_token", None)
    content = {"chat_template": template, "rules": rules, "special_tokens": special}
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _fast_rules(tokenizer: Any) -> dict[str, Any]:
    """Return the backend's own description, with the state of the last call left out."""
    description: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in _STATE_OF_A_CALL:
        description.pop(name, None)
    switches = {name: bool(getattr(tokenizer, name, False)) for name in _SWITCHES}
    return {"backend": description, "switches": switches}


def _slow_rules(tokenizer: Any) -> dict[str, Any]:
    """Return class, vocabulary, merges or model, and every plain setting of a tokenizer written in Python."""
    if not hasattr(tokenizer, "get_vocab"):
        raise UnsupportedModelError(
            type(tokenizer).__name__, "has no vocabulary to read; pass tokenizer_digest= with a digest of your own"
        )
    settings = {
        name: value
        for name, value in tokenizer.init_kwargs.items()
        if name not in _WITHOUT_INFLUENCE and isinstance(value, bool | int | float | str)
    }
    merges = sorted((rank, list(pair)) for pair, rank in getattr(tokenizer, "bpe_ranks", {}).items())
    return {
        "class": type(tokenizer).__name__,
        "vocabulary": tokenizer.get_vocab(),
        "added": {str(token): index for token, index in tokenizer.get_added_vocab().items()},
        "merges": merges,
        "model": _sentencepiece_model(tokenizer),
        "settings": settings,
    }


def _sentencepiece_model(tokenizer: Any) -> str:
    model = getattr(tokenizer, "sp_model", None)
    return "" if model is None else base64.b64encode(model.serialized_model_proto()).decode()
