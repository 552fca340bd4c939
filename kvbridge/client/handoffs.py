"""What a consumer gets: the cache, or the text and the reason."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import (
    AlignerNotAppliedError,
    ArgumentValueError,
    HandoffInvalidError,
    NoCacheError,
    ScaledValuesError,
)
from kvbridge.client.kv_views import KvView
from kvbridge.client.paged import BlockTable, KvBlocks, Paging
from kvbridge.client.plans import index
from kvbridge.client.reporting import REPORT_SECONDS_DEFAULT, HandoffReport, Reporter, handoff_use
from kvbridge.client.token_ids import unpack_token_ids
from kvbridge.client.views import NumpyArray
from kvbridge.client.windows import WindowLayer
from kvbridge.core.descriptor import PayloadDescriptor
from kvbridge.core.geometry import DimensionOrder
from kvbridge.core.journal import HandoffQuality, HandoffUse
from kvbridge.core.media import MediaItem
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag
from kvbridge.v1 import types_pb2
from kvbridge.wire import decode_descriptor

if TYPE_CHECKING:
    import torch

HandoffCache: TypeAlias = Any
"""`kvbridge.integrations.transformers.HandoffCache`, a `DynamicCache`; only who has transformers can name it."""

HEADROOM_TOKENS_DEFAULT = 512
"""Room for new tokens behind a cache that was turned into one of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the bridge, or the SDK in its place, said to an acquire."""

    key: str
    """The name that was asked for."""
    handoff_id: str = ""
    """Names the handoff in logs; empty if the bridge did not answer."""
    reason: Reason | None = None
    """Why there is no cache; absent if there is one."""
    detail: str = ""
    """The same, for people."""
    text: str | None = None
    """What to take instead: the bridge's, else the caller's own."""
    text_uri: str | None = None
    """Where to find it."""
    summary: str | None = None
    """The producer's summary of the text; absent if it gave none."""
    packed_tokens: bytes | None = None
    """The tokens of the cache, or those of the text: the bridge's, else the caller's own."""
    retry_after_seconds: float | None = None
    """When asking again may help; absent if it will not."""
    descriptor: types_pb2.PayloadDescriptor | None = None
    """The payload as described; present exactly with a cache."""
    asked_tokens: int | None = None
    """How many tokens the caller's own prompt has; absent if it said none, or for a part of several."""
    aligner_to_apply: AlignerTag | None = None
    """The aligner that the caller named and must apply before use; absent if the cache is used as it is."""
    media: tuple[MediaItem, ...] = ()
    """What is not text among the cached tokens."""


