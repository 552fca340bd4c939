"""K and V memory of one layer with room behind the tokens it holds, so that new ones need no copy of the old."""

from __future__ import annotations

from typing import TypeAlias

import torch

from kvbridge.integrations.transformers.errors import CacheMismatchError

KeysAndValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""K and V, each `[batch, heads, tokens, head dimension]`."""
_TOKENS = 2
"""The dimension along which tokens follow each other."""


class Room:
    """Two buffers of `[batch, heads, room, head dimension]`, one for K and one for V, with any strides.

    The room knows how to write behind a span of tokens and where a view lies. Which span is in use is up to the layer.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take over two buffers, which nobody else may write from now on."""
        assert keys.dim() == values.dim() == _TOKENS + 2, (keys.shape, values.shape)
        assert keys.shape[:-1] == values.shape[:-1], (keys.shape, values.shape)
        self._keys = keys
        self._values = values
        self.copies = 0
        """How often the tokens held were copied into larger memory."""

    @property
    def tokens(self) -> int:
        """Return how many tokens the room has memory for."""
        return int(self._keys.shape[_TOKENS])

    def view(self, start: int, length: int) -> KeysAndValues:
        """Return the tokens `[start, start + length)` without copying."""
        return self._keys.narrow(_TOKENS, start, length), self._values.narrow(_TOKENS, start, length)

    def locate(self, keys: torch.Tensor, values: torch.Tensor) -> int | None:
        """Return at which token both views start, or None if they are not views of this room."""
        start = _start_in(self._keys, keys)
        return start if start == _start_in(self._values, values) else None

    def append(self, start: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """Write new tokens behind those in `[start, start + length)` and return where all of them start now.

        If they do not fit, the tokens held move to memory of twice the size needed, so that each token is copied a
        constant number of times on average, however many are added.

        Args:
            start: First token held.
            length: Number of tokens held.
            keys: New keys, `[batch, heads, new tokens, head dimension]`.
            values: New values, likewise.

        Raises:
            CacheMismatchError: shape, dtype or device of the new tokens are not those of the room.
        """
        _check_fit("keys", self._keys, keys)
        _check_fit("values", self._values, values)
        new = keys.shape[_TOKENS]
        if start + length + new > self.tokens:
            self._move(start, length, 2 * (length + new))
            start = 0
        held_keys, held_values = self.view(start + length, new)
        held_keys.copy_(keys)
        held_values.copy_(values)
        return start

    def _move(self, start: int, length: int, tokens: int) -> None:
        keys, values = self.view(start, length)
        self._keys = enlarged(keys, tokens)
        self._values = enlarged(values, tokens)
        self.copies += 1


def enlarged(held: torch.Tensor, tokens: int, *, device: torch.device | None = None) -> torch.Tensor:
    """Return new memory for `tokens` tokens, on `device` if given, that begins with a copy of those held.

    Args:
        held: `[batch, heads, length, head dimension]`.
        tokens: Room of the result; at least `length`.
        device: Where the new memory lies; where the old lies if absent.
    """
    length = held.shape[_TOKENS]
    shape = (*held.shape[:_TOKENS], tokens, held.shape[-1])
    # Memory that is allocated in inference mode could not be written to outside of it later.
    with torch.inference_mode(mode=False), torch.no_grad():
        larger = torch.empty(shape, dtype=held.dtype, device=held.device if device is None else device)
        larger.narrow(_TOKENS, 0, length).copy_(held)
    return larger


def _start_in(buffer: torch.Tensor, view: torch.Tensor) -> int | None:
    alike = (
        view.dim() == buffer.dim()
        and view.dtype == buffer.dtype
        and view.device == buffer.device
        and view.stride() == buffer.stride()
        and view.shape[:_TOKENS] == buffer.shape[:_TOKENS]
        and view.shape[-1] == buffer.shape[-1]
        and view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    )
    if not alike:
        return None
    start, rest = divmod(int(view.storage_offset()) - int(buffer.storage_offset()), buffer.stride(_TOKENS))
    inside = rest == 0 and 0 <= start <= buffer.shape[_TOKENS] - view.shape[_TOKENS]
    return start if inside else None


def _check_fit(name: str, buffer: torch.Tensor, new: torch.Tensor) -> None:
    sides = {
        "dtype": (buffer.dtype, new.dtype),
        "device": (buffer.device, new.device),
        "batch and heads": (tuple(buffer.shape[:_TOKENS]), tuple(new.shape[:_TOKENS])),
        "head dimension": (buffer.shape[-1], new.shape[-1]),
    }
    for field, (expected, found) in sides.items():
        if expected != found:
            raise CacheMismatchError(
                f"{name}.{field}", expected=expected, found=found, hint="the cache against the model"
            )
