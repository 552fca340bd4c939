"""What tenants and principals may be called: names that stand in logs, in metadata and in the names of arenas."""

from __future__ import annotations

import re

NAME_CHARACTERS_MAX = 64
"""Longest name of a tenant or a principal."""
DEFAULT_TENANT = "default"
"""The one tenant of a node without an access file."""
OWNER_NAME = "owner"
"""The principal that is whoever owns the node; no other may be called so."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def is_name(text: str) -> bool:
    """Tell whether a tenant or a principal may be called `text`."""
    return len(text) <= NAME_CHARACTERS_MAX and _NAME.fullmatch(text) is not None
