"""What the keys and values of one model version look like, as far as single tokens decide it.

1. In layer 0 a token's V, and its K before rotation, depend on the token and the weights alone. The *table* holds a
   projection of both for every token of the vocabulary.
2. A token at position 0 sees only itself, so there its K and V follow from the token in *every* layer. The *first rows*
   hold them for tokens that prompts often begin with.
3. The mean of a layer's un-rotated keys over any text has a direction that is the layer's own. The *means* tell layers
   apart where the first token helps nothing.

Nothing in a fingerprint grows with the model but the number of layers and heads; it is a few MiB to some tens of MiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.core.geometry import Dtype, PositionEncoding
from kvbridge.core.layout import Role
from kvbridge.core.tags import ModelTag

if TYPE_CHECKING:
    from numpy.typing import NDArray

FINGERPRINT_BYTES_MAX = 256 << 20
"""Largest fingerprint, in memory or as a file (256 MiB)."""
VOCABULARY_MAX = 1 << 20
"""Most tokens in a vocabulary."""
FIRST_TOKENS_MAX = 64
"""Most first tokens that all layers are known of."""
DIMS_MAX = 16
"""Most numbers that one head's key or value is projected to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoleFingerprint:
    """What is known of all keys, or of all values. Keys are un-rotated and without the rotation's own factor."""

    projection: NDArray[np.float32]
    """`[heads, head dimension, dims]`: projects layer 0, with each element weighed so that its mean square is 1."""
    table: NDArray[np.float16]
    """`[vocabulary, heads, dims]`: the projection of each token in layer 0."""
    chance: float
    """Median error of a token against the row of another token: what the error of a wrong token looks like."""
    first: NDArray[np.float32]
    """`[first tokens, layers, heads, head dimension]`: what each layer holds of a token at position 0."""
    means: NDArray[np.float32]
    """`[layers, heads, head dimension]`: each layer's mean over tokens drawn at random."""

    @property
    def heads(self) -> int:
        """Return the KV heads of the whole model."""
        return int(self.projection.shape[0])

    @property
    def head_dim(self) -> int:
        """Return the elements of one head's key or value."""
        return int(self.projection.shape[1])

    @property
    def dims(self) -> int:
        """Return the numbers that one head is projected to."""
        return int(self.projection.shape[2])

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(array.nbytes for array in (self.projection, self.table, self.first, self.means))


@dataclass(frozen=True, kw_only=True, eq=False)
class Fingerprint:
    """What the caches of one model version look like."""

    model: ModelTag
    """The version that it belongs to."""
    position_encoding: PositionEncoding
    """How positions enter the keys of layer 0, as the model had it when the fingerprint was made."""
    dtype: Dtype
    """Element type that the model computed keys and values in."""
    first_tokens: tuple[int, ...]
    """The tokens that all layers are known of at position 0."""
    layer_margin: float
    """By how much, at least, the mean key of a layer was nearer to that layer's mean in other sequences than to any
    other layer's, in cosine, when the fingerprint was made; 0 if layers are not told apart that way."""
    keys: RoleFingerprint
    """What is known of keys."""
    values: RoleFingerprint
    """What is known of values."""

    def role(self, role: Role) -> RoleFingerprint:
        """Return what is known of keys or of values."""
        return self.keys if role is Role.KEY else self.values

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens in the table."""
        return int(self.keys.table.shape[0])

    @property
    def layers(self) -> int:
        """Return the number of the model's layers."""
        return int(self.keys.means.shape[0])

    @property
    def heads(self) -> int:
        """Return the KV heads of the whole model."""
        return self.keys.heads

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return self.keys.nbytes + self.values.nbytes

    @cached_property
    def row_of_first_token(self) -> dict[int, int]:
        """Return where each first token stands in `first`."""
        return {token: row for row, token in enumerate(self.first_tokens)}

    def snapshot(self) -> dict[str, object]:
        """Return what it holds, for a person."""
        return {
            "model": self.model,
            "position_encoding": self.position_encoding,
            "dtype": self.dtype,
            "vocabulary": self.vocabulary,
            "layers": self.layers,
            "kv_heads": self.heads,
            "head_dim_k": self.keys.head_dim,
            "head_dim_v": self.values.head_dim,
            "dims_per_head_k": self.keys.dims,
            "dims_per_head_v": self.values.dims,
            "first_tokens": self.first_tokens,
            "key_chance": self.keys.chance,
            "value_chance": self.values.chance,
            "layer_margin": self.layer_margin,
            "bytes": self.nbytes,
        }

    def __repr__(self) -> str:
        """Return the version and the size in one line."""
        return f"<Fingerprint of {self.model.name}, {self.model.revision}, {self.nbytes / (1 << 20):.1f} MiB>"
