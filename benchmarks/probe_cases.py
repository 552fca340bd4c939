"""Right caches of the small real model, and what can be wrong with a cache."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pydoc_data import topics
from typing import Any

import torch

from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.geometry import CacheGeometry
from kvbridge.integrations.transformers import ExtractedCache, ExtractedLayer, cache_geometry, cache_of, extract
from kvbridge.integrations.transformers.probe import descriptor_of, slot_of
from kvbridge.probe import Fingerprint, ProbeFinding, check_tokens

LENGTH_MIN, LENGTH_MAX = 20, 400
FIRST_POSITIONS = (0, 0, 0, 1, 100, 4000)
"""Half of the caches begin a prompt; the others stand at other positions."""
FINE_TUNING_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One cache and what is declared of it."""

    fingerprint: Fingerprint
    """Of the declared model version."""
    geometry: CacheGeometry
    """Declared shape."""
    ids: tuple[int, ...]
    """Declared tokens."""
    first_position: int
    """Declared position of the first token."""
    keys: torch.Tensor
    """`[layers, heads, tokens, head dimension]`."""
    values: torch.Tensor
    """As the keys."""

    def check(self, sample_tokens: int | None) -> ProbeFinding:
        """Probe the cache as a node would."""
        return check_tokens(self.fingerprint, self.descriptor(), self.slot(), sample_tokens=sample_tokens)

    def slot(self) -> Any:
        """Return the bytes that a node would hold."""
        return slot_of(self._extracted(), self.geometry)

    def descriptor(self) -> PayloadDescriptor:
        """Return what a node would know."""
        return descriptor_of(self._extracted(), self.geometry, self.fingerprint.model, self.ids)

    def _extracted(self) -> ExtractedCache:
        layers = tuple(
            ExtractedLayer(layer=layer, keys=self.keys[layer], values=self.values[layer])
            for layer in range(len(self.keys))
        )
        return ExtractedCache(layers=layers, valid_length=len(self.ids), first_position=self.first_position)

    def with_layers(self, order: Sequence[int]) -> Case:
        """Return the cache with its layers in another order."""
        return replace(self, keys=self.keys[list(order)], values=self.values[list(order)])

    def with_tokens(self, order: Sequence[int]) -> Case:
        """Return the cache with its tokens in another order in all layers."""
        return replace(self, keys=self.keys[:, :, list(order)], values=self.values[:, :, list(order)])


ODD_TEXTS = {
    "one letter": "a" * 300,
    "one word": "the " * 150,
    "newlines": "\n" * 200,
    "dots": "." * 300,
    "zeros": "0 " * 150,
    "few words": "yes no " * 60,
    "dashes": "- - -- ---\n" * 40,
    "numbers": " ".join(str(number * number) for number in range(120)),
    "Chinese": "你好世界。今天天气很好。我们去公园散步吧。" * 8,
    "Russian": "Съешь ещё этих мягких французских булок, да выпей чаю. " * 6,
    "Arabic": "السلام عليكم ورحمة الله وبركاته " * 12,
    "emoji": "😀🚀🎉🔥" * 30,
    "C": "for (int i = 0; i < n; i++) { sum += a[i] * b[i]; }\n" * 10,
    "JSON": '{"id": 1, "name": "x", "tags": [1, 2, 3]},\n' * 15,
    "HTML": "<div class='a'><p>hi</p></div>" * 20,
    "mostly newlines": "alpha\nbeta\ngamma\ndelta\none\ntwo\nthree\nfour\nfive\nsix\nseven" + "\n" * 150,
}
"""Texts that no model is fond of, by what they consist of."""
ODD_TOKENS_MAX = 200


class Texts:
    """Token ids of different real texts, again and again the same for one seed."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        """Tokenize chapters of Python's language reference."""
        self._dice, self._tokenizer = random.Random(seed), tokenizer
        self._texts = [
            ids
            for name in sorted(topics.topics)
            if len(ids := tokenizer(topics.topics[name], add_special_tokens=False)["input_ids"]) > LENGTH_MAX
        ]
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        self._opening = tokenizer(chat, add_special_tokens=False)["input_ids"][0]

    def draw(self, *, length: int | None = None) -> tuple[int, ...]:
        """Return a piece of a text, every other time as a conversation's first tokens."""
        text = self._dice.choice(self._texts)
        count = self._dice.randint(LENGTH_MIN, LENGTH_MAX) if length is None else length
        start = self._dice.randrange(len(text) - count + 1)
        ids = tuple(text[start : start + count])
        return (self._opening, *ids[1:]) if self._dice.random() < 1 / 2 else ids

    def odd(self) -> Iterator[tuple[int, ...]]:
        """Yield texts that hardly resemble the others, and the same token over and over."""
        for text in ODD_TEXTS.values():
            yield tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"][:ODD_TOKENS_MAX])
        for token in (0, 1, 2, 1000):
            yield (token,) * ODD_TOKENS_MAX

    def first_position(self) -> int:
        """Return where a cache might begin."""
        return self._dice.choice(FIRST_POSITIONS)


