"""Page tokens that hold the key of a page's last entry: what is added or removed meanwhile disturbs no other page."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from kvbridge.core.catalog import EntryKey
from kvbridge.core.errors import InvalidFieldError

_TOKEN_CHARACTERS_MAX = 1 << 16


def encode_page_token(key: EntryKey) -> str:
    """Return a token for what follows `key`."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_page_token(token: str) -> EntryKey:
    """Return the key in `token`; the empty key, before all others, for the empty token.

    Raises:
        InvalidFieldError: the token is none that this service gave.
    """
    if not token:
        return ()
    key = _unpacked(token) if len(token) <= _TOKEN_CHARACTERS_MAX else None
    if not isinstance(key, list) or not key or not all(isinstance(part, str) for part in key):
        raise InvalidFieldError("page_token", "is not a token that this service gave")
    return tuple(key)


def _unpacked(token: str) -> Any:
    try:
        return json.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        return None
