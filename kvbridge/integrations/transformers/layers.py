"""Cache layers that write new tokens behind a handed-over prefix, in place, and otherwise are the library's own.

Everything that a layer does besides `update` and `reset` is inherited, in whichever release is installed: cropping
slices the views, selecting and repeating rows makes copies. `update` therefore asks where `keys` and `values` lie:

1. Views of the room: write behind them and return longer views. The prefix is not copied.
2. Anything else, because rows were selected or somebody assigned: leave the room and do what the library does.
3. With autograd on, likewise: a graph may hold the views, and must not see them change.

A layer that left the room does not come back to it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvbridge.integrations.transformers.headroom import KeysAndValues, Room, enlarged

_TOKENS = 2


class _InPlace:
    """What both kinds of layer share: the room, and finding the layer's views in it."""

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool

    room: Room | None
    """Memory of the prefix and of what follows; None once the layer computes in its own tensors."""
    copies_before: int
    """How often the prefix had been copied when the layer left its room."""

    def enter(self, room: Room, stored: int) -> None:
        """Take over a room whose first `stored` tokens are all that the layer keeps."""
        self.room = room
        self.copies_before = 0
        self.keys, self.values = room.view(0, stored)
        self.dtype, self.device = self.keys.dtype, self.keys.device
        self.is_initialized = True

    def _locate(self) -> int | None:
        """Return where the layer's views start in the room, or None if the library's own way has to be taken."""
        room = self.room
        start = None if room is None or torch.is_grad_enabled() else room.locate(self.keys, self.values)
        if start is None:
            self._leave()
        return start

    def _leave(self) -> None:
        if self.room is not None:
            self.copies_before = self.room.copies + 1
            self.room = None

    def _drop_contents(self) -> None:
        """Leave the room before a reset, which zeroes in some releases: the room is not to be overwritten."""
        self._leave()
        if self.is_initialized:
            self.keys, self.values = torch.zeros_like(self.keys), torch.zeros_like(self.values)

    def snapshot(self) -> dict[str, int | bool]:
        """Return how the layer's memory stands."""
        room = self.room
        start = None if room is None else room.locate(self.keys, self.values)
        return {
            "in_place": start is not None,
            "copies": self.copies_before if room is None else room.copies,
            "headroom_tokens": 0 if room is None or start is None else room.tokens - start - self.keys.shape[_TOKENS],
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the tokens held, with as much head-room behind them, but not the memory around them."""
        twin = copy.copy(self)
        memo[id(self)] = twin
        if self.room is None:
            twin.keys, twin.values = copy.deepcopy((self.keys, self.values), memo)
            return twin
        stored = self.keys.shape[_TOKENS]
        tokens = stored + int(self.snapshot()["headroom_tokens"])
        twin.enter(Room(enlarged(self.keys, tokens), enlarged(self.values, tokens)), stored)
        return twin


class HandoffLayer(_InPlace, DynamicLayer):  # type: ignore[misc, no-untyped-call] # untyped there
    """A layer of full attention that grows in place behind a handed-over prefix."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, *, stored: int) -> None:
        """Take over memory for K and V, each `[1, heads, room, head dimension]`, with `stored` tokens at its front."""
        super().__init__()  # type: ignore[no-untyped-call] # untyped there
        self.enter(Room(keys, values), stored)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeysAndValues:
        """Add new tokens, each tensor `[1, heads, new, head dimension]`, and return K and V of all tokens.

        Raises:
            CacheMismatchError: shape, dtype or device are not those of the cache.
        """
        start = self._locate()
        if start is None or self.room is None:
            return super().update(key_states, value_states, *args, **kwargs)
        held = self.keys.shape[_TOKENS]
        start = self.room.append(start, held, key_states, value_states)
        self.keys, self.values = self.room.view(start, held + key_states.shape[_TOKENS])
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens as the installed release does; the room keeps its bytes."""
        self._drop_contents()
        super().reset()


class HandoffSlidingLayer(_InPlace, DynamicSlidingWindowLayer):  # type: ignore[misc, no-untyped-call] # untyped there
    """A sliding-window layer that grows in place behind a handed-over prefix and forgets from its front."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, *, stored: int, sliding_window: int, seen_tokens: int
    ) -> None:
        """Take over memory for K and V, each `[1, heads, room, head dimension]`, with `stored` tokens at its front.

        Args:
            keys: Memory for keys.
            values: Memory for values.
            stored: The newest tokens of the prefix that the layer keeps.
            sliding_window: Tokens that a query sees, itself included.
            seen_tokens: Length of the whole prefix, forgotten tokens included. Positions and masks depend on it.
        """
        super().__init__(sliding_window=sliding_window)
        self.enter(Room(keys, values), stored)
        self.cumulative_length = seen_tokens
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> KeysAndValues:
        """Add new tokens, each tensor `[1, heads, new, head dimension]`, and return K and V of all that they may see.

        Raises:
            CacheMismatchError: shape, dtype or device are not those of the cache.
        """
        start = self._locate()
        if start is None or self.room is None:
            return super().update(key_states, value_states, *args, **kwargs)
        held, new = self.keys.shape[_TOKENS], key_states.shape[_TOKENS]
        start = self.room.append(start, held, key_states, value_states)
        self.cumulative_length += new
        end, past = start + held + new, self.sliding_window - 1
        # A release that can roll back keeps everything until `crop`, and shows only what the mask was told of.
        recording = bool(getattr(self, "record_past", False))
        kept = held + new if recording else min(held + new, past)
        shown = min(held + new, past + new) if recording else held + new
        self.keys, self.values = self.room.view(end - kept, kept)
        return self.room.view(end - shown, shown)

    def reset(self) -> None:
        """Forget all tokens as the installed release does; the room keeps its bytes."""
        self._drop_contents()
        super().reset()
