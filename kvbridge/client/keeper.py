"""One thread per bridge object that renews what is in use and returns what is not.

1. Whoever ends a reference, a finalizer included, appends a note to a deque and wakes the thread through a
   `SimpleQueue`; both are reentrant, so a finalizer cannot deadlock on a lock that the interrupted code holds.
2. The thread turns the notes into batches, one message per session for leases and holds. A batch keeps its request id
   while it is tried again, so the bridge carries it out once.
3. A call that was given up may have granted something all the same, which would stay taken as long as this process
   lives. So it is made again under its own request id, and what it gives is returned. By value, where what was granted
   ends by itself, that is done for the newest of very many only.
4. Everything in use is renewed together, every third of the shortest time to live. While the bridge is silent, renewal
   is tried again sooner, so that a short silence costs nobody their lease.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import grpc

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError
from kvbridge.client.references import Ended, Reference, Unanswered
from kvbridge.client.rpc import Method, Rpc
from kvbridge.client.sessions import Session
from kvbridge.core.references import ReferenceKind
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.wire import decode_duration

_log = logging.getLogger(__name__)

CALL_SECONDS_MAX = 2.0
"""Longest wait for one answer in the background."""
RETRY_SECONDS_MIN = 0.1
"""Shortest pause before a silent bridge is asked again."""
RETRY_SECONDS_MAX = 2.0
"""Longest pause before a silent bridge is asked again."""
GATHER_SECONDS = 0.005
"""How long after the first returned reference others are gathered: a message for each would slow the next acquire."""
TOKENS_PER_CALL_MAX = 1000
"""Most references in one message."""
QUESTIONS_MAX = 64
"""Most calls of a client by value whose unheard answers are asked for once more."""
_RENEWALS_PER_TTL = 3
_INTERVAL_SECONDS_MIN = 0.05

_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSnapshot:
    """The keeper at one moment."""

    tracked: int
    """References that are renewed."""
    unsent: int
    """Returned references that the bridge is still to be told about."""
    running: bool
    """Whether the thread runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Ended references to be returned in one message."""

    session: Session
    """Whose they were."""
    method: Method[Any]
    """Which call returns them."""
    request: Any
    """The message, the same at each try."""
    tokens: tuple[str, ...] = field(default=())
    """The tokens, if each could be returned by a message of its own."""
    granted: Callable[[Session, Any], tuple[Ended, ...]] | None = None
    """Finds what the answer grants and nobody wants, if the message asks for something."""


class Keeper:
    """Renews and returns references in the background. The thread starts with the first session."""

    def __init__(self) -> None:
        """Serve the references of one bridge object."""
        self._connector: Connector | None = None
        self._pid = os.getpid()
        self._notes: deque[Ended | Unanswered | weakref.ref[Reference]] = deque()
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        # The rest belongs to the thread alone.
        self._tracked: dict[str, weakref.ref[Reference]] = {}
        self._batches: deque[_Batch] = deque()
        self._retry_seconds = RETRY_SECONDS_MIN
        self._renew_at = float("inf")
        self._send_at = 0.0

    def __repr__(self) -> str:
        return f"<Keeper of {len(self._tracked)} references, {len(self._notes) + len(self._batches)} unsent>"

    def start(self, connector: Connector) -> None:
        """Start the thread unless it runs; it will close `connector` when it ends.

        Raises:
            CallFailedError: the system gives no thread, and without one every reference would run out unnoticed.
        """
        with self._thread_lock:
            if self._thread is not None:
                return
            self._connector = connector
            thread = threading.Thread(target=self._run, name="kvbridge-keeper", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise CallFailedError(grpc.StatusCode.UNAVAILABLE, f"nothing can be renewed: {error}") from error
            self._thread = thread

    def track(self, reference: Reference) -> None:
        """Renew `reference` from now on."""
        self._notes.append(weakref.ref(reference))
        # An acquire need not wake the thread, which wakes in time unless this reference is shorter than the rest.
        if time.monotonic() + _interval(reference) < self._renew_at:
            self._wake.put(None)

    def ended(self, note: Ended | Unanswered) -> None:
        """Return a reference soon, or find out whether there is one; called from finalizers, so without any lock."""
        self._notes.append(note)
        self._wake.put(None)

    def stop(self) -> None:
        """Let the thread return everything, close the connector and end; called from finalizers, so without a lock."""
        self._stopping = True
        self._wake.put(None)

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread after `stop`, and tell whether it has ended."""
        with self._thread_lock:
            thread = self._thread
        if self._pid != os.getpid() or thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def snapshot(self) -> KeeperSnapshot:
        """Return the keeper's state."""
        thread = self._thread
        return KeeperSnapshot(
            tracked=len(self._tracked),
            unsent=len(self._notes) + sum(max(len(batch.tokens), 1) for batch in list(self._batches)),
            running=thread is not None and thread.is_alive(),
        )

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - the outermost boundary of a thread
                # Nothing of the kind is known, but without this thread every lease would run out unnoticed.
                _log.exception("a turn of the keeper failed")
                time.sleep(RETRY_SECONDS_MIN)
        self._return_everything()
        if self._connector is not None:
            self._connector.close()

    def _turn(self) -> None:
        self._wait()
        self._read_notes()
        self._send_batches()
        if time.monotonic() >= self._renew_at:
            self._renew()

    def _wait(self) -> None:
        """Sleep until somebody wakes the thread or something is due."""
        due_at = min(self._renew_at, self._send_at if self._batches else float("inf"))
        try:
            self._wake.get(timeout=None if due_at == float("inf") else max(due_at - time.monotonic(), 0.0))
            if not self._stopping:
                time.sleep(GATHER_SECONDS)
            while True:  # One look at the notes answers all calls up to now.
                self._wake.get_nowait()
        except queue.Empty:
            pass

    def _read_notes(self) -> None:
        ended: list[Ended] = []
        while self._notes:
            note = self._notes.popleft()
            if isinstance(note, Ended):
                self._tracked.pop(note.token, None)
                ended.append(note)
                continue
            if isinstance(note, Unanswered):
                self._batches.append(_again(note))
                self._send_at = 0.0
                continue
            reference = note()
            if reference is not None and not reference.ended:
                self._tracked[reference.token] = note
                self._renew_at = min(self._renew_at, time.monotonic() + _interval(reference))
        self._forget_old_questions()
        self._batches.extend(_batches(ended))
        if ended:
            self._send_at = 0.0

    def _forget_old_questions(self) -> None:
        """Ask again only for the newest of very many calls that were given up, as they are after an outage.

        What the others granted by value ends by its time to live, and asking for all of them would keep this thread
        from renewing. A local client's are all asked for: the bridge keeps their memory until it hears of them.
        """
        old = [id(batch) for batch in self._batches if batch.granted is not None and not batch.session.shares_memory]
        surplus = set(old[:-QUESTIONS_MAX])
        if surplus:
            self._batches = deque(batch for batch in self._batches if id(batch) not in surplus)

    def _send_batches(self) -> None:
        """Send what is due; a silent bridge is left alone for a while, twice as long each time."""
        if time.monotonic() < self._send_at:
            return
        for _ in range(len(self._batches)):
            batch = self._batches.popleft()
            if batch.session.alive and not self._sent(batch):
                self._batches.append(batch)
                self._send_at = time.monotonic() + self._retry_seconds
                self._retry_seconds = min(2 * self._retry_seconds, RETRY_SECONDS_MAX)
                return
        self._retry_seconds = RETRY_SECONDS_MIN

    def _sent(self, batch: _Batch) -> bool:
        """Send a batch and tell whether it is done with, be it because the bridge refuses it."""
        try:
            answer = batch.session.call(batch.method, batch.request, Deadline(CALL_SECONDS_MAX))
        except CallFailedError as failure:
            if failure.code in _TRANSIENT or failure.busy:
                return False
            if len(batch.tokens) > 1:  # All are released or none, so one unknown token must not keep the others.
                self._batches.extend(_release(batch.session, [token]) for token in batch.tokens)
            return True
        if batch.granted is not None:
            self._batches.extend(_batches(batch.granted(batch.session, answer)))
            self._send_at = 0.0
            self._wake.put(None)
        return True

    def _renew(self) -> None:
        references = self._live_references()
        silent = False
        for session, group in groupby(sorted(references, key=lambda each: id(each.session)), lambda each: each.session):
            for share in _shares(list(group)):
                silent = not _renewed(session, share) or silent
        intervals = [_interval(reference) for reference in references if not reference.lost]
        pause = min(intervals, default=float("inf"))
        self._renew_at = time.monotonic() + (min(pause, RETRY_SECONDS_MAX) if silent else pause)

    def _live_references(self) -> list[Reference]:
        """Return what is in use, and forget what was lost: it can only be returned, by its own note."""
        found = [(token, reference()) for token, reference in self._tracked.items()]
        live = {token: reference for token, reference in found if reference is not None and reference.live}
        self._tracked = {token: self._tracked[token] for token in live}
        return list(live.values())

    def _return_everything(self) -> None:
        self._read_notes()
        for reference in self._live_references():
            reference.end()
        self._read_notes()
        self._send_at = 0.0
        self._send_batches()


