"""The way in: one object per bridge, shared by all threads of a process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc

from kvbridge.client.asking import Ask, ask_for, plan_references, plan_texts
from kvbridge.client.batches import BatchHandoff, Layers, publish_batch
from kvbridge.client.connector import Connector
from kvbridge.client.consuming import ACQUIRE_SECONDS_DEFAULT, Acquired, acquire, all_fallback
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import BridgeClosedError, BridgeForkedError
from kvbridge.client.exits import close_at_exit
from kvbridge.client.failures import CallFailedError
from kvbridge.client.handoffs import Handoff
from kvbridge.client.keeper import Keeper, KeeperSnapshot
from kvbridge.client.operating import Operating
from kvbridge.client.plan_handoffs import PlanHandoff
from kvbridge.client.plans import PublishPlan, plan_publication
from kvbridge.client.ports import Ports
from kvbridge.client.producing import Outcome, produce
from kvbridge.client.publications import Publication
from kvbridge.client.reporting import REPORT_SECONDS_DEFAULT, Reporter
from kvbridge.client.security import ChannelSecurity, Tls, security_of
from kvbridge.client.sessions import SessionSnapshot
from kvbridge.client.targets import Target, parse_target
from kvbridge.client.token_ids import AnyTokens, TokenIds
from kvbridge.client.turns import Turns
from kvbridge.core.descriptor import PayloadReference, Verification
from kvbridge.core.geometry import CacheGeometry
from kvbridge.core.media import MediaItem
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.core.tokens import TokenSequence

if TYPE_CHECKING:
    from kvbridge.transform.padding import PaddingSide

CLOSE_SECONDS_MAX = 3.0
"""Longest wait for writers in flight while the object is closed, and again for a bridge that does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSnapshot:
    """A bridge object at one moment."""

    target: str
    """What gRPC connects to."""
    by_value: bool
    """Whether tensors travel through gRPC instead of shared memory."""
    closed: bool
    """Whether `close` was called."""
    session: SessionSnapshot | None
    """The session with the bridge; absent before the first call."""
    keeper: KeeperSnapshot
    """What is renewed and returned in the background."""


