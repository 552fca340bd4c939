"""The digest of a tokenizer follows what decides the ids, and nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer, ByT5Tokenizer

from kvbridge.integrations.transformers import UnsupportedModelError, tokenizer_digest
from tests.integration.transformers.tiny import tokenizer

KNOWN = "sha256:a50e2738dddfb4331ede4a835df4788b188038791befee4a319bb35123e3d84f"
"""The digest of the tiny tokenizer."""
KNOWN_SLOW = "sha256:3a3b0ec6b8b2188b76efddbc1bfd6b1eeacbaa1d3dc31fbaae8eb2c119549f4b"
"""The digest of a tokenizer written in Python."""


def test_calls_leave_no_trace() -> None:
    """Padding and truncation, which a call leaves switched on, do not count."""
    tiny = tokenizer()
    before = tokenizer_digest(tiny)
    assert len(tiny(["a b c", "a"], padding=True, truncation=True, max_length=2)["input_ids"]) == 2
    assert tiny.backend_tokenizer.padding is not None
    assert tokenizer_digest(tiny) == before
    tiny.padding_side = "left"
    tiny.model_max_length = 10
    assert tokenizer_digest(tiny) == before


def test_which_token_pads_does_not_count() -> None:
    """Padding with the end token, as is often done, changes no id of a text, unless the template says so."""
    tiny = tokenizer()
    before = tokenizer_digest(tiny)
    tiny.pad_token = tiny.eos_token
    assert tokenizer_digest(tiny) == before
    padded = tokenizer(chat_template="{{ pad_token }}")
    before = tokenizer_digest(padded)
    padded.pad_token = padded.eos_token
    assert tokenizer_digest(padded) != before


def test_saving_and_loading_keeps_the_digest(tmp_path: Path) -> None:
    """A tokenizer is the same after it went through files."""
    tiny = tokenizer()
    tiny.save_pretrained(tmp_path)
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path)) == tokenizer_digest(tiny)


def test_everything_that_changes_ids_counts() -> None:
    """Template, vocabulary, special tokens, normalisation and settings each give another digest."""
    variants: dict[str, Any] = {name: tokenizer() for name in ("plain", "token", "special", "normal", "split")}
    variants["token"].add_tokens(["word"])
    variants["special"].add_special_tokens({"additional_special_tokens": ["<tool>"]})
    variants["normal"].backend_tokenizer.normalizer = normalizers.Lowercase()
    variants["split"].split_special_tokens = True
    variants["template"] = tokenizer(chat_template="{{ messages }}!")
    variants["templates"] = tokenizer(chat_template={"default": "{{ messages }}", "tool": "{{ tools }}"})
    variants["no template"] = tokenizer(chat_template=None)
    variants["end"] = tokenizer(eos_token="<pad>")
    digests = {name: tokenizer_digest(variant) for name, variant in variants.items()}
    assert len(set(digests.values())) == len(digests), digests


def test_the_digest_is_the_same_in_every_release() -> None:
    """Different releases of transformers and tokenizers describe this tokenizer alike."""
    assert tokenizer_digest(tokenizer()) == KNOWN
    assert tokenizer_digest(ByT5Tokenizer()) == KNOWN_SLOW


def test_slow_tokenizers() -> None:
    """A tokenizer written in Python is described by class, vocabulary, settings and template."""
    slow = ByT5Tokenizer()
    assert not slow.is_fast
    variants = {
        "plain": slow,
        "fewer": ByT5Tokenizer(extra_ids=100),
        "token": copy.deepcopy(slow),
        "template": copy.deepcopy(slow),
    }
    variants["token"].add_tokens(["word"])
    variants["template"].chat_template = "{{ messages }}"
    digests = {name: tokenizer_digest(variant) for name, variant in variants.items()}
    assert len(set(digests.values())) == len(digests), digests
    padded = ByT5Tokenizer()
    padded(["a", "bc"], padding=True)
    assert tokenizer_digest(padded) == digests["plain"]


def test_a_class_from_elsewhere_is_refused() -> None:
    """Code that is not the library's may make any ids; the caller has to say what it is."""

    class Mine(ByT5Tokenizer):
        """A tokenizer of somebody's own."""

    with pytest.raises(UnsupportedModelError, match="tokenizer_digest="):
        tokenizer_digest(Mine())
