"""Measuring what a model's prefill takes here, and what a handoff takes in its place."""

from __future__ import annotations

import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbridge.client.bridge import Bridge
from kvbridge.integrations.transformers.compatibility import cache_of
from kvbridge.integrations.transformers.devices import layer_devices
from kvbridge.integrations.transformers.errors import UnsupportedModelError
from kvbridge.integrations.transformers.port import ModelPort
from kvbridge.integrations.transformers.unwrapping import unwrap

REPEATS_MIN = 3
"""Fewest prefills of one length: a bridge believes no fewer reports."""
ACQUIRE_SECONDS = 10.0
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What one length took."""

    tokens: int
    """The length."""
    prefills: tuple[float, ...]
    """Seconds of each prefill."""
    reported: bool
    """Whether the bridge took the reports of all of them."""
    handoff_seconds: float | None
    """Seconds from asking the bridge for the same cache to having it; None if it was not handed over."""
    refused: str
    """Why it was not; empty if it was."""

    @property
    def prefill_seconds(self) -> float:
        """Return the median of the prefills."""
        return statistics.median(self.prefills)

    @property
    def pays(self) -> bool:
        """Tell whether the handoff took less time than the prefill."""
        return self.handoff_seconds is not None and self.handoff_seconds < self.prefill_seconds


def calibrate(
    model: Any, port: ModelPort, bridge: Bridge, lengths: Sequence[int], *, repeats: int = REPEATS_MIN
) -> Iterator[Calibrated]:
    """Prefill each of `lengths` tokens, report that to the bridge, and hand the last cache over through it.

    Args:
        model: A causal language model of the library.
        port: Its way to the bridge, by whose tag the prefills are reported.
        bridge: Where to.
        lengths: How many tokens; each is measured by itself, after a first prefill that does not count.
        repeats: How often each is measured, at least `REPEATS_MIN` times.

    Raises:
        UnsupportedModelError: the model takes fewer tokens than that.
        ValueError: there are no lengths, one is not positive, or too few repeats.
    """
    if not lengths or min(lengths) < 1 or repeats < REPEATS_MIN:
        raise ValueError(f"lengths must be positive, and repeats at least {REPEATS_MIN}: {lengths}, {repeats}")
    ids = _token_ids(model, max(lengths))
    _prefill(model, ids[: min(lengths)])
    for length in lengths:
        runs = [_prefill(model, ids[:length]) for _ in range(repeats)]
        prefills = tuple(seconds for seconds, _ in runs)
        reports = [port.report_prefill(bridge, length, seconds) for seconds in prefills]
        handoff_seconds, refused = _hand_over(port, bridge, ids[:length], runs[-1][1])
        yield Calibrated(
            tokens=length,
            prefills=prefills,
            reported=all(reports),
            handoff_seconds=handoff_seconds,
            refused=refused,
        )


def _token_ids(model: Any, count: int) -> list[int]:
    config = unwrap(model).config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if most is not None and count > most:
        raise UnsupportedModelError("max_position_embeddings", f"is {most}, fewer than the {count} tokens to measure")
    generator = torch.Generator().manual_seed(_SEED)
    return [int(token) for token in torch.randint(0, config.vocab_size, (count,), generator=generator)]


def _prefill(model: Any, ids: Sequence[int]) -> tuple[float, Any]:
    """Return the seconds up to the first token, and the cache."""
    device = next(iter(layer_devices(unwrap(model)).values()))
    given = torch.tensor([list(ids)], device=device)
    with torch.inference_mode():
        started = time.perf_counter()
        # Only the last position's logits are computed, as servers do; all of them would flatter the handoff.
        output = model(given, use_cache=True, logits_to_keep=1)
        int(output.logits[0, -1].argmax())  # Waits for the device.
        return time.perf_counter() - started, cache_of(output)


def _hand_over(port: ModelPort, bridge: Bridge, ids: Sequence[int], cache: Any) -> tuple[float | None, str]:
    """Publish a cache and take it back; return the seconds of the taking, or why it was not handed over."""
    key = f"calibrate/{uuid.uuid4()}"
    published = port.publish(bridge, key, cache, tokens=ids, linger_seconds=0.0, hold=True)
    if not published.published:
        return None, f"not published: {published.reason}: {published.detail}"
    try:
        started = time.perf_counter()
        with port.acquire(bridge, key, tokens=[*ids, ids[0]], timeout=ACQUIRE_SECONDS) as handoff:
            if handoff.kv is None:
                return None, f"{handoff.reason}: {handoff.detail}"
            port.cache(handoff)
            return time.perf_counter() - started, ""
    finally:
        published.release()
