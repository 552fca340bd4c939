"""Who watches what happens to the payloads that it holds or held, and what each was told lately.

1. A client that watches has a *log* of the newest events that concern it. All of its streams read from that, each from
   its own position; so a slow reader costs nothing but its place, and blocks nobody.
2. A reader whose place is forgotten is told that events are lost, and its stream ends.
3. A log outlives its streams for a while, so that a client that comes back with the last sequence number that it has
   seen gets what it missed, or is told that it cannot. Sequence numbers count up over all clients from a number that
   grows with the time of the node's start; so one from an earlier life of the node is never taken for one of this.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from kvbridge.core.errors import LimitExceededError
from kvbridge.core.events import Event, EventsLost


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchLimits:
    """How much is told to how many."""

    watches_max: int
    """Most streams at once; as many clients again are remembered that have none any more."""
    watches_per_client_max: int
    """Most streams of one client at once."""
    events_max: int
    """Most events that are remembered for one client."""
    seconds: float
    """How long events are remembered for a client that has no stream."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Log:
    """The newest events of one client."""

    forgotten_sequence: int
    """The last sequence number of which nothing is remembered."""
    forgotten: int = 0
    """How many events are forgotten."""
    events: deque[tuple[int, Event]] = field(default_factory=deque)
    """The others, oldest first."""
    watches: set[Watch] = field(default_factory=set)
    """Its streams."""
    idle_since: float = 0.0
    """When the last stream went; means nothing while there is one."""
    ended: bool = False
    """Whether nothing will come any more."""


class Watchers:
    """The clients that watch."""

    def __init__(self, limits: WatchLimits, *, clock: Callable[[], float], first_sequence: int) -> None:
        """Start with none; `clock` gives monotonic seconds."""
        self._limits = limits
        self._clock = clock
        self._sequence = first_sequence
        self._logs: dict[str, _Log] = {}
        self._idle: OrderedDict[str, _Log] = OrderedDict()
        self._watches = 0
        self._closed = False

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Watchers: {self._watches} streams, {len(self._logs)} clients>"

    def __len__(self) -> int:
        """Return how many streams are open."""
        return self._watches

    def remembers(self, client_id: str) -> bool:
        """Tell whether events are kept for this client."""
        return client_id in self._logs

    def tell(self, client_id: str, event: Event) -> None:
        """Tell one client, if it watches or did so lately."""
        log = self._logs.get(client_id)
        if log is None:
            return
        self._sequence += 1
        log.events.append((self._sequence, event))
        if len(log.events) > self._limits.events_max:
            log.forgotten_sequence, _ = log.events.popleft()
            log.forgotten += 1
        _wake(log)

    def tell_all(self, event: Event) -> None:
        """Tell everybody."""
        for client_id in self._logs:
            self.tell(client_id, event)

    def open(self, client_id: str, after_sequence: int) -> Watch:
        """Begin a stream after the last event that the client has seen; 0 stands for now.

        Raises:
            LimitExceededError: the client, or the node, has too many streams.
        """
        log = self._logs.get(client_id)
        if log is not None and len(log.watches) >= self._limits.watches_per_client_max:
            raise LimitExceededError("watches_per_client_max", self._limits.watches_per_client_max)
        if self._watches >= self._limits.watches_max:
            raise LimitExceededError("watches_max", self._limits.watches_max)
        if log is None:
            log = self._logs[client_id] = _Log(forgotten_sequence=self._sequence, ended=self._closed)
        self._idle.pop(client_id, None)
        watch = Watch(
            log, after_sequence or self._sequence, self._sequence, on_close=lambda: self._gone(client_id, log)
        )
        log.watches.add(watch)
        self._watches += 1
        return watch

    def end_client(self, client_id: str) -> None:
        """End the streams of a client that is gone, and forget it."""
        log = self._logs.pop(client_id, None)
        self._idle.pop(client_id, None)
        if log is not None:
            log.ended = True
            _wake(log)

    def advance(self) -> None:
        """Forget clients that have had no stream for too long."""
        while self._idle:
            client_id, log = next(iter(self._idle.items()))
            if log.idle_since + self._limits.seconds > self._clock() and len(self._idle) <= self._limits.watches_max:
                return
            self.end_client(client_id)

    def close(self) -> None:
        """End every stream once it has been told everything; those that open later end at once."""
        self._closed = True
        for log in self._logs.values():
            log.ended = True
            _wake(log)

    def _gone(self, client_id: str, log: _Log) -> None:
        self._watches -= 1
        if not log.watches and self._logs.get(client_id) is log:
            log.idle_since = self._clock()
            self._idle[client_id] = log
            self.advance()


class Watch:
    """One stream; as an iterator it gives sequence numbers and events until the client or the node is gone."""

    def __init__(self, log: _Log, after_sequence: int, sequence: int, *, on_close: Callable[[], None]) -> None:
        """Begin after `after_sequence`; `sequence` is the newest that was ever given."""
        self._log = log
        self._on_close = on_close
        self._changed = asyncio.Event()
        self.events_lost = not log.forgotten_sequence <= after_sequence <= sequence
        """Whether something between the last event that the client saw and the next is forgotten."""
        self.sequence = log.forgotten_sequence if self.events_lost else after_sequence
        """After which sequence number nothing is missed."""
        seen = sum(number <= self.sequence for number, _ in log.events)
        self._read = log.forgotten + seen

    def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        """Iterate."""
        return self

    async def __anext__(self) -> tuple[int, Event]:
        """Wait for the next event."""
        log = self._log
        while True:
            if self._read < log.forgotten:
                return self._lose()
            index = self._read - log.forgotten
            if index < len(log.events):
                self._read += 1
                return log.events[index]
            if log.ended or self not in log.watches:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        """End the stream; a second time does nothing."""
        if self in self._log.watches:
            self._log.watches.remove(self)
            self._on_close()

    def wake(self) -> None:
        """Look again."""
        self._changed.set()

    def _lose(self) -> tuple[int, Event]:
        """Tell of the loss and end: the client comes back for what is still remembered."""
        sequence = self._log.forgotten_sequence
        self._read = self._log.forgotten + len(self._log.events)
        self.close()
        return sequence, EventsLost()


def _wake(log: _Log) -> None:
    for watch in log.watches:
        watch.wake()
