"""What people ask of a bridge: what it holds, why it decided as it did, and what it is to let through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvbridge.client.admin import Admin
from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.inspection import NodeInspection, PayloadInspection
from kvbridge.client.inspector import Inspector
from kvbridge.client.plans import PUBLISH_SECONDS_DEFAULT
from kvbridge.client.prefetching import PREFETCH_SECONDS_DEFAULT, Prefetch, prefetch
from kvbridge.client.quarantining import Quarantining
from kvbridge.client.watching import Watch
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.reasons import Reason

if TYPE_CHECKING:
    from kvbridge.v1.inspect_service_pb2 import HandoffRecord


class Operating(ABC):
    """The part of a bridge object that handles no caches."""

    _connector: Connector

    @property
    def admin(self) -> Admin:
        """Return the calls that show and change the bridge's catalog, and set its kill switch."""
        return Admin(self._connector, self._check_usable)

    @property
    def quarantines(self) -> Quarantining:
        """Return the calls that impose, lift and list quarantines."""
        return Quarantining(self._connector, self._check_usable)

    def watch(self) -> Watch:
        """Return the events that concern what this object holds or held, from now on, as an iterator that waits.

        It goes on until it or this object is closed, whatever the bridge does meanwhile. Nothing is asked of the bridge
        before the first event is waited for. Listen in a thread of its own.

        Raises:
            BridgeClosedError: this object was closed.
            BridgeForkedError: this object belongs to the parent process.
        """
        self._check_usable()
        return Watch(self._connector, owner=self, is_closed=self._is_closed)

    def node(self, *, timeout: float = PUBLISH_SECONDS_DEFAULT) -> NodeInspection:
        """Return what the bridge says about itself.

        Raises:
            BridgeUnreachableError: it does not answer.
        """
        return self._inspector(timeout).node()

    def payloads(self, prefix: str = "", *, timeout: float = PUBLISH_SECONDS_DEFAULT) -> list[PayloadInspection]:
        """Return the payloads whose keys start with `prefix`, newest first.

        Raises:
            BridgeUnreachableError: the bridge does not answer.
        """
        return self._inspector(timeout).payloads(prefix)

    def payload(
        self, key: str, generation: int = 0, *, timeout: float = PUBLISH_SECONDS_DEFAULT
    ) -> PayloadInspection | None:
        """Return one payload, by default the newest under its key, or None if none takes memory there.

        Raises:
            BridgeUnreachableError: the bridge does not answer.
        """
        return self._inspector(timeout).payload(key, generation)

    def explain(
        self,
        handoff_id: str | None = None,
        *,
        reason: Reason | None = None,
        timeout: float = PUBLISH_SECONDS_DEFAULT,
    ) -> HandoffRecord | None:
        """Return all that the bridge remembers of a past handoff, or None if it remembers no such handoff.

        The record is the API's own message: every check with its figures and timing, what the consumer reported, and
        where to look first if the answer was bad.

        Args:
            handoff_id: `handoff.handoff_id` of the handoff; by default the newest one.
            reason: Only without an id: the newest handoff with a part that fell back for this reason.
            timeout: Longest wait in seconds.

        Raises:
            BridgeUnreachableError: the bridge does not answer.
        """
        return self._inspector(timeout).explain(handoff_id, reason)

    def prefetch(
        self,
        *keys: str | PayloadReference,
        within: float | None = None,
        timeout: float = PREFETCH_SECONDS_DEFAULT,
    ) -> list[Prefetch]:
        """Ask the bridge to bring caches of other nodes over, so that they are here when a consumer acquires them.

        It answers as soon as it knows of each whether it begins. Nothing is leased: the caches stay as long as replicas
        do that nobody references. A bridge that is away or busy is an answer, too.

        Args:
            keys: Handoff references, such as `kvb://node/key@1`, each of which is answered for itself.
            within: Seconds from now on after which the caches are of no use; what would take longer is refused.
            timeout: Longest wait in seconds for the answer.

        Raises:
            ArgumentTypeError: an argument is of the wrong type; the error names it.
            ArgumentValueError: an argument cannot be, here or in the bridge's eyes; the error names it.
        """
        return prefetch(self._connector, keys, within=within, timeout=timeout, check_usable=self._check_usable)

    # What the bridge object provides

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise if this object was closed or belongs to the parent process."""

    @abstractmethod
    def _is_closed(self) -> bool:
        """Tell whether this object was closed."""

    def _inspector(self, timeout: float) -> Inspector:
        self._check_usable()
        return Inspector(self._connector, Deadline(timeout))
