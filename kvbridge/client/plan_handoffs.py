"""What a consumer gets that asks for several caches of one context: parts in order, each a cache or text."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvbridge.client.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LayoutUnknownError,
    NoCacheError,
    arguments_checked,
)
from kvbridge.client.handoffs import HEADROOM_TOKENS_DEFAULT, Handoff, HandoffCache
from kvbridge.client.plans import index
from kvbridge.core.attention import AttentionLayout, AttentionSpan

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from kvbridge.transform.masks import MaskForm


class PlanHandoff:
    """The parts of one context in order, each with its own lease or its own reason.

    A consumer takes the caches of `leading()`, prefills everything behind them (the text or tokens of the other parts,
    then its own new tokens), and so computes what it would have computed from the text alone. Caches behind a part that
    is text can be used, too, by those who prefill that part in its place; `layout` says where everything stands.
    """

    def __init__(self, parts: Sequence[Handoff], layout: AttentionLayout | None, *, asked_tokens: int | None) -> None:
        """Take the parts over; `asked_tokens` is the length of the consumer's prompt, if it said one."""
        self.parts = tuple(parts)
        self._layout = layout
        self._asked_tokens = asked_tokens
        self._came_with_cache = tuple(part for part in self.parts if part.kv is not None)

    def __repr__(self) -> str:
        cached = sum(part.kv is not None for part in self.parts)
        return f"<PlanHandoff {cached} of {len(self.parts)} parts with a cache, {len(self.leading())} of them leading>"

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[Handoff]:
        return iter(self.parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # What was answered

    @property
    def handoff_id(self) -> str:
        """Return the name of this handoff in the bridge's logs; empty if the bridge did not answer."""
        return self.parts[0].handoff_id

    @property
    def layout(self) -> AttentionLayout | None:
        """Return how the parts lie and which are caches by now; None if the length of a part is not known."""
        if self._layout is None:
            return None
        spans = zip(self._layout.spans, self.parts, strict=True)
        return AttentionLayout(spans=tuple(replace(span, cached=part.kv is not None) for span, part in spans))

    @property
    def cached_length(self) -> int:
        """Return how many tokens are in caches, in leading ones and in others."""
        return sum(part.valid_length for part in self.parts if part.kv is not None)

    def leading(self) -> tuple[Handoff, ...]:
        """Return the longest run of parts with a cache at the start, from which a consumer can continue directly."""
        return tuple(takewhile(lambda part: part.kv is not None, self.parts))

    @property
    def leading_length(self) -> int:
        """Return how many tokens the leading caches cover: the consumer prefills its prompt from this token on."""
        return sum(part.valid_length for part in self.leading())

    # Continuing

    def mask(
        self,
        query_length: int,
        *,
        form: MaskForm | str = "sdpa",
        dtype: torch.dtype | None = None,
        window_tokens: int | None = None,
        padded_lengths: Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> torch.Tensor | BlockMask:
        """Return the mask by which the next tokens attend to the leading caches and to each other.

        For masks of other queries, such as a text part in front of a cache, `kvbridge.transform.masks` takes `layout`.

        Args:
            query_length: How many tokens are computed next, behind the leading caches.
            form: What the attention implementation takes: `sdpa`, `eager` or `flex_attention`.
            dtype: What the model computes in; needed for `eager`.
            window_tokens: Tokens that a query sees, itself included; None for full attention.
            padded_lengths: Slots that the consumer keeps for each leading part, padding on the right included; by
                default the parts stand side by side, and the mask is the ordinary causal one.
            device: Where to build the mask; the CPU by default.

        Raises:
            LayoutUnknownError: there is no leading cache, so there is nothing that a causal mask does not say.
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: the padded lengths are not one for each leading part, or shorter than it.
            MaskError: an argument does not fit.
        """
        from kvbridge.transform.masks import MaskForm, build_mask  # noqa: PLC0415 - loads torch

        if form not in set(MaskForm):
            raise ArgumentValueError("form", f"must be one of {', '.join(MaskForm)}, got {form!r}")
        chosen = MaskForm(form)
        if chosen is MaskForm.EAGER and dtype is None:
            raise ArgumentTypeError("dtype", "must be given for an eager mask")
        return build_mask(
            chosen,
            self._axis(padded_lengths),
            index("query_length", query_length),
            window_tokens=window_tokens,
            dtype=dtype,  # type: ignore[arg-type]  # only the eager form looks at it
            device=device,
        )

    def as_transformers_cache(
        self, headroom_tokens: int = HEADROOM_TOKENS_DEFAULT, *, device: Any = None
    ) -> HandoffCache:
        """Return one cache of the transformers library over the leading parts.

        One leading part is used in place, as by `Handoff.as_transformers_cache`; several are copied into one. Give the
        model the prompt from `leading_length` on, or `generate` the whole prompt. Ask `still_valid` after the last use.

        Args:
            headroom_tokens: How many new tokens to make room for; more are possible, but copy the prefix once.
            device: Where the model computes, if that is not the host.

        Raises:
            NoCacheError: the first part has no cache.
            AlignerNotAppliedError: a cache still has to be aligned.
            ScaledValuesError: a cache holds scaled values; take the text.
            ArgumentValueError: the room is negative.
            HandoffInvalidError: a lease was lost meanwhile; its part has no cache any more, and `leading` is shorter.
            UnsupportedCacheError: transformers could not continue from these positions; take the text.
        """
        leading = self.leading()
        if not leading:
            first = self.parts[0]
            why = f"{first.reason}: {first.detail}" if first.reason else "it was released"
            raise NoCacheError(f"the plan does not start with a cache ({why}); look at plan.leading() first")
        for part in leading:
            part.require_own()
        # The integration stands above the client and loads transformers, so it is found only where it is asked for.
        integration: Any = importlib.import_module("kvbridge.integrations.transformers")
        cache: HandoffCache = integration.cache_from_parts(
            leading, token_count=self._asked_tokens, headroom_tokens=headroom_tokens, device=device
        )
        return cache

    def still_valid(self) -> bool:
        """Tell whether everything read from the parts that came with a cache is right; ask again after the last use.

        A part that has lost its lease becomes a fallback; from then on this is False, and each part says it for itself.
        """
        valid = [part.still_valid() for part in self._came_with_cache]
        return all(valid)

    def release(self) -> None:
        """Return every lease; no tensor may be used any more. More than once does nothing."""
        for part in self.parts:
            part.release()

    def _axis(self, padded_lengths: Sequence[int] | None) -> AttentionLayout:
        """Return how the leading parts lie on the consumer's axis of keys."""
        leading = self.leading()
        if not leading:
            raise LayoutUnknownError("the plan does not start with a cache; the mask is the ordinary causal one")
        lengths = [part.valid_length for part in leading] if padded_lengths is None else list(padded_lengths)
        if len(lengths) != len(leading):
            raise ArgumentValueError("padded_lengths", f"must hold {len(leading)} entries, one for each leading part")
        with arguments_checked():
            return AttentionLayout(
                spans=tuple(
                    AttentionSpan(
                        first_position=part.first_position, length=part.valid_length, padded_length=padded, cached=True
                    )
                    for part, padded in zip(leading, lengths, strict=True)
                )
            )