def compute(
    model: Any,
    fingerprint: Fingerprint,
    ids: Sequence[int],
    *,
    first_position: int = 0,
    declared: Any = None,
    **geometry: Any,
) -> Case:
    """Let a model compute the cache of `ids`, and declare it to be that of the fingerprint's model version.

    The geometry is declared as that of the model, or of `declared` if it is given.
    """
    shape = cache_geometry(model if declared is None else declared, **geometry)
    positions = torch.arange(first_position, first_position + len(ids))[None]
    with torch.inference_mode():
        cache = cache_of(model(torch.tensor([list(ids)]), position_ids=positions, use_cache=True, logits_to_keep=1))
    # Extracted under the type it was computed in; `slot_of` converts to the declared one.
    extracted = extract(cache, cache_geometry(model))
    return Case(
        fingerprint=fingerprint,
        geometry=shape,
        ids=tuple(ids),
        first_position=first_position,
        keys=torch.stack([layer.keys for layer in extracted.layers]),
        values=torch.stack([layer.values for layer in extracted.layers]),
    )


def noisy(model: Any, scale: float) -> Any:
    """Return a copy of a model with seeded noise on every matrix, in proportion to its values."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(20_260)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((noise * parameter.float().std() * scale).to(parameter.dtype))
    return other


def fine_tuned(model: Any, ids: Sequence[int], *, steps: int, rate: float) -> Any:
    """Return a copy of a model after a few steps of AdamW on one text."""
    other = copy.deepcopy(model).train()
    optimiser = torch.optim.AdamW(other.parameters(), lr=rate)
    tokens = torch.tensor([list(ids)[:FINE_TUNING_TOKENS]])
    for _ in range(steps):
        optimiser.zero_grad()
        other(tokens, labels=tokens).loss.backward()
        optimiser.step()
    return other.eval()


def with_base(model: Any, theta: float) -> Any:
    """Return a copy of a model that rotates by another base."""
    other = copy.deepcopy(model)
    other.config.rope_parameters["rope_theta"] = theta
    other.model.rotary_emb = type(other.model.rotary_emb)(other.config)
    return other


def faults(case: Case, texts: Texts, dice: random.Random) -> Iterator[tuple[str, Case]]:
    """Yield what can be wrong with a right cache, by name."""
    count, layers = len(case.ids), len(case.keys)
    yield "wrong text", replace(case, ids=texts.draw(length=count))
    changed = dice.randrange(count)
    token = (case.ids[changed] + dice.randrange(1, case.fingerprint.vocabulary)) % case.fingerprint.vocabulary
    yield "one token changed", replace(case, ids=(*case.ids[:changed], token, *case.ids[changed + 1 :]))
    yield "positions shifted by 1", replace(case, first_position=case.first_position + 1)
    yield "sequence shifted by one token", case.with_tokens([*range(1, count), 0])
    yield "two halves swapped", case.with_tokens([*range(count // 2, count), *range(count // 2)])
    yield "heads reversed", replace(case, keys=case.keys.flip(1), values=case.values.flip(1))
    yield "K and V exchanged", replace(case, keys=case.values, values=case.keys)
    for name, one, other in (("layer 0 and another", 0, 15), ("two deep", 9, 21), ("two neighbouring", 20, 21)):
        order = list(range(layers))
        order[one], order[other] = other, one
        yield f"{name} layers swapped" if one else f"{name} layer swapped", case.with_layers(order)
    yield "all layers moved by one", case.with_layers([layers - 1, *range(layers - 1)])
    yield "a layer doubled", case.with_layers([*range(13), 12, *range(14, layers)])
    for name, role in (("K and V", None), ("V", "values")):
        yield f"{name} of a layer zeroed", _zeroed(case, dice.randrange(layers), role)


def _zeroed(case: Case, layer: int, role: str | None) -> Case:
    names = ("keys", "values") if role is None else (role,)
    changes: dict[str, Any] = {name: getattr(case, name).clone() for name in names}
    for tensor in changes.values():
        tensor[layer] = 0
    return replace(case, **changes)
