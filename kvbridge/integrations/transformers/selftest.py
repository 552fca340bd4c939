"""Whether the attention of a loaded model does what its mask says, found out by running it.

Some attention implementations drop a mask of four dimensions without a word and attend causally to everything, padding
included. So the model is run on a few tokens, laid out as a plan with padding between two parts, in five rows of one
batch that differ in single slots:

1. `BASE`, and `AGAIN`, which is the same: how far they differ is the noise of the implementation.
2. `PADDING` has other garbage in the padding. No logit of a real token may move.
3. `FUTURE` has another last token. No logit before it may move.
4. `VISIBLE` has other tokens where a later one has to see them. Its logits must move, or the test tells nothing.

There are three steps, because implementations choose their kernels by them: a prefill without a cache, several tokens
behind a cache, and one token behind it. Between the first two, the padding in the cache is overwritten with values as
large as the largest real one, of opposite sign in `PADDING`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from transformers import DynamicCache

from kvbridge.core.attention import AttentionLayout, AttentionSpan
from kvbridge.integrations.transformers.compatibility import cache_argument
from kvbridge.integrations.transformers.errors import UnsupportedModelError
from kvbridge.integrations.transformers.masks import ModelMask, for_layers, held_slots, layer_windows, mask_form
from kvbridge.integrations.transformers.unwrapping import unwrap
from kvbridge.transform.masks import MaskForm, build_mask, query_positions

DETAIL_CHARACTERS_MAX = 500
"""Longest message of an attention implementation that is repeated."""


class _Row(IntEnum):
    """The rows of the batch."""

    BASE = 0
    AGAIN = 1
    PADDING = 2
    FUTURE = 3
    VISIBLE = 4


_LAYOUT = AttentionLayout(
    spans=(
        AttentionSpan(first_position=0, length=2, padded_length=4, cached=True),
        AttentionSpan(first_position=2, length=2, cached=True),
    )
)
_PADDING_SLOTS = (2, 3)
_SLOTS = 9
"""Two parts of six slots, two new tokens, and one more."""
_OTHER = {_Row.PADDING: _PADDING_SLOTS, _Row.FUTURE: (5, 7), _Row.VISIBLE: (1, 5, 7)}
"""The slots in which a row has other tokens than `BASE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One forward pass, and where its logits are compared."""

    name: str
    """What people call it."""
    asking: range
    """The slots given to the model."""
    unmoved: tuple[int, ...]
    """Slots of real tokens, all of which the padding may not move."""
    before_future: tuple[int, ...]
    """Those of them that stand before the slot in which `FUTURE` differs."""
    moved: int
    """A slot whose token sees one that differs in `VISIBLE` at the position before its own, and is itself the same."""


_STEPS = (
    _Step(name="prefill", asking=range(6), unmoved=(0, 1, 4, 5), before_future=(0, 1, 4), moved=4),
    _Step(name="behind a cache", asking=range(6, 8), unmoved=(6, 7), before_future=(6,), moved=6),
    _Step(name="one token", asking=range(8, 9), unmoved=(8,), before_future=(), moved=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFigures:
    """What was measured in one step."""

    step: str
    """`prefill`, `behind a cache` or `one token`."""
    hidden_shift: float
    """How far a logit moved at most when only hidden tokens changed."""
    visible_shift: float
    """How far a logit moved at most when a visible token changed."""
    tolerance: float
    """How far logits may move by rounding."""

    @property
    def hides(self) -> bool:
        """Return whether hidden tokens moved nothing; not so if a logit is no number."""
        return self.hidden_shift <= self.tolerance

    @property
    def shows(self) -> bool:
        """Return whether visible tokens moved something."""
        return self.visible_shift > self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSelfTest:
    """Whether a model's attention respects its mask."""

    ok: bool
    """True only if hidden tokens moved no logit and visible ones did, in every step."""
    detail: str
    """A sentence with the figures, or the error that ended the test."""
    figures: tuple[MaskFigures, ...]
    """One for each step; empty if the test ended with an error."""


def attention_respects_mask(model: Any, *, form: MaskForm | None = None) -> MaskSelfTest:
    """Find out whether the attention of a loaded model hides what its mask hides and shows what it shows.

    It takes three forward passes over five rows of at most six tokens. The model's modes and the random numbers are
    afterwards what they were, but no other thread may use a model in training meanwhile. Compiled models are run
    uncompiled, and models whose cache cannot be handed over are not run: some of these change with every text.

    Args:
        model: A causal language model of the library, plain, compiled or wrapped by PEFT, in whatever mode.
        form: What its attention implementation takes as mask; by default what the library makes for the implementation,
            and booleans for one that the library does not know.

    Returns:
        The result. Whatever goes wrong is one: a model of which nothing can be told does not respect its mask.
    """
    try:
        base = unwrap(model)
        chosen = _form(base.config) if form is None else form
        with _undisturbed(base):
            figures = _measured(base, chosen)
    except Exception as error:  # noqa: BLE001 - attention implementations are foreign code, and may raise anything
        detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARACTERS_MAX]
        return MaskSelfTest(ok=False, detail=detail, figures=())
    return MaskSelfTest(ok=all(_passes(step) for step in figures), detail=_detail(figures), figures=figures)


def _form(config: Any) -> MaskForm:
    try:
        return mask_form(config)
    except UnsupportedModelError:
        return MaskForm.SDPA


def _passes(figures: MaskFigures) -> bool:
    return figures.hides and figures.shows


def _detail(figures: tuple[MaskFigures, ...]) -> str:
    for step in figures:
        if not step.hides:
            return (
                f"the mask is not respected: {step.step}, hidden tokens moved a logit by {step.hidden_shift:.3g}, and "
                f"rounding by at most {step.tolerance:.3g}"
            )
        if not step.shows:
            return (
                f"nothing can be told: {step.step}, visible tokens moved no logit by more than "
                f"{step.visible_shift:.3g}, and rounding by at most {step.tolerance:.3g}"
            )
    hidden, visible = max(step.hidden_shift for step in figures), min(step.visible_shift for step in figures)
    return f"hidden tokens moved no logit by more than {hidden:.3g}, and visible ones some by at least {visible:.3g}"


@contextmanager
def _undisturbed(base: Any) -> Iterator[None]:
    """Run without gradients in evaluation mode, and leave modes and random numbers as they were."""
    training = [module for module in base.modules() if module.training]
    gpus = {parameter.device.index for parameter in base.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(gpus)):
            base.eval()
            yield
    finally:
        for module in training:
            module.training = True


def _measured(base: Any, form: MaskForm) -> tuple[MaskFigures, ...]:
    """Run the steps one after another on one cache."""
    device = base.get_input_embeddings().weight.device
    tokens = _tokens(base).to(device)
    windows = layer_windows(base.config, base.dtype)
    cache: Any = DynamicCache(config=base.config)
    figures = []
    for step in _STEPS:
        asking = slice(step.asking.start, step.asking.stop)
        # Not by calling the model, which may have been told to compile itself for every new shape.
        output = base.forward(
            tokens[:, asking],
            attention_mask=_mask(base, form, step.asking, windows),
            position_ids=query_positions([_LAYOUT] * len(_Row), step.asking, device=device),
            use_cache=True,
            **{cache_argument(): cache},
        )
        figures.append(_figures(step, output.logits.float(), base.dtype))
        if step.asking.stop == _LAYOUT.key_length:
            _spoil(cache)
    return tuple(figures)


def _tokens(base: Any) -> torch.Tensor:
    """Return the ids `[rows, slots]`, spread over the vocabulary; where a row differs, it has ids of its own."""
    vocabulary = len(base.get_input_embeddings().weight)
    spread = max(1, vocabulary // (2 * _SLOTS + 1))
    tokens = torch.arange(1, _SLOTS + 1).repeat(len(_Row), 1)
    for row, slots in _OTHER.items():
        tokens[row, list(slots)] += _SLOTS
    return tokens * spread % vocabulary


def _mask(base: Any, form: MaskForm, asking: range, windows: tuple[int | None, ...]) -> ModelMask:
    masks = {
        window: build_mask(
            form,
            [_LAYOUT] * len(_Row),
            asking,
            window_tokens=window,
            keys=range(asking.start - held_slots(window, asking.start), asking.stop),
            dtype=base.dtype,
            device=base.get_input_embeddings().weight.device,
        )
        for window in set(windows)
    }
    return for_layers(base.config, windows, masks)


def _spoil(cache: Any) -> None:
    """Overwrite the padding in the cache with large values behind keys that attract, and make `FUTURE` `BASE` again."""
    for layer in cache.layers:
        forgotten = _LAYOUT.key_length - layer.keys.shape[2]
        slots = [slot - forgotten for slot in _PADDING_SLOTS if slot >= forgotten]
        for tensor in (layer.keys, layer.values):
            tensor[_Row.FUTURE] = tensor[_Row.BASE]
        layer.keys[:, :, slots] = layer.keys[:, :, -1:]
        layer.values[:, :, slots] = layer.values.abs().amax()
        layer.values[_Row.PADDING][:, slots] *= -1


def _figures(step: _Step, logits: torch.Tensor, dtype: torch.dtype) -> MaskFigures:
    """Compare the rows of the logits `[rows, tokens, vocabulary]`."""

    def shift(row: _Row, slots: tuple[int, ...]) -> float:
        at = [slot - step.asking.start for slot in slots]
        return float((logits[row, at] - logits[_Row.BASE, at]).abs().max()) if at else 0.0

    hidden = torch.tensor([shift(_Row.PADDING, step.unmoved), shift(_Row.FUTURE, step.before_future)])
    rounding = torch.finfo(dtype).eps * float(logits[_Row.BASE].abs().max())
    return MaskFigures(
        step=step.name,
        hidden_shift=float(hidden.max()),
        visible_shift=shift(_Row.VISIBLE, (step.moved,)),
        tolerance=rounding + 2 * shift(_Row.AGAIN, step.unmoved),
    )
