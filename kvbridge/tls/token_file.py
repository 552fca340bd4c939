"""A bearer token in a file that may change at any moment."""

from __future__ import annotations

import threading
from typing import Final

from kvbridge.core.errors import BridgeError
from kvbridge.files import Signature, is_settled, signature_of
from kvbridge.tls.files import TlsFileError, read_file

TOKEN_CHARACTERS_MIN: Final = 32
"""Shortest token that is taken: one that is not guessed."""
TOKEN_CHARACTERS_MAX: Final = 1024
"""Longest token."""
_COMMENT = b"#"
_VISIBLE = frozenset(range(0x21, 0x7F))
"""What metadata and headers take as it is."""


class TokenFileError(BridgeError):
    """The file holds no token; what it says never repeats what is in it."""


class TokenFile:
    """One file; any thread may ask."""

    def __init__(self, path: str) -> None:
        """Read `path` whenever it has changed."""
        self._path = path
        self._lock = threading.Lock()
        self._known: tuple[Signature | None, str] | None = None

    def __repr__(self) -> str:
        """Show where it lies, and nothing of what is in it."""
        return f"<TokenFile {self._path}>"

    def token(self) -> str:
        """Return the token: the first line of the file as it is now that is neither empty nor a comment.

        Raises:
            TokenFileError: it cannot be read, or that line is no token.
        """
        signature = signature_of(self._path)
        with self._lock:
            if self._known is None or self._known[0] != signature:
                token = self._read()
                self._known = (signature, token) if is_settled(signature) else None
                return token
            return self._known[1]

    def _read(self) -> str:
        try:
            lines = read_file(self._path).splitlines()
        except TlsFileError as error:
            raise TokenFileError(f"token file {error}") from error
        token = next((line for line in map(bytes.strip, lines) if line and not line.startswith(_COMMENT)), b"")
        if not TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX or not _VISIBLE.issuperset(token):
            raise TokenFileError(
                f"token file {self._path}: its first line must be {TOKEN_CHARACTERS_MIN} to {TOKEN_CHARACTERS_MAX} "
                "visible ASCII characters"
            )
        return token.decode("ascii")
