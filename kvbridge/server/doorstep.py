"""Connections that have proved nothing yet: few at once, and none for a while from where only useless ones come.

A handshake costs more than a call, and whoever connects to the port for bytes need not prove anything for it. So such
connections have places as health checks have (`kvbridge.server.places`), and a host whose connections keep coming to
nothing is turned away before anything is done for it. Nobody loses bytes by that: whoever is turned away asks by gRPC.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvbridge.core.access.rate import TokenBucket
from kvbridge.server.open_calls import network_of
from kvbridge.server.places import Places

UNPROVED_MAX = 64
"""Most connections at once that have not yet said, and proved, what they want."""
FAILURES_BURST = 64
"""As many may come to nothing from one host at once."""
FAILURES_PER_SECOND = 8.0
"""As many may in the long run."""
HOSTS_MAX = 1024
"""Most hosts of which that is remembered; those that failed long ago are forgotten first."""
_NAME = "connections that have proved nothing"


class Doorstep:
    """Lets hosts try."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Let everybody try."""
        self._clock = clock
        self._places = Places(_NAME, UNPROVED_MAX)
        self._failures: OrderedDict[str, TokenBucket] = OrderedDict()

    def __repr__(self) -> str:
        """Show how many wait, and how many hosts have failed."""
        return f"<Doorstep: {len(self._places)} wait, {len(self._failures)} hosts have failed>"

    def is_open_to(self, host: str) -> bool:
        """Tell whether a host may try once more."""
        bucket = self._failures.get(network_of(host))
        return bucket is None or bucket.burst - bucket.taken(now=self._clock()) >= 1

    def waiting(self, host: str) -> AbstractContextManager[None]:
        """Return a context in which the current task finds out what a connection from there is good for.

        Raises:
            TooManyRequestsError: others have taken its place.
        """
        return self._places.taken(network_of(host))

    def note_failure(self, host: str) -> None:
        """Note that a connection from there has come to nothing."""
        network, now = network_of(host), self._clock()
        bucket = self._failures.pop(network, None)
        if bucket is None:
            bucket = TokenBucket(per_second=FAILURES_PER_SECOND, burst=FAILURES_BURST, now=now)
        self._failures[network] = bucket
        bucket.take(now=now)
        if len(self._failures) > HOSTS_MAX:
            self._failures.popitem(last=False)
