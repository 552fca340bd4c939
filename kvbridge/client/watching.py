"""Watching: what a bridge tells a client of the payloads that it holds or held, as long as anybody listens.

A watch comes back by itself, with the last sequence number that it has seen, whenever its stream ends: the bridge may
be restarted, replaced or away for hours. Whatever may have been missed meanwhile is one `EventsLost`. While its process
forks it has no stream (`kvbridge.client.forking`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import BridgeForkedError
from kvbridge.client.failures import CallFailedError, failure_of
from kvbridge.client.forking import pause_at_forks
from kvbridge.client.streams import break_off, read_end
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.events import Event, EventsLost
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire.events import decode_event

ATTACH_SECONDS_MAX = 5.0
"""Longest wait for a session before the next try."""
STREAM_SECONDS_MAX = 300.0
"""After this a stream is opened anew, so that one whose peer is gone without a word is noticed."""
PAUSE_SECONDS_MIN = 0.05
"""Pause before the first new try."""
PAUSE_SECONDS_MAX = 2.0
"""Longest pause between two tries."""


class Watch:
    """Events, one by one, as an iterator that one thread uses; ends when it or its bridge object is closed.

    It never raises because the bridge is away: it waits and tries again.
    """

    def __init__(self, connector: Connector, *, owner: object, is_closed: Callable[[], bool]) -> None:
        """Watch for the client of `connector`; `owner` stays alive meanwhile, and `is_closed` tells of its end."""
        self._connector = connector
        self._owner = owner
        self._is_closed = is_closed
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._changed = threading.Condition()
        self._is_inside = self._is_paused = False
        self._call: Any = None
        self._ending: Any = None  # a stream that was broken off while its reader was inside
        self._client = ""
        self._sequence = 0
        self._pause_seconds = 0.0
        self.is_open = False
        """Whether the bridge has said that nothing is missed from here on."""
        self.problem: str | None = None
        """Why there is no stream at the moment; None while there is one, and before the first try."""
        pause_at_forks(self)

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "open" if self.is_open else self.problem or "not open yet"
        return f"<Watch after event {self._sequence}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        """Iterate."""
        return self

    def __next__(self) -> Event:
        """Wait for the next event.

        Raises:
            BridgeForkedError: the watch belongs to the parent process.
            StopIteration: the watch or its bridge object was closed.
        """
        if self._pid != os.getpid():
            raise BridgeForkedError("the watch belongs to the parent process; connect anew in the child")
        while not (self._closed.is_set() or self._is_closed()):
            event = self._next_or_pause()
            if event is not None:
                return event
        raise StopIteration

    def close(self) -> None:
        """End the watch, from any thread; more than once does nothing. In a forked child this does nothing."""
        if self._pid != os.getpid():
            return
        self._closed.set()
        self._end_stream()

    # While the process forks

    def pause(self, timeout_seconds: float) -> None:
        """Break the stream off, and open none until `resume`; wait so long for the thread that reads it."""
        with self._changed:
            self._is_paused = True
            self._end_stream()
            self._changed.wait_for(lambda: not self._is_inside, timeout_seconds)

    def resume(self) -> None:
        """Go on where the stream was broken off."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Call gRPC within this context, which is entered as soon as that may be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_paused)
            self._is_inside = True
        try:
            yield
        finally:
            with self._changed:
                ending, self._ending = self._ending, None
                if ending is not None:
                    read_end(ending)
                self._is_inside = False
                self._changed.notify_all()

    # The parts of these

    def _next_or_pause(self) -> Event | None:
        """Return an event, or None if there is no stream now, or nothing was said that matters."""
        call = None
        try:
            with self._inside():
                if self._call is None and self._open():
                    return EventsLost()
                call = self._call
                message = None if call is None else next(call, None)
        except grpc.RpcError as error:
            if call is self._call:
                self._fail(failure_of(error))
                self._connector.connect_anew()
        except CallFailedError as failure:
            self._fail(failure)
        except ValueError as error:  # What grpc raises for a channel that another thread has closed.
            self._fail(CallFailedError(grpc.StatusCode.UNAVAILABLE, str(error)))
        else:
            if message is not None:
                return self._heard(message)
            if call is not None and call is self._call:  # Otherwise it was broken off here.
                self._fail(CallFailedError(grpc.StatusCode.UNAVAILABLE, "the bridge ended the stream"))
        self.is_open = False
        return None

    def _open(self) -> bool:
        """Open a stream and tell whether what came before it is lost because the client has a new name.

        Raises:
            CallFailedError: no bridge answers, or it refuses.
        """
        session = self._connector.session(Deadline(ATTACH_SECONDS_MAX))
        lost = bool(self._client) and session.client != self._client
        if session.client != self._client:
            self._client, self._sequence = session.client, 0
        request = pb.WatchRequest(after_sequence=self._sequence)
        rpc = session.streaming()
        self._call = rpc.handoff.Watch(request, timeout=STREAM_SECONDS_MAX, metadata=rpc.metadata(session.client))
        if self._closed.is_set() or self._is_paused:  # By another thread, which did not see this stream.
            self._end_stream()
        return lost

    def _heard(self, message: pb.WatchResponse) -> Event | None:
        self.is_open, self.problem, self._pause_seconds = True, None, 0.0
        self._sequence = message.sequence
        try:
            return decode_event(message)
        except InvalidFieldError:  # From a newer release: something happened, and nobody can tell what.
            return EventsLost()

    def _fail(self, failure: CallFailedError) -> None:
        self._end_stream()
        was_open, self.is_open = self.is_open, False
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED and was_open:
            return
        if failure.session_ended:
            self._forget_session()
        self.problem = str(failure)
        self._pause_seconds = min(max(2 * self._pause_seconds, PAUSE_SECONDS_MIN), PAUSE_SECONDS_MAX)
        self._closed.wait(self._pause_seconds)

    def _forget_session(self) -> None:
        """Close the session that the bridge does not know any more, so that the next try attaches anew."""
        try:
            session = self._connector.session(Deadline(0))
        except CallFailedError:
            return
        if session.client == self._client:
            session.close()

    def _end_stream(self) -> None:
        with self._changed:
            call, self._call = self._call, None
            if call is None:
                return
            break_off(call)
            if self._is_inside:
                self._ending = call
            else:
                read_end(call)
