"""Measures what the token probe refuses and what it lets through: `python -m benchmarks.probe`."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from benchmarks.probe_cases import LENGTH_MAX, Case, Texts, compute, faults, fine_tuned, noisy, with_base
from kvbridge.core.geometry import DimensionOrder
from kvbridge.demo import checkpoint
from kvbridge.integrations.transformers import model_tag
from kvbridge.integrations.transformers.checkpoints import load_local
from kvbridge.integrations.transformers.probe import build_fingerprint, likely_first_tokens
from kvbridge.probe import SAMPLE_TOKENS, Fingerprint, check_tokens, load_fingerprint, save_fingerprint
from kvbridge.probe.tables import dims_per_head

RIGHT, FAULTY = 200, 50
SEED = 7
REVISION_TOKENS = 100
"""Length of the caches of other versions, of which there are many."""
NOISES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 2e-2, 5e-2)
FINE_TUNINGS = ((1, 1e-5), (3, 2e-5), (3, 2e-4), (20, 2e-4))
SPEED_TOKENS = 2000
REPEATS = 21
VOCABULARIES = ((49_152, 3, 64, 30), (128_256, 8, 128, 32), (262_144, 8, 256, 62))
"""Vocabulary, KV heads, head dimension and layers of models whose fingerprint's size is told."""
_FIGURES = (
    "key_error_median",
    "value_error_median",
    "key_error_max",
    "value_error_max",
    "key_first_error_max",
    "value_first_error_max",
    "key_layer_margin_min",
)
_MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class Line:
    """What was found for one kind of cache."""

    kind: str
    """What is right or wrong with the caches."""
    checked: int = 0
    """How many caches."""
    refused_by_sample: int = 0
    """How many a sample of 64 tokens refused."""
    refused_by_all: int = 0
    """How many all tokens refused."""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """Every figure of every cache, of all tokens."""
    problems: list[str] = field(default_factory=list)
    """What was said of those that all tokens refused."""

    def add(self, case: Case) -> None:
        """Check one more cache."""
        sampled, whole = case.check(SAMPLE_TOKENS), case.check(None)
        assert sampled.probed
        assert whole.probed
        self.checked += 1
        self.refused_by_sample += sampled.problem is not None
        self.refused_by_all += whole.problem is not None
        if whole.problem is not None:
            self.problems.append(whole.problem)
        for name in _FIGURES:
            if name in whole.figures:
                self.figures.setdefault(name, []).append(whole.figures[name])

    def summary(self) -> dict[str, Any]:
        """Return the counts, and of each figure least, median and greatest."""
        spread = {name: [min(values), statistics.median(values), max(values)] for name, values in self.figures.items()}
        return {
            "kind": self.kind,
            "checked": self.checked,
            "refused_by_sample": self.refused_by_sample,
            "refused_by_all": self.refused_by_all,
            "figures": spread,
            "example": self.problems[0] if self.problems else None,
        }


