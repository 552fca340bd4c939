"""Files of bearer tokens: one token in a line. What is kept of them is their digests."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.core.access import token_digest
from kvbridge.yaml_file import UnreadableError, read_file

TOKEN_CHARACTERS_MIN = 32
"""Shortest token: fewer characters may be guessed."""
TOKEN_CHARACTERS_MAX = 1024
"""Longest token."""
TOKENS_PER_FILE_MAX = 1000
"""Most tokens in one file."""
_FILE_BYTES_MAX = TOKENS_PER_FILE_MAX * (TOKEN_CHARACTERS_MAX + 2)


def read_token_digests(path: str) -> frozenset[bytes]:
    """Return the digest of each token in the file at `path`; empty lines and those that begin with # are passed over.

    Raises:
        UnreadableError: it cannot be read, or holds what is no token. It names the line, and never what stands there.
    """
    content = read_file(path, _FILE_BYTES_MAX)
    if len(content) > _FILE_BYTES_MAX:
        raise UnreadableError(0, f"the file of tokens is larger than {_FILE_BYTES_MAX} bytes")
    digests = frozenset(_digests(content))
    if len(digests) > TOKENS_PER_FILE_MAX:
        raise UnreadableError(0, f"the file of tokens holds more than {TOKENS_PER_FILE_MAX} tokens")
    return digests


def _digests(content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), start=1):
        token = line.strip()
        if not token or token.startswith(b"#"):
            continue
        if not token.isascii() or not token.decode("ascii").isprintable() or b" " in token:
            raise UnreadableError(number, "a token must be printable ASCII without spaces")
        if not TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX:
            least, most = TOKEN_CHARACTERS_MIN, TOKEN_CHARACTERS_MAX
            raise UnreadableError(number, f"a token must have {least} to {most} characters")
        yield token_digest(token.decode("ascii"))
