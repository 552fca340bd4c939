"""Who a verified certificate says that its owner is."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Final

_KINDS: Final = frozenset({"DNS", "URI"})


def subjects_of(connection: ssl.SSLObject | ssl.SSLSocket) -> frozenset[str]:
    """Return the DNS names and URIs among the alternative names of the other side's certificate; none without one."""
    # It is empty for a certificate that nobody verified, too.
    shown: Mapping[str, Any] = connection.getpeercert() or {}
    return frozenset(name for kind, name in shown.get("subjectAltName", ()) if kind in _KINDS)