def _interval(reference: Reference) -> float:
    return max(reference.ttl_seconds / _RENEWALS_PER_TTL, _INTERVAL_SECONDS_MIN)


def _renewed(session: Session, references: list[Reference]) -> bool:
    """Renew references of one session and tell whether the bridge answered."""
    asked_at = time.monotonic()
    request = pb.RenewRequest(tokens=[reference.token for reference in references])
    try:
        answer = session.call(lambda rpc: rpc.handoff.Renew, request, Deadline(CALL_SECONDS_MAX))
    except CallFailedError as failure:
        if failure.code is grpc.StatusCode.UNAUTHENTICATED:
            session.close()
        return failure.code not in _TRANSIENT and not failure.busy
    ttls = {
        each.token: decode_duration(each.time_to_live, "time_to_live") if each.HasField("time_to_live") else None
        for each in answer.references
    }
    for reference in references:
        reference.renewed(ttls.get(reference.token), asked_at)
    return True


def _batches(ended: Iterable[Ended]) -> Iterator[_Batch]:
    """Put what was ended into as few messages as may be."""
    notes = sorted(ended, key=lambda note: id(note.session))
    for session, group in groupby(notes, lambda note: note.session):
        tokens: list[str] = []
        for note in group:
            if note.kind is ReferenceKind.RESERVATION:
                yield _abort(session, note.token)
            else:
                tokens.append(note.token)
        for share in _shares(tokens):
            yield _release(session, share)


def _shares(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), TOKENS_PER_CALL_MAX):
        yield items[start : start + TOKENS_PER_CALL_MAX]


def _again(note: Unanswered) -> _Batch:
    return _Batch(session=note.session, method=note.method, request=note.request, granted=note.granted)


def _release(session: Session, tokens: list[str]) -> _Batch:
    request = pb.ReleaseRequest(request_id=str(uuid.uuid4()), tokens=tokens)
    return _Batch(session=session, method=_release_method, request=request, tokens=tuple(tokens))


def _abort(session: Session, token: str) -> _Batch:
    request = pb.AbortRequest(request_id=str(uuid.uuid4()), reservation_token=token)
    return _Batch(session=session, method=_abort_method, request=request)


def _release_method(rpc: Rpc) -> Callable[..., Any]:
    return rpc.handoff.Release


def _abort_method(rpc: Rpc) -> Callable[..., Any]:
    return rpc.handoff.Abort
