"""How many streams of bytes are open, whichever way they go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvbridge.core.errors import LimitExceededError
from kvbridge.server.access import Caller
from kvbridge.server.call_quotas import NEVER_REFUSED

_Key = TypeVar("_Key")


class Streams:
    """Counts them."""

    def __init__(self, streams_max: int, streams_per_client_max: int) -> None:
        """Take so many in all, and of one client."""
        self._streams_max = streams_max
        self._streams_per_client_max = streams_per_client_max
        self._of_client: Counter[tuple[str, str]] = Counter()
        self._of_tenant: Counter[str] = Counter()

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Streams: {self._of_tenant.total()} of {self._streams_max}>"

    @contextmanager
    def entered(self, caller: Caller | None) -> Iterator[None]:
        """Count a stream within this context, unless nobody had to say whose it is.

        Raises:
            LimitExceededError: there are too many.
        """
        if caller is None:
            yield
            return
        client = caller.principal.name, caller.name
        self._require_room(caller, client)
        self._of_client[client] += 1
        self._of_tenant[caller.tenant] += 1
        try:
            yield
        finally:
            _count_out(self._of_client, client)
            _count_out(self._of_tenant, caller.tenant)

    def _require_room(self, caller: Caller, client: tuple[str, str]) -> None:
        free = self._streams_max - self._of_tenant.total()
        is_shared = caller.principal.roles.isdisjoint(NEVER_REFUSED)
        if free <= 0 or (is_shared and self._of_tenant[caller.tenant] >= free):
            raise LimitExceededError("streams_max", self._streams_max)
        if self._of_client[client] >= self._streams_per_client_max:
            raise LimitExceededError("streams_per_client_max", self._streams_per_client_max)


def _count_out(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
