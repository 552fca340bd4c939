"""Token ids of a payload and what a consumer expects of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import TOKENS_MAX

TOKEN_ID_BYTES = 4
"""A token id is an unsigned 32-bit little-endian integer wherever ids are packed or digested."""
TOKEN_DIGEST_BYTES = 32
"""Length of a SHA-256 digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """The tokens of a payload by digest and, if the producer gave them, by id."""

    count: int
    """Number of tokens."""
    digest: bytes
    """SHA-256 over the packed ids."""
    packed_ids: bytes | None = None
    """The ids, 4 bytes each, little-endian; absent if only a digest was given."""

    def __post_init__(self) -> None:
        """Refuse counts, digests and ids that disagree.

        Raises:
            InvalidFieldError: the count is out of range, or digest or ids do not fit it.
        """
        if not 1 <= self.count <= TOKENS_MAX:
            raise InvalidFieldError("tokens.count", f"must lie in [1, {TOKENS_MAX}], got {self.count}")
        if len(self.digest) != TOKEN_DIGEST_BYTES:
            raise InvalidFieldError(
                "tokens.digest", f"must be {TOKEN_DIGEST_BYTES} bytes of SHA-256, got {len(self.digest)}"
            )
        if self.packed_ids is not None and len(self.packed_ids) != self.count * TOKEN_ID_BYTES:
            raise InvalidFieldError(
                "tokens.packed_ids",
                f"must hold {self.count} ids of {TOKEN_ID_BYTES} bytes, got {len(self.packed_ids)} bytes",
            )

    @classmethod
    def from_packed(cls, packed_ids: bytes) -> TokenSequence:
        """Make a sequence from packed ids.

        Raises:
            InvalidFieldError: the length is not a whole, positive and allowed number of ids.
        """
        count, rest = divmod(len(packed_ids), TOKEN_ID_BYTES)
        if rest:
            raise InvalidFieldError(
                "tokens.packed_ids", f"length {len(packed_ids)} is not a multiple of {TOKEN_ID_BYTES}"
            )
        return cls(count=count, digest=hashlib.sha256(packed_ids).digest(), packed_ids=packed_ids)

    def prefix(self, count: int) -> TokenSequence:
        """Return the first `count` tokens.

        Raises:
            InvalidFieldError: more tokens are asked for than there are, or a part of a bare digest.
        """
        if count == self.count:
            return self
        if count > self.count:
            raise InvalidFieldError("valid_length", f"is {count}, but only {self.count} tokens were given")
        if self.packed_ids is None:
            raise InvalidFieldError(
                "valid_length", f"is {count}, but a digest over {self.count} tokens cannot be shortened"
            )
        return TokenSequence.from_packed(self.packed_ids[: count * TOKEN_ID_BYTES])

    def starts_with(self, other: TokenSequence) -> bool:
        """Tell whether `other` is certainly a prefix of this sequence; a bare digest only proves equality."""
        if other.count == self.count:
            return other.digest == self.digest
        if other.count > self.count or self.packed_ids is None:
            return False
        return hashlib.sha256(memoryview(self.packed_ids)[: other.count * TOKEN_ID_BYTES]).digest() == other.digest

    def continues_with(self, other: TokenSequence, offset: int) -> bool:
        """Tell whether `other` certainly stands in this sequence from token `offset` on."""
        if offset == 0:
            return self.starts_with(other)
        if self.packed_ids is None or offset + other.count > self.count:
            return False
        there = memoryview(self.packed_ids)[offset * TOKEN_ID_BYTES : (offset + other.count) * TOKEN_ID_BYTES]
        return hashlib.sha256(there).digest() == other.digest

    def first_difference(self, other: TokenSequence, offset: int) -> tuple[int, int, int] | None:
        """Return the first index from `offset` on where `other`, placed there, has another id, and both ids.

        None if there is no such index, or not both are given by id.
        """
        if self.packed_ids is None or other.packed_ids is None or not 0 <= offset < self.count:
            return None
        mine, theirs = memoryview(self.packed_ids)[offset * TOKEN_ID_BYTES :], memoryview(other.packed_ids)
        alike, different = 0, min(len(mine), len(theirs)) // TOKEN_ID_BYTES
        if mine[: different * TOKEN_ID_BYTES] == theirs[: different * TOKEN_ID_BYTES]:
            return None
        while different - alike > 1:  # `alike` ids at the start are equal, `different` are not.
            middle = (alike + different) // 2
            equal = mine[: middle * TOKEN_ID_BYTES] == theirs[: middle * TOKEN_ID_BYTES]
            alike, different = (middle, different) if equal else (alike, middle)
        return offset + alike, _id_at(mine, alike), _id_at(theirs, alike)


def _id_at(packed_ids: memoryview, index: int) -> int:
    return int.from_bytes(packed_ids[index * TOKEN_ID_BYTES : (index + 1) * TOKEN_ID_BYTES], "little")