class Handoff:
    """Two branches: `kv` is there and is read, or it is None and `text` or `tokens` are taken, for `reason`.

    The lease ends with the `with` block or `release`, which forbid any further use of the tensors; otherwise when the
    handoff *and* every tensor made from it are gone.

    If `aligner_to_apply` is set, which happens to those alone who named an aligner to `acquire`, the layers are those
    that the source model computed. `layer` and `copy_layer` give them so that the aligner can be applied; whatever
    would use them as they are raises `AlignerNotAppliedError`. Values that are stored scaled are read likewise.
    """

    def __init__(self, answer: Answer, kv: KvView | None = None) -> None:
        """Hand over `kv`, if there is one."""
        assert (kv is None) == (answer.descriptor is None), answer
        self._answer = answer
        self._kv = kv
        self._reason = answer.reason
        self._detail = answer.detail
        self._reporter: Reporter | None = None

    def __repr__(self) -> str:
        what = repr(self._kv) if self._kv else f"text because of {self._reason}" if self._reason else "released"
        return f"<Handoff of {self._answer.key!r}: {what}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # What was answered

    @property
    def kv(self) -> KvView | None:
        """Return the cache; None if there is none, it was released, or a check found the lease lost."""
        return self._kv

    @property
    def key(self) -> str:
        """Return the name that was asked for."""
        return self._answer.key

    @property
    def reason(self) -> Reason | None:
        """Return why there is no cache; None if there is or was one."""
        return self._reason

    @property
    def detail(self) -> str:
        """Return the reason for people; empty without a reason."""
        return self._detail

    @property
    def text(self) -> str | None:
        """Return what to take instead of the cache: the bridge's, else the one that was given to `acquire`."""
        return self._answer.text

    @property
    def text_uri(self) -> str | None:
        """Return where to find what to take instead of the cache."""
        return self._answer.text_uri

    @property
    def summary(self) -> str | None:
        """Return the producer's summary of the text, which comes with the text; None if it gave none."""
        return self._answer.summary

    @property
    def tokens(self) -> list[int] | None:
        """Return the token ids of the cache; without one those of the text, as far as they are known."""
        packed = self._answer.packed_tokens
        return None if packed is None else unpack_token_ids(packed)

    @property
    def handoff_id(self) -> str:
        """Return the name of this handoff in the bridge's logs; empty if the bridge did not answer."""
        return self._answer.handoff_id

    @property
    def retry_after_seconds(self) -> float | None:
        """Return when asking again may help; None if it will not."""
        return self._answer.retry_after_seconds

    @property
    def valid_length(self) -> int:
        """Return how many tokens the cache covers; 0 if there was none."""
        return self._answer.descriptor.valid_length if self._answer.descriptor else 0

    @property
    def first_position(self) -> int:
        """Return the position at which the first cached token was encoded; 0 if there was no cache."""
        return self._answer.descriptor.first_position if self._answer.descriptor else 0

    @property
    def descriptor(self) -> PayloadDescriptor | None:
        """Return all that is known of the payload; None if there was no cache."""
        return decode_descriptor(self._answer.descriptor) if self._answer.descriptor else None

    @property
    def aligner_to_apply(self) -> AlignerTag | None:
        """Return the aligner that was named to `acquire` and must be applied to the layers; None for none."""
        return self._answer.aligner_to_apply

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """Return what is not text among the cached tokens, by index among them; empty if there was no cache."""
        return self._answer.media

    def require_own(self) -> None:
        """Refuse to use the cache as it is stored where it still has to be aligned or multiplied by scales.

        Raises:
            NoCacheError: there is no cache.
            AlignerNotAppliedError: an aligner is still to be applied.
            ScaledValuesError: the cache holds scaled values.
        """
        kv = self._require()
        aligner = self._answer.aligner_to_apply
        if aligner is not None:
            raise AlignerNotAppliedError(
                f"the cache of {self.key!r} is {aligner.source.name!r}'s until aligner {aligner.name!r} is applied; "
                "copy its layers, apply it, and use the result"
            )
        if any(group.k_scales or group.v_scales for group in kv.geometry.groups):
            raise ScaledValuesError(f"the cache of {self.key!r} holds scaled values; take the text")

    # Reading

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer in place, `[heads, stored tokens, dim]`; see `KvView` on writing to them.

        Raises:
            NoCacheError: there is no cache.
            UnknownLayerError: the payload has no such layer.
        """
        return self._require().layer(layer)

    def numpy_layer(self, layer: int) -> tuple[NumpyArray, NumpyArray]:
        """Return K and V of one layer as read-only arrays in place.

        Raises:
            NoCacheError: there is no cache.
            UnknownLayerError: the payload has no such layer.
            TypeError: the values are bfloat16, which numpy does not have.
        """
        return self._require().numpy_layer(layer)

    def copy_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of K and V of one layer, checked after the copy.

        Raises:
            NoCacheError: there is no cache.
            UnknownLayerError: the payload has no such layer.
            HandoffInvalidError: the lease was lost before the copy was complete; the handoff has no cache any more.
        """
        kv = self._require()
        try:
            return kv.copy_layer(layer)
        except HandoffInvalidError:
            self._lose()
            raise

    def scatter_paged(
        self,
        layer: int,
        kv_blocks: KvBlocks,
        block_table: BlockTable,
        *,
        block_order: DimensionOrder | str = DimensionOrder.NHD,
        kv_axis: int | None = None,
        block_axis: int = 0,
        skip_tokens: int = 0,
    ) -> bool:
        """Copy K and V of one layer into a paged cache and tell whether what was copied is right.

        If not, the lease was lost meanwhile: discard the blocks and take the text. The arguments are those of
        `Publication.write_paged`; the blocks may be of any size and order.

        Raises:
            NoCacheError: there is no cache.
            AlignerNotAppliedError: the cache still has to be aligned.
            ScaledValuesError: the cache holds scaled values; take the text.
            UnknownLayerError: the payload has no such layer.
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: the arguments do not fit each other or the layer.
        """
        self.require_own()
        paging = Paging(
            block_table=block_table, block_order=block_order, block_axis=block_axis, skip_tokens=skip_tokens
        )
        scattered = self._require().scatter_paged(layer, kv_blocks, paging, kv_axis=kv_axis)
        if not scattered:
            self._lose()
        return scattered

    def private_window(self, headroom_tokens: int = HEADROOM_TOKENS_DEFAULT) -> Mapping[int, WindowLayer]:
        """Return every layer as writable tensors with room behind the cache, copying only pages that are written to.

        Raises:
            NoCacheError: there is no cache.
            ArgumentValueError: the room is negative.
            HandoffInvalidError: the lease was lost meanwhile; the handoff has no cache any more.
        """
        kv = self._require()
        try:
            return kv.private_window(_checked_headroom(headroom_tokens))
        except HandoffInvalidError:
            self._lose()
            raise

    def as_transformers_cache(
        self, headroom_tokens: int = HEADROOM_TOKENS_DEFAULT, *, device: Any = None
    ) -> HandoffCache:
        """Return a cache of the transformers library, which continues generation and keeps the lease.

        The prefix is mapped copy-on-write and new tokens are written behind it, so that neither this call nor the first
        decoding step copies it. A cache that covers the whole prompt gives its last token up, because a model has to be
        given one at least. Ask `still_valid` after the last use.

        Args:
            headroom_tokens: How many new tokens to make room for; more are possible, but copy the prefix once.
            device: Where the model computes, if that is not the host.

        Raises:
            NoCacheError: there is no cache.
            AlignerNotAppliedError: the cache still has to be aligned.
            ScaledValuesError: the cache holds scaled values; take the text.
            ArgumentValueError: the room is negative.
            HandoffInvalidError: the lease was lost meanwhile; the handoff has no cache any more.
            UnsupportedCacheError: transformers could not continue from these positions; take the text.
        """
        self.require_own()
        # The integration stands above the client and loads transformers, so it is found only where it is asked for.
        integration: Any = importlib.import_module("kvbridge.integrations.transformers")
        cache: HandoffCache = integration.cache_from_handoff(
            self, token_count=self._answer.asked_tokens, headroom_tokens=headroom_tokens, device=device
        )
        return cache

    def require_valid(self) -> None:
        """Refuse what was read from the cache up to now if the lease was lost.

        Raises:
            HandoffInvalidError: it was; the handoff has no cache any more.
        """
        if not self.still_valid():
            raise HandoffInvalidError(f"the lease of {self.key!r} was lost; take the text instead of what was read")

    def still_valid(self) -> bool:
        """Tell whether everything read from the cache up to now is right; ask again after the last use."""
        kv = self._kv
        if kv is None:
            return False
        if kv.valid():
            return True
        self._lose()
        return False

    def release(self) -> None:
        """Return the lease; no tensor may be used any more. More than once does nothing."""
        kv, self._kv = self._kv, None
        if kv is not None:
            kv.release()

    # What became of it

    def report(
        self,
        *,
        used: bool | None = None,
        quality: HandoffQuality | str | None = None,
        detail: str = "",
        tokens_saved: int | None = None,
        prefill_tokens: int | None = None,
        prefill_seconds: float | None = None,
        scatter_bytes: int | None = None,
        scatter_seconds: float | None = None,
        timeout: float = REPORT_SECONDS_DEFAULT,
    ) -> bool:
        """Tell the bridge what became of the handoff, and return whether it took the report; it may be away.

        The parts of a plan are one handoff, of which only the first report moves breakers and costs.

        Args:
            used: Whether the cache was used; by default it was if there was one and its lease was not lost.
            quality: How good the result was, `GOOD` or `BAD`, if that is known: bad ones trip the route.
            detail: What happened, for people.
            tokens_saved: Tokens that needed no prefill; the cached ones of a used cache by default.
            prefill_tokens: Tokens of a prefill that was run and timed, with or without a cache.
            prefill_seconds: How long that took.
            scatter_bytes: Bytes that were brought into the consumer's own memory; none if the cache was read in place.
            scatter_seconds: How long that took.
            timeout: Longest wait in seconds.

        Raises:
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: an argument cannot be, such as that a cache was used where there was none.
        """
        descriptor = self._answer.descriptor
        use = handoff_use(had_cache=descriptor is not None, lost=self._reason is not None, used=used)
        if tokens_saved is None:
            tokens_saved = descriptor.valid_length if descriptor is not None and use is HandoffUse.USED else 0
        report = HandoffReport(
            use=use,
            quality=quality,
            detail=detail,
            tokens_saved=tokens_saved,
            prefill_tokens=prefill_tokens,
            prefill_seconds=prefill_seconds,
            scatter_bytes=scatter_bytes,
            scatter_seconds=scatter_seconds,
        )
        request, deadline = report.request(self.handoff_id), Deadline(timeout)
        return self._reporter is not None and self._reporter.handoff(request, deadline)

    def reporting_to(self, reporter: Reporter) -> Self:
        """Report to a bridge from now on, and return this handoff."""
        self._reporter = reporter
        return self

    # Inside

    def _require(self) -> KvView:
        kv = self._kv
        if kv is None:
            why = f"{self._reason}: {self._detail}" if self._reason else "it was released"
            raise NoCacheError(f"the handoff of {self.key!r} has no cache ({why}); look at handoff.kv first")
        return kv

    def _lose(self) -> None:
        """Turn into a fallback."""
        self._reason = Reason.PAYLOAD_EXPIRED
        self._detail = "the lease was lost while the cache was in use; what was read must be discarded"
        self.release()


def _checked_headroom(headroom_tokens: int) -> int:
    headroom = index("headroom_tokens", headroom_tokens)
    if headroom < 0:
        raise ArgumentValueError("headroom_tokens", f"must not be negative, got {headroom}")
    return headroom
