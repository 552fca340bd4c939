"""The version tag of a model: what must be equal on both sides for a cache to mean the same."""

from __future__ import annotations

from typing import Any

from kvbridge.core.tags import ModelTag
from kvbridge.integrations.transformers.adapters import adapter_tag
from kvbridge.integrations.transformers.tokenizers import tokenizer_digest as digest_of_tokenizer
from kvbridge.integrations.transformers.unwrapping import unwrap
from kvbridge.integrations.transformers.weights import weight_dtype, weights_digest


def model_tag(
    model: Any, tokenizer: Any | None, *, name: str | None = None, tokenizer_digest: str | None = None
) -> ModelTag:
    """Return the tag of a loaded model with its tokenizer and its active adapters.

    The revision is a digest of the weights themselves, so that it holds for a model without a version and for one whose
    weights changed after loading. Reading them takes about as long as copying them once.

    Args:
        model: A causal language model of the library, plain, compiled or wrapped by PEFT.
        tokenizer: What turns texts into the ids that the model is given, or None.
        name: A name for people, the class name if absent. It is compared as well: give the same on both sides.
        tokenizer_digest: Replaces the computed digest; required if there is no tokenizer.

    Raises:
        ValueError: neither a tokenizer nor a digest is given.
        UnsupportedModelError: weights, adapters or tokenizer of a kind whose identity cannot be computed.
        InvalidFieldError: a given name or digest is empty, too long or unprintable.
    """
    if tokenizer_digest is None and tokenizer is None:
        raise ValueError("a tag needs a tokenizer or an explicit tokenizer_digest")
    base = unwrap(model)
    return ModelTag(
        name=type(base).__name__ if name is None else name,
        revision=weights_digest(model),
        adapter=adapter_tag(model),
        weight_dtype=weight_dtype(model),
        tokenizer_digest=digest_of_tokenizer(tokenizer) if tokenizer_digest is None else tokenizer_digest,
    )
