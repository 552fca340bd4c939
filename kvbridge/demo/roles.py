"""The two inference processes: agent A reads the document and publishes, agent B acquires and answers."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvbridge
from kvbridge.demo import checkpoint, document
from kvbridge.demo.events import emit
from kvbridge.demo.inference import Continuation, continue_greedily
from kvbridge.integrations.transformers import ModelPort

ACQUIRE_SECONDS = 5.0
LINGER_SECONDS = 3600.0
"""How long the caches outlive their producer, which has ended when the consumers come."""
WARM_UP_TOKENS = 64
FALLBACK_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCache:
    """An answer from a handed-over cache."""

    tokens: tuple[int, ...]
    """The greedy tokens."""
    first_token_seconds: float
    """From asking the bridge to the first token."""
    bytes_moved: int
    """Keys and values that were handed over."""


class Agent:
    """One inference process: a real model and a connection to the bridge."""

    def __init__(self, target: str, folder: Path, *, drifted: bool) -> None:
        """Load the model, as another checkpoint version if `drifted`, and compute its version tag."""
        self.model, self.tokenizer = checkpoint.load(folder)
        if drifted:
            checkpoint.drift(self.model)
        self.document = document.token_ids(self.tokenizer)
        self.question = document.question_ids(self.tokenizer)
        self.bridge = kvbridge.connect(target)
        started = time.perf_counter()
        self.port = ModelPort(self.model, self.tokenizer, name=checkpoint.MODEL_NAME)
        emit("loaded", tag_seconds=time.perf_counter() - started, revision=self.port.tag.revision)
        continue_greedily(self.model, self.document[:WARM_UP_TOKENS], count=2)

    def produce(self, lengths: Sequence[int]) -> None:
        """Read the document's first tokens and publish the cache, once for each length."""
        for length in lengths:
            ids = self.document[:length]
            read = continue_greedily(self.model, ids, count=1)
            started = time.perf_counter()
            published = self.port.publish(
                self.bridge,
                _key(length),
                read.cache,
                tokens=ids,
                text=self._text(length),
                linger_seconds=LINGER_SECONDS,
            )
            seconds = time.perf_counter() - started
            if not published.published:
                raise SystemExit(f"publishing {length} tokens failed: {published.reason} {published.detail}")
            emit("published", tokens=length, prefill_seconds=read.first_token_seconds, publish_seconds=seconds)

    def consume(self, lengths: Sequence[int], *, repeats: int, answer_tokens: int) -> None:
        """Answer the question after the document from text and from the cache, and compare."""
        for length in lengths:
            count = answer_tokens if length == max(lengths) else 1
            # The text comes first: its measurements tell the bridge that even the shortest handoff pays.
            counts = [count] + [1] * (repeats - 1)
            texts = [self._from_text(length, each) for each in counts]
            caches = [self._from_cache(length, each) for each in counts]
            text, cache = texts[0], caches[0]
            text_seconds = [answer.first_token_seconds for answer in texts]
            cache_seconds = [answer.first_token_seconds for answer in caches]
            emit(
                "compared",
                tokens=length,
                bytes=cache.bytes_moved,
                ttft_text_seconds=statistics.median(text_seconds),
                ttft_cache_seconds=statistics.median(cache_seconds),
                compared_tokens=count,
                identical_tokens=_identical(text.tokens, cache.tokens),
            )

    def fall_back(self, length: int) -> None:
        """Ask for a cache of another model version, take the text that comes instead, and check the answer."""
        handoff = self.port.acquire(self.bridge, _key(length), tokens=self._prompt(length), timeout=ACQUIRE_SECONDS)
        text = handoff.text or ""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = continue_greedily(self.model, [*ids, *self.question], count=FALLBACK_ANSWER_TOKENS)
        expected = self._from_text(length, FALLBACK_ANSWER_TOKENS)
        emit(
            "fell_back",
            reason=None if handoff.reason is None else str(handoff.reason),
            detail=handoff.detail,
            answer=self.tokenizer.decode(answer.tokens),
            answer_correct=not handoff.kv and text == self._text(length) and answer.tokens == expected.tokens,
        )

    def _from_text(self, length: int, count: int) -> Continuation:
        prompt = self._prompt(length)
        answer = continue_greedily(self.model, prompt, count=count)
        self.port.report_prefill(self.bridge, len(prompt), answer.first_token_seconds)
        return answer

    def _from_cache(self, length: int, count: int) -> FromCache:
        prompt = self._prompt(length)
        started = time.perf_counter()
        with self.port.acquire(self.bridge, _key(length), tokens=prompt, timeout=ACQUIRE_SECONDS) as handoff:
            if not handoff.kv:
                raise SystemExit(f"no cache for {length} tokens: {handoff.reason} {handoff.detail}")
            cache = handoff.as_transformers_cache()
            waited = time.perf_counter() - started
            answer = continue_greedily(self.model, prompt[length:], count=count, cache=cache)
            if not handoff.still_valid():
                raise SystemExit(f"the lease on {length} tokens was lost")
            return FromCache(
                tokens=answer.tokens,
                first_token_seconds=waited + answer.first_token_seconds,
                bytes_moved=_bytes_moved(handoff),
            )

    def _prompt(self, length: int) -> list[int]:
        return [*self.document[:length], *self.question]

    def _text(self, length: int) -> str:
        decoded: str = self.tokenizer.decode(self.document[:length])
        return decoded


def _bytes_moved(handoff: kvbridge.Handoff) -> int:
    descriptor = handoff.descriptor
    assert descriptor is not None, handoff
    return descriptor.canonical_bytes


def _key(length: int) -> str:
    return f"demo/python-reference/{length}"


def _identical(expected: Sequence[int], found: Sequence[int]) -> int:
    """Return how many tokens agree before the first that does not."""
    pairs = enumerate(zip(expected, found, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(expected))


def main() -> None:
    """Play one role."""
    parser = argparse.ArgumentParser(prog="python -m kvbridge.demo.roles")
    parser.add_argument("role", choices=["producer", "consumer", "drifted-consumer"])
    parser.add_argument("--target", required=True)
    parser.add_argument("--checkpoint", required=True, type=Path)
    parser.add_argument("--lengths", required=True, type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--answer-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    agent = Agent(options.target, options.checkpoint, drifted=options.role == "drifted-consumer")
    roles: dict[str, Callable[[], Any]] = {
        "producer": lambda: agent.produce(options.lengths),
        "consumer": lambda: agent.consume(
            options.lengths, repeats=options.repeats, answer_tokens=options.answer_tokens
        ),
        "drifted-consumer": lambda: agent.fall_back(max(options.lengths)),
    }
    roles[options.role]()
    agent.bridge.close()


if __name__ == "__main__":
    main()
