"""What a model saw before the first token of a payload.

Keys and values of a token depend on every token and picture before it. So a payload that was computed behind others is
the cache of its tokens behind exactly those, and a payload that was computed behind nothing is not the cache of the
same tokens further on. One digest stands for all that came before; without anything it is empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.media import MediaItem
from kvbridge.core.tokens import TOKEN_ID_BYTES

CONTEXT_DIGEST_BYTES = 32
"""Length of a SHA-256 digest."""
NO_CONTEXT = b""
"""The digest of nothing."""


def context_digest(packed_ids: Iterable[bytes | memoryview], media: Iterable[MediaItem] = ()) -> bytes:
    """Return the digest of a context, whose ids may come in pieces, and whose media count from its first token."""
    hashed, length = hashlib.sha256(), 0
    for piece in packed_ids:
        hashed.update(piece)
        length += len(piece)
    if not length:
        return NO_CONTEXT
    for item in media:
        hashed.update(item.token_index.to_bytes(TOKEN_ID_BYTES, "little"))
        hashed.update(item.digest)
    return hashed.digest()


def check_context(digest: bytes, *, first_position: int) -> None:
    """Refuse what is no digest, and a context that leaves no room for its tokens.

    Raises:
        InvalidFieldError: naming `context_digest`.
    """
    if len(digest) not in {0, CONTEXT_DIGEST_BYTES}:
        raise InvalidFieldError("context_digest", f"must be empty or {CONTEXT_DIGEST_BYTES} bytes of SHA-256")
    if digest and not first_position:
        raise InvalidFieldError("context_digest", "must be empty for a payload that begins at position 0")
