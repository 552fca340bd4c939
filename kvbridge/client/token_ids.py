"""Token ids as callers have them, packed as they travel."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numpy as np

from kvbridge.client.errors import ArgumentTypeError, ArgumentValueError, arguments_checked
from kvbridge.core.tokens import TOKEN_ID_BYTES, TokenSequence

if TYPE_CHECKING:
    import torch


class AnyTokens(Enum):
    """The type of `ANY_TOKENS`."""

    ANY_TOKENS = "ANY_TOKENS"


ANY_TOKENS: Final = AnyTokens.ANY_TOKENS
"""Given as `tokens` by a consumer that does not know them and takes them, with the cache, from the producer."""

TokenIds: TypeAlias = "Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
"""Token ids: any sequence of ints, or a one-dimensional integer array or tensor."""

_ID_MAX = (1 << 32) - 1
_PACKED = np.dtype("<u4")


def pack_token_ids(tokens: TokenIds, field: str = "tokens") -> bytes:
    """Return the ids as unsigned 32-bit little-endian integers.

    Raises:
        ArgumentTypeError: they are no integers, or not in one dimension.
        ArgumentValueError: there are none, or one does not fit 32 bits.
    """
    packed = _packed_array(tokens, field) if hasattr(tokens, "dtype") else _packed_sequence(tokens, field)
    if not packed:
        raise ArgumentValueError(field, "must hold at least one id")
    return packed


def token_sequence(tokens: TokenIds | TokenSequence, field: str = "tokens") -> TokenSequence:
    """Return the ids, or a sequence that the caller made itself, as a sequence; errors as for `pack_token_ids`."""
    if isinstance(tokens, TokenSequence):
        return tokens
    with arguments_checked():
        return TokenSequence.from_packed(pack_token_ids(tokens, field))


def unpack_token_ids(packed_ids: bytes) -> list[int]:
    """Return packed ids as a list of ints."""
    return cast("list[int]", np.frombuffer(packed_ids, _PACKED).tolist())


def _packed_sequence(tokens: object, field: str) -> bytes:
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sequence):
        raise ArgumentTypeError(field, f"must be a sequence, array or tensor of ints, got {type(tokens).__name__}")
    try:
        ids = array("I", tokens)
    except OverflowError:
        raise ArgumentValueError(field, f"every id must lie in [0, {_ID_MAX}]") from None
    except TypeError:
        raise ArgumentTypeError(field, "every id must be an int") from None
    assert ids.itemsize == TOKEN_ID_BYTES, ids.itemsize
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _packed_array(tokens: Any, field: str) -> bytes:
    """Pack an array of numpy or a tensor of torch, which turns itself into one."""
    if hasattr(tokens, "detach"):
        tokens = tokens.detach().cpu().numpy() if not _is_floating(tokens) else np.zeros(0)
    if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ArgumentTypeError(field, "must be a one-dimensional array or tensor of integers")
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= _ID_MAX:
        raise ArgumentValueError(field, f"every id must lie in [0, {_ID_MAX}]")
    return tokens.astype(_PACKED).tobytes()


def _is_floating(tensor: Any) -> bool:
    """Tell whether a tensor holds no integers; numpy knows not all of torch's floating dtypes."""
    return bool(tensor.is_floating_point() or tensor.is_complex())