class Bench:
    """The model in two element types, each with its fingerprint."""

    def __init__(self, right: int, faulty: int) -> None:
        """Load the model and make both fingerprints."""
        self.right_count, self.faulty_count = right, faulty
        folder = checkpoint.prepare()
        self.exact, self.tokenizer = checkpoint.load(folder)
        # Loaded so, not converted: that would round the rotary frequencies, too.
        self.coarse, _ = load_local(folder, dtype="bfloat16")
        started = time.process_time()
        self.exact_print = self._fingerprint(self.exact)
        self.build_seconds = time.process_time() - started
        self.coarse_print = self._fingerprint(self.coarse)
        self.texts, self.dice = Texts(self.tokenizer, SEED), random.Random(SEED)

    def _fingerprint(self, model: Any) -> Fingerprint:
        tag = model_tag(model, self.tokenizer, name=checkpoint.MODEL_NAME)
        return build_fingerprint(model, tag, first_tokens=likely_first_tokens(model, self.tokenizer))

    def right(self) -> Iterator[Line]:
        """Yield lines about right caches, which nothing may refuse."""
        for kind, model, fingerprint, dtype, share in (
            ("float32", self.exact, self.exact_print, "float32", 0.4),
            ("bfloat16", self.coarse, self.coarse_print, "bfloat16", 0.4),
            ("float32, stored as bfloat16", self.exact, self.exact_print, "bfloat16", 0.1),
            ("float32, stored as float16", self.exact, self.exact_print, "float16", 0.1),
        ):
            yield self._line(kind, model, fingerprint, round(self.right_count * share), dtype=dtype)
        # No device computes bfloat16 as differently as float32 does.
        kind = "float32 beside a fingerprint of bfloat16"
        yield self._line(kind, self.exact, self.coarse_print, round(self.right_count * 0.1), dtype="bfloat16")
        yield self._odd()

    def _odd(self) -> Line:
        line = Line(kind="float32, texts of few tokens or other languages")
        for ids in self.texts.odd():
            line.add(compute(self.exact, self.exact_print, ids))
        return line

    def _line(self, kind: str, model: Any, fingerprint: Fingerprint, count: int, **declared: Any) -> Line:
        line = Line(kind=kind)
        for _ in range(count):
            line.add(self._case(model, fingerprint, **declared))
        return line

    def _case(self, model: Any, fingerprint: Fingerprint, *, length: int | None = None, **declared: Any) -> Case:
        ids, first_position = self.texts.draw(length=length), self.texts.first_position()
        order = self.dice.choice(list(DimensionOrder))
        return compute(model, fingerprint, ids, first_position=first_position, order=order, **declared)

    def faulty(self) -> Iterator[Line]:
        """Yield lines about faults that one changes in a right cache or its descriptor, half in each type."""
        lines: dict[str, Line] = {}
        for number in range(self.faulty_count):
            exact = number % 2 == 0
            model, fingerprint = (self.exact, self.exact_print) if exact else (self.coarse, self.coarse_print)
            for kind, case in faults(self._case(model, fingerprint), self.texts, self.dice):
                lines.setdefault(kind, Line(kind=kind)).add(case)
        yield from lines.values()
        for exact in (True, False):
            model, fingerprint = (self.exact, self.exact_print) if exact else (self.coarse, self.coarse_print)
            kind = f"rope base 10,000 for 100,000, {fingerprint.dtype}"
            yield self._line(kind, with_base(model, 10_000.0), fingerprint, self.faulty_count, declared=model)

    def revisions(self) -> Iterator[Line]:
        """Yield lines about caches of other versions of the model."""
        for model, fingerprint in ((self.exact, self.exact_print), (self.coarse, self.coarse_print)):
            for noise in NOISES:
                kind = f"weights with noise of {noise:g}, {fingerprint.dtype}"
                yield self._line(kind, noisy(model, noise), fingerprint, self.faulty_count, length=REVISION_TOKENS)
        for steps, rate in FINE_TUNINGS:
            tuned = fine_tuned(self.exact, self.texts.draw(length=LENGTH_MAX), steps=steps, rate=rate)
            kind = f"{steps} steps of fine-tuning at {rate:g}, float32"
            yield self._line(kind, tuned, self.exact_print, self.faulty_count, length=REVISION_TOKENS)

    def speed(self) -> dict[str, Any]:
        """Return what things cost in seconds of a processor, and how large fingerprints are."""
        ids = [token for _ in range(SPEED_TOKENS // LENGTH_MAX + 1) for token in self.texts.draw(length=LENGTH_MAX)]
        case = compute(self.exact, self.exact_print, ids[:SPEED_TOKENS])
        slot, descriptor = case.slot(), case.descriptor()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "fingerprint")
            save_fingerprint(self.exact_print, path)
            load_seconds = _seconds(lambda: load_fingerprint(path))
        return {
            "build_seconds": self.build_seconds,
            "load_seconds": load_seconds,
            "sample_seconds": _seconds(lambda: check_tokens(self.exact_print, descriptor, slot)),
            "all_seconds": _seconds(lambda: check_tokens(self.exact_print, descriptor, slot, sample_tokens=None)),
            "sizes": [
                {"vocabulary": vocabulary, "kv_heads": heads, "bytes": _size_bytes(vocabulary, heads, dim, layers)}
                for vocabulary, heads, dim, layers in VOCABULARIES
            ],
        }


def _seconds(call: Any) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return statistics.median(times)


def _size_bytes(vocabulary: int, heads: int, dim: int, layers: int) -> int:
    """Return the size with two first tokens."""
    dims = dims_per_head(heads, dim)
    deep = layers * heads * dim * np.dtype(np.float32).itemsize
    return 2 * (vocabulary * heads * dims * np.dtype(np.float16).itemsize + 3 * deep + heads * dim * dims * 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 if a right cache was refused."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    bench = Bench(20, 4) if options.quick else Bench(RIGHT, FAULTY)
    sections: dict[str, list[Line]] = {}
    for name, lines in (("right", bench.right()), ("faults", bench.faulty()), ("revisions", bench.revisions())):
        sections[name] = []
        if options.only not in {None, name}:
            continue
        for line in lines:
            print(f"{name}: {line.kind}: {line.refused_by_all} of {line.checked}", file=sys.stderr, flush=True)
            sections[name].append(line)
    speed = bench.speed()
    if options.json:
        print(json.dumps({"speed": speed, **{k: [x.summary() for x in v] for k, v in sections.items()}}))
    else:
        print(_table(sections, speed))
    return int(any(line.refused_by_sample or line.refused_by_all for line in sections["right"]))


def _table(sections: dict[str, list[Line]], speed: dict[str, Any]) -> str:
    columns = ("64", "all", "K median", "V median", "K worst", "V worst", "K first", "V first", "margin")
    out = [f"{'refused by a probe of 64 or all tokens':<48}{'of':>5}" + "".join(f"{name:>10}" for name in columns)]
    for title, lines in sections.items():
        out += ["", title]
        for line in lines:
            worst = [_worst(line, name, right=title == "right") for name in _FIGURES]
            counts = f"{line.checked:>5}{line.refused_by_sample:>10}{line.refused_by_all:>10}"
            out.append(f"  {line.kind:<46}{counts}" + "".join(f"{value:>10}" for value in worst))
    out += ["", *(_speed_lines(speed))]
    return "\n".join(out)


def _worst(line: Line, name: str, *, right: bool) -> str:
    """Return of right caches the figure nearest to its limit, of others the one in the middle."""
    values = line.figures.get(name)
    if not values:
        return "-"
    value = statistics.median(values) if not right else min(values) if "margin" in name else max(values)
    return f"{value:.1e}" if "error" in name else f"{value:.2f}"


def _speed_lines(speed: dict[str, Any]) -> Iterator[str]:
    yield "processor time:"
    yield f"build {speed['build_seconds']:.1f} s, load {speed['load_seconds'] * 1e3:.1f} ms"
    sample, whole = speed["sample_seconds"] * 1e3, speed["all_seconds"] * 1e3
    yield f"check of {SAMPLE_TOKENS} tokens {sample:.1f} ms, of all {SPEED_TOKENS} {whole:.1f} ms"
    for size in speed["sizes"]:
        yield f"{size['vocabulary']} tokens, {size['kv_heads']} KV heads: {size['bytes'] / _MIB:.1f} MiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", choices=["right", "faults", "revisions", "speed"], help="measure one part")
    parser.add_argument("--quick", action="store_true", help="few caches, to see that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
