"""Addresses that somebody else has told us."""

from __future__ import annotations

import re

from kvbridge.config import PORT_MAX

TARGET_CHARACTERS_MAX = 300
"""Longest address that is called."""
_TARGET = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):([1-9][0-9]{0,4})")
"""A host and a port and nothing else: gRPC would take a scheme for the path of a socket, say."""


def is_target(text: str) -> bool:
    """Tell whether `text` is `HOST:PORT`."""
    matched = _TARGET.fullmatch(text) if len(text) <= TARGET_CHARACTERS_MAX else None
    return matched is not None and int(matched[1]) <= PORT_MAX


def target_of(host: str, port: int) -> str:
    """Return host and port as one address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