def connect(
    target: str | None = None,
    *,
    by_value: bool = False,
    tls: Tls | None = None,
    token_file: str | None = None,
    tenant: str | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> Bridge:
    """Return an object for the bridge at `target`. Nothing is connected before the first call needs it.

    Args:
        target: None for this host's bridge (its default unix socket), `unix:/path` or `/path` for another socket, which
            share memory; or `host:port`, where tensors travel by value.
        by_value: Whether to send tensors by value over a unix socket, too.
        tls: What secures a channel to `host:port`; by default what `KVBRIDGE_TLS_CA`, `KVBRIDGE_TLS_CERTIFICATE`,
            `KVBRIDGE_TLS_KEY` and `KVBRIDGE_TLS_SERVER_NAME` say, and without the first of them nothing.
        token_file: File whose first line is the bearer token that proves who calls; by default the one that
            `KVBRIDGE_TOKEN_FILE` names. It is read again whenever it changes.
        tenant: The tenant to look at, for admins; by default the caller's own.
        credentials: What secures a channel to `host:port` in another way.

    Raises:
        ArgumentTypeError: an argument is of the wrong type.
        ArgumentValueError: the target has none of these forms, or the token would be sent in the clear.
    """
    parsed = parse_target(target, by_value=by_value)
    security = security_of(parsed, tls=tls, token_file=token_file, credentials=credentials, tenant=tenant)
    return Bridge(parsed, security)


class Bridge(Operating):
    """Publishes and acquires KV-caches. Threads may share it; a forked child must connect anew.

    `publish` and `acquire` never raise because a cache cannot be had: they answer with a publication that goes nowhere,
    or with the text. They raise for the caller's own mistakes. After a restart of the bridge the next call attaches
    again.
    """

    def __init__(self, target: Target, security: ChannelSecurity) -> None:
        """Prepare to talk to the bridge at `target`; `connect` is the way to make one."""
        self._target = target
        self._pid = os.getpid()
        self._closed = False
        self._keeper = Keeper()
        self._writers = Turns()
        self._connector = Connector(target, security, on_open=self._keeper.start)
        self._stop = weakref.finalize(self, self._keeper.stop)
        # At interpreter exit `close` does more: it waits until everything is returned.
        self._stop.atexit = False
        close_at_exit(self)

    def __repr__(self) -> str:
        how = "by value" if self.by_value else "shared memory"
        return f"<Bridge at {self._target.grpc_target}, {how}{', closed' if self._closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def by_value(self) -> bool:
        """Tell whether tensors travel through gRPC instead of shared memory."""
        return self._target.by_value

    # Producers

    def publish(
        self,
        key: str,
        *,
        model: ModelTag,
        geometry: CacheGeometry,
        tokens: TokenIds | TokenSequence,
        text: str | None = None,
        text_uri: str | None = None,
        summary: str | None = None,
        capacity_tokens: int | None = None,
        valid_length: int | None = None,
        first_position: int = 0,
        linger_seconds: float | None = None,
        ttl_seconds: float | None = None,
        hold: bool = False,
        derived_from: Iterable[PayloadReference] = (),
        aligner: AlignerTag | None = None,
        media: Iterable[MediaItem] = (),
        context: TokenIds | TokenSequence | None = None,
        context_media: Iterable[MediaItem] = (),
        verification: Verification = Verification.FULL,
        timeout: float | None = None,
    ) -> Publication:
        """Reserve a slot for one payload; use the result in a `with` block and write every layer into it.

        Args:
            key: Name under which consumers ask.
            model: Who computes the cache.
            geometry: Shape of the cache.
            tokens: The token ids, in order; if there are more than `valid_length`, the first ones count.
            text: What consumers take if they may not take the cache.
            text_uri: Where to find that, if it is not here; at most one of the two.
            summary: A shorter text for consumers whose context is long already.
            capacity_tokens: Tokens to make room for; `valid_length` by default.
            valid_length: Tokens that are real; all of `tokens` by default.
            first_position: Position at which the first token is encoded.
            linger_seconds: How long the payload stays when nobody references it; the node's default by default.
            ttl_seconds: How long it may be acquired at most; the node's default by default.
            hold: Whether to keep a reference, which `Publication.release` or the end of the publication object returns.
            derived_from: The payloads whose caches went into this one.
            aligner: The aligner that was applied to the cache already; its source must be `model`.
            media: What is not text among the tokens, such as images, in order; indices count from the first token.
            context: The token ids that the model saw before the first token. Only who has the same tokens there is
                given the cache; without them, only who begins with it.
            context_media: What is not text among those, in order.
            verification: How much of the bytes is checked before anybody can acquire them.
            timeout: Seconds that the reservation may take, and again the commit; by default 5, and more for the commit
                of a large payload.

        Raises:
            ArgumentTypeError: an argument is of the wrong type; the error names it.
            ArgumentValueError: an argument cannot be, here or in the bridge's eyes; the error names it.
            BridgeClosedError: this object was closed.
            BridgeForkedError: this object belongs to the parent process.
        """
        self._check_usable()
        plan = plan_publication(
            key,
            model=model,
            geometry=geometry,
            tokens=tokens,
            text=text,
            text_uri=text_uri,
            capacity_tokens=capacity_tokens,
            valid_length=valid_length,
            first_position=first_position,
            linger_seconds=linger_seconds,
            ttl_seconds=ttl_seconds,
            hold=hold,
            derived_from=derived_from,
            aligner=aligner,
            media=media,
            summary=summary,
            context=context,
            context_media=context_media,
            verification=verification,
            timeout_seconds=None if timeout is None else Deadline(timeout).timeout_seconds,
        )
        return self._begin(plan)

    def publish_batch(
        self,
        keys: Sequence[str],
        *,
        layers: Layers,
        model: ModelTag,
        geometry: CacheGeometry,
        tokens: Sequence[TokenIds | TokenSequence],
        valid_lengths: Sequence[int] | None = None,
        padding_side: PaddingSide | str = "right",
        texts: Sequence[str | None] | None = None,
        **options: Any,
    ) -> list[Publication]:
        """Publish every sequence of a padded batch as a payload of its own, without the padding.

        Args:
            keys: One name for each sequence.
            layers: `(layer, k, v)` for every layer, as an iterable, or a function from a layer's index to `(k, v)`. K
                and V are `[batch, heads, tokens, head_dim]`, whatever the geometry's order.
            model: Who computes the caches.
            geometry: Shape of the caches.
            tokens: The token ids of each sequence, without padding.
            valid_lengths: Real tokens of each sequence; as many as it has ids by default.
            padding_side: Where the padding of the batch lies, `left` or `right`.
            texts: What to take instead of each sequence.
            **options: Further arguments of `publish`, the same for all sequences.

        Raises:
            ArgumentTypeError: as for `publish` and `Publication.write`; nothing is published.
            ArgumentValueError: as for `publish` and `Publication.write`; nothing is published.
        """
        self._check_usable()
        return publish_batch(
            self.publish,
            keys,
            layers=layers,
            geometry=geometry,
            tokens=tokens,
            valid_lengths=valid_lengths,
            padding_side=padding_side,
            texts=texts,
            options={"model": model, **options},
        )

    # Consumers

    def acquire(
        self,
        key: str,
        *,
        model: ModelTag,
        tokens: TokenIds | TokenSequence | AnyTokens,
        geometry: CacheGeometry | None = None,
        generation: int = 0,
        first_position: int = 0,
        valid_length_min: int = 1,
        timeout: float = ACQUIRE_SECONDS_DEFAULT,
        text: str | None = None,
        verification: Verification | None = None,
        aligner: AlignerTag | None = None,
        media: Iterable[MediaItem] = (),
        edge: str = "",
        depth: int = 0,
        affinity: str = "",
    ) -> Handoff:
        """Ask for a cache; the answer comes within `timeout` seconds, whatever the bridge does.

        Args:
            key: The producer's name for the payload.
            model: The consumer's model; a cache of another version is never handed over.
            tokens: The consumer's token ids, of which the cached ones must be a prefix (of a bare digest: exactly
                those); or `ANY_TOKENS`, to take the tokens, with the cache, from the producer.
            geometry: The geometry that the consumer can read; any geometry of its model by default.
            generation: Which payload under the key; the newest by default.
            first_position: The position at which the consumer will place the first token.
            valid_length_min: Fewest valid tokens that are of use.
            timeout: Longest wait in seconds, a download included.
            text: What to take if neither a cache nor the bridge's own text can be had.
            verification: How much of the bytes the bridge checks again now; nothing by default.
            aligner: The aligner that must have been applied, or that the consumer will apply itself: then
                `Handoff.aligner_to_apply` is set and `geometry` is that of the aligner's source.
            media: What is not text in the consumer's prompt, such as images, in order. A cache with other media, or
                with any for a consumer that names none, is never handed over.
            edge: The edge of the agents' graph that the handoff runs along, by which routes are chosen.
            depth: How many handoffs the context has been through before this one.
            affinity: What a canary sticks to, such as the conversation; the key by default.

        Raises:
            ArgumentTypeError: an argument is of the wrong type; the error names it.
            ArgumentValueError: an argument cannot be, here or in the bridge's eyes; the error names it.
        """
        deadline = Deadline(timeout)
        ask = ask_for(
            [PayloadReference(key=key, generation=generation)],
            model=model,
            tokens=tokens,
            texts=[text],
            geometry=geometry,
            first_position=first_position,
            valid_length_min=valid_length_min,
            verification=verification,
            aligner=aligner,
            media=media,
            edge=edge,
            depth=depth,
            affinity=affinity,
        )
        return self._acquire(ask, deadline).handoffs[0]

    def acquire_plan(
        self,
        keys: Sequence[str | PayloadReference],
        *,
        model: ModelTag,
        tokens: TokenIds | TokenSequence | AnyTokens,
        timeout: float = ACQUIRE_SECONDS_DEFAULT,
        texts: Sequence[str | None] | None = None,
        **options: Any,
    ) -> PlanHandoff:
        """Ask for the caches of one context that was computed in several pieces.

        Args:
            keys: The payloads in the order in which they stand in the context, each by key or by a reference with its
                generation. What each covers must begin where the one before it ends.
            model: The consumer's model.
            tokens: The token ids of the whole context, or `ANY_TOKENS`.
            timeout: Longest wait in seconds for all together.
            texts: What to take instead of each, if the bridge gives no text.
            **options: Further arguments of `acquire` but `generation` and `text`, the same for all parts; `media` are
                those of the whole context.

        Raises:
            ArgumentTypeError: as for `acquire`; nothing is acquired.
            ArgumentValueError: as for `acquire`, or a key is named twice; nothing is acquired.
        """
        deadline = Deadline(timeout)
        references = plan_references(keys)
        given = plan_texts(texts, len(references))
        ask = ask_for(references, model=model, tokens=tokens, texts=given, **options)
        acquired = self._acquire(ask, deadline)
        return PlanHandoff(acquired.handoffs, acquired.layout, asked_tokens=ask.token_count)

    def acquire_batch(
        self,
        keys: Sequence[str],
        *,
        model: ModelTag,
        tokens: Sequence[TokenIds | TokenSequence | AnyTokens],
        timeout: float = ACQUIRE_SECONDS_DEFAULT,
        texts: Sequence[str | None] | None = None,
        **options: Any,
    ) -> BatchHandoff:
        """Ask for several caches at once; every answer comes within `timeout` seconds.

        Args:
            keys: The producers' names for the payloads.
            model: The consumer's model.
            tokens: The token ids of each sequence, or `ANY_TOKENS`.
            timeout: Longest wait in seconds for all together.
            texts: What to take instead of each.
            **options: Further arguments of `acquire`, the same for all.

        Raises:
            ArgumentTypeError: as for `acquire`; nothing is acquired.
            ArgumentValueError: as for `acquire`; nothing is acquired.
        """
        deadline = Deadline(timeout)
        return BatchHandoff.acquire(
            lambda ask: self._acquire(ask, deadline).handoffs[0],
            keys,
            tokens=tokens,
            texts=texts,
            options={"model": model, **options},
        )

    def report_prefill(
        self, model: ModelTag, tokens: int, seconds: float, *, timeout: float = REPORT_SECONDS_DEFAULT
    ) -> bool:
        """Tell the bridge how long `model` took to prefill `tokens` tokens, and return whether it took the report.

        After three reports of like lengths the bridge knows whether handing a cache over pays, instead of guessing by
        its length. Report what a consumer prefills from text, whenever it does.

        Raises:
            ArgumentTypeError: an argument is of the wrong type.
            ArgumentValueError: an argument cannot be.
        """
        try:
            self._check_usable()
        except (BridgeForkedError, BridgeClosedError):
            return False
        return Reporter(self._connector).prefill(model, tokens, seconds, timeout=timeout)

    # Life

    def snapshot(self) -> BridgeSnapshot:
        """Return the state of this object, without asking the bridge."""
        return BridgeSnapshot(
            target=self._target.grpc_target,
            by_value=self.by_value,
            closed=self._closed,
            session=self._connector.snapshot(),
            keeper=self._keeper.snapshot(),
        )

    def close(self) -> None:
        """Return every lease, hold and reservation and let the bridge go; more than once does nothing.

        Tensors of leased caches must not be used any more. In a forked child this does nothing.
        """
        if self._pid != os.getpid():
            return
        self._closed = True
        self._writers.end(CLOSE_SECONDS_MAX)
        self._connector.stop_writing()  # Whoever has not come to an end by now, or kept a view, writes for nobody.
        self._keeper.stop()
        self._keeper.join(CLOSE_SECONDS_MAX)
        self._connector.close()

    # Inside

    def _ports(self) -> Ports:
        # Made for each call: as an attribute it would form a cycle, and the last reference would not end this object.
        return Ports(connector=self._connector, keeper=self._keeper, writers=self._writers, owner=self)

    def _is_closed(self) -> bool:
        return self._closed

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise BridgeForkedError("the bridge object belongs to the parent process; connect anew in the child")
        if self._closed:
            raise BridgeClosedError("the bridge object was closed")

    def _begin(self, plan: PublishPlan) -> Publication:
        try:
            return Publication(plan, produce(self._ports(), plan), None)
        except CallFailedError as failure:
            failure.raise_if_misuse()
            return Publication(plan, None, Outcome(reference=None, reason=failure.reason, detail=str(failure)))

    def _acquire(self, ask: Ask, deadline: Deadline) -> Acquired:
        try:
            self._check_usable()
        except (BridgeForkedError, BridgeClosedError) as error:
            return all_fallback(ask, Reason.BRIDGE_UNREACHABLE, str(error))
        return acquire(self._ports(), ask, deadline)
