"""Where the parts of a plan lie on the consumer's axis of keys, and which token may see which.

A plan's parts stand one after another in the consumer's context; behind them come the consumer's own new tokens. The
axis of keys is therefore a row of *slots*: for each part its real tokens and then its padding, and from `key_length` on
one slot for each new token. The rule is called block-causal:

1. Each part is causal in itself: a token sees itself and the tokens of its part before it.
2. Later parts, and the new tokens, see all earlier parts.
3. Nobody sees padding or the future, and padding sees nothing.

Positions run on from part to part without a gap, whatever padding lies between. So the rule says no more than: a real
token sees the real tokens whose positions are not greater than its own. Two things follow.

- Without padding inside the axis, slots and positions differ by a constant, and block-causal is exactly the ordinary
  causal mask. This is so for a single part without padding, and for any number of them.
- With padding in front of a later token the ordinary causal mask is wrong: it shows the padding. No other difference
  exists, for no part is hidden from a later one.

A layer with a sliding window sees, of these, only the keys whose position is greater than the query's minus the window.
The window counts positions and not slots: padding takes no room in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX

SPANS_MAX = 64
"""Most parts in one plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpan:
    """One part's tokens on the consumer's axis of keys: real ones first, padding on the right."""

    first_position: int
    """Position of the first token; together with `length` at most `TOKENS_MAX`."""
    length: int
    """Real tokens, at least 1."""
    # Left out it becomes `length`, before anybody can read it; passing None is an error to the type checker alone.
    padded_length: int = None  # type: ignore[assignment]
    """Slots that the part takes, padding included; `length` if it is left out."""
    cached: bool
    """Whether keys and values are handed over; otherwise the consumer computes them from the text."""

    def __post_init__(self) -> None:
        """Refuse lengths and positions that no part can have.

        Raises:
            InvalidFieldError: a field is out of range; the error names it.
        """
        _check_integer("layout.spans.first_position", self.first_position, 0, TOKENS_MAX - 1)
        _check_integer("layout.spans.length", self.length, 1, TOKENS_MAX - self.first_position)
        if self.padded_length is None:
            object.__setattr__(self, "padded_length", self.length)
        _check_integer("layout.spans.padded_length", self.padded_length, self.length, TOKENS_MAX)
        if not isinstance(self.cached, bool):
            raise InvalidFieldError("layout.spans.cached", f"must be a bool, got {self.cached!r}")

    @property
    def end_position(self) -> int:
        """Return the position behind the last real token."""
        return self.first_position + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """The parts of a plan in order."""

    spans: tuple[AttentionSpan, ...]
    """1 to `SPANS_MAX` parts, whose positions run on without a gap."""

    def __post_init__(self) -> None:
        """Refuse parts that do not follow each other, and an axis longer than any payload.

        Raises:
            InvalidFieldError: the number of parts, a part's first position or the sum of their slots is out of range.
        """
        if not 1 <= len(self.spans) <= SPANS_MAX:
            raise InvalidFieldError("layout.spans", f"must hold 1 to {SPANS_MAX} parts, got {len(self.spans)}")
        for index in range(1, len(self.spans)):
            expected, found = self.spans[index - 1].end_position, self.spans[index].first_position
            if found != expected:
                raise InvalidFieldError(
                    "layout.spans.first_position", f"of part {index} must be {expected}, behind the last, got {found}"
                )
        if self.key_length > TOKENS_MAX:
            raise InvalidFieldError(
                "layout.spans.padded_length", f"is {self.key_length} in all parts; at most {TOKENS_MAX} are allowed"
            )

    @property
    def key_length(self) -> int:
        """Return the slots of all parts, padding included; the first new token has this index."""
        return sum(span.padded_length for span in self.spans)

    @property
    def valid_length(self) -> int:
        """Return the real tokens of all parts."""
        return sum(span.length for span in self.spans)

    @property
    def padding_length(self) -> int:
        """Return the slots of all parts that hold no token; without any, plain causal attention is right."""
        return self.key_length - self.valid_length

    def positions(self) -> range:
        """Return the position of every real token of the parts; new tokens go on at its `stop`."""
        return range(self.spans[0].first_position, self.spans[-1].end_position)

    def placed(self) -> Iterator[tuple[int, AttentionSpan]]:
        """Yield each part with the index of its first slot."""
        start = 0
        for span in self.spans:
            yield start, span
            start += span.padded_length

    def position_of(self, slot: int) -> int | None:
        """Return the position of the token in a slot of the parts or of a new token, and None for padding.

        Raises:
            InvalidFieldError: the slot is negative.
        """
        if slot < 0:
            raise InvalidFieldError("slot", f"must be at least 0, got {slot}")
        for start, span in self.placed():
            if slot < start + span.padded_length:
                return span.first_position + slot - start if slot < start + span.length else None
        return self.positions().stop + slot - self.key_length

    def oldest_seen(self, queries: range, window_tokens: int | None = None) -> int:
        """Return the first slot that any token in `queries` may attend to; where all are padding, the first of them.

        A cache that keeps this slot and all behind it can serve these queries.

        Args:
            queries: Slots of the parts or of new tokens, one after another; at least one.
            window_tokens: As for `sees`.

        Raises:
            InvalidFieldError: `queries` or the window is out of range.
        """
        check_window(window_tokens)
        check_slots("queries", queries)
        query = self._next_token(queries.start)
        seeing = self.position_of(query)
        if seeing is None or query >= queries.stop:
            return queries.start
        first = self.positions().start
        oldest = first if window_tokens is None else max(first, seeing - window_tokens + 1)
        return self._slot_of(oldest)

    def sees(self, query: int, key: int, window_tokens: int | None = None) -> bool:
        """Return whether the token in slot `query` may attend to the one in slot `key`.

        This is the definition; every mask is tested against it.

        Args:
            query: A slot of the parts, or of a new token at or behind `key_length`.
            key: Likewise.
            window_tokens: Tokens that a layer with a sliding window sees, the query included; None for full attention.

        Raises:
            InvalidFieldError: a slot is negative, or the window is out of range.
        """
        check_window(window_tokens)
        seeing, seen = self.position_of(query), self.position_of(key)
        if seeing is None or seen is None or seen > seeing:
            return False
        return window_tokens is None or seen > seeing - window_tokens

    def padded_to(self, key_length: int) -> AttentionLayout:
        """Return the layout with so much padding behind the last part that it takes `key_length` slots.

        Raises:
            InvalidFieldError: the layout takes more slots already, or `key_length` is out of range.
        """
        _check_integer("key_length", key_length, self.key_length, TOKENS_MAX)
        last = self.spans[-1]
        longer = replace(last, padded_length=last.padded_length + key_length - self.key_length)
        return replace(self, spans=(*self.spans[:-1], longer))

    def _next_token(self, slot: int) -> int:
        """Return the first slot at or behind `slot` that holds a token."""
        for start, span in self.placed():
            if slot < start + span.length:
                return max(slot, start)
        return max(slot, self.key_length)

    def _slot_of(self, position: int) -> int:
        """Return the slot of a position that is not before the first."""
        for start, span in self.placed():
            if position < span.end_position:
                return start + position - span.first_position
        return self.key_length + position - self.positions().stop


def check_slots(name: str, slots: range) -> None:
    """Refuse slots that are not one or more in a row, or reach further than the longest axis.

    Raises:
        InvalidFieldError: it says so of `name`.
    """
    if slots.step != 1 or not 0 <= slots.start < slots.stop <= TOKENS_MAX:
        raise InvalidFieldError(name, f"must be at least one slot, in a row, within [0, {TOKENS_MAX}), got {slots}")


def check_window(window_tokens: int | None) -> None:
    """Refuse a window in which a token would not see itself.

    Raises:
        InvalidFieldError: the window is neither None nor an integer in range.
    """
    if window_tokens is not None:
        _check_integer("window_tokens", window_tokens, 1, TOKENS_MAX)


def _check_integer(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidFieldError(name, f"must be an integer in [{least}, {most}], got {value!r}")
