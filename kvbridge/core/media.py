"""What is not text in a prompt: two prompts may have the same tokens and other pictures."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvbridge.core.errors import InvalidFieldError

MEDIA_MAX = 1024
"""Most media items in one prompt."""
MEDIA_DIGEST_BYTES = 32
"""Length of a SHA-256 digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An image, a sound or whatever else stands behind placeholder tokens."""

    token_index: int
    """Index of the first placeholder token, counted from the payload's first token."""
    digest: bytes
    """SHA-256 over the content as the model sees it."""

    def __post_init__(self) -> None:
        """Refuse what does not name a place and a content.

        Raises:
            InvalidFieldError: the index is negative, or the digest has another length.
        """
        if self.token_index < 0:
            raise InvalidFieldError("media.token_index", f"must not be negative, got {self.token_index}")
        if len(self.digest) != MEDIA_DIGEST_BYTES:
            raise InvalidFieldError("media.digest", f"must be {MEDIA_DIGEST_BYTES} bytes of SHA-256")


def check_media(media: tuple[MediaItem, ...], *, tokens_max: int) -> None:
    """Refuse media that are not in order or lie behind the last token.

    Raises:
        InvalidFieldError: naming `media`.
    """
    if len(media) > MEDIA_MAX:
        raise InvalidFieldError("media", f"holds {len(media)} items; at most {MEDIA_MAX} are allowed")
    if any(after.token_index <= before.token_index for before, after in pairwise(media)):
        raise InvalidFieldError("media.token_index", "must increase strictly")
    if media and media[-1].token_index >= tokens_max:
        raise InvalidFieldError("media.token_index", f"{media[-1].token_index} lies behind {tokens_max} tokens")
