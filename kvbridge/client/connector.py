"""Finds the current session, and opens the next one when the bridge was restarted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import CallFailedError
from kvbridge.client.rpc import Method
from kvbridge.client.security import ChannelSecurity
from kvbridge.client.sessions import Session, SessionSnapshot, attach
from kvbridge.client.targets import Target

_Answer = TypeVar("_Answer")


class Connector:
    """Holds at most one session. Nothing is opened before the first call needs it."""

    def __init__(self, target: Target, security: ChannelSecurity, on_open: Callable[[Connector], None]) -> None:
        """Remember where the bridge is; `on_open` is called before each new session is used."""
        self.target = target
        self._on_open = on_open
        self._security = security
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connector {self.target.grpc_target}: {self._session}>"

    def session(self, deadline: Deadline) -> Session:
        """Return a live session, a new one if need be; nobody waits for another thread longer than its own deadline.

        Raises:
            CallFailedError: no bridge answers in time, or it refuses.
        """
        session = self._session
        if session is not None and session.alive:
            return session
        if not self._lock.acquire(timeout=deadline.remaining_seconds):
            raise CallFailedError.timed_out("attaching to the bridge")
        try:
            return self._current_or_new(deadline)
        finally:
            self._lock.release()

    def call(
        self,
        method: Method[_Answer],
        request: Any,
        deadline: Deadline,
        *,
        unanswered: Callable[[Session], None] = lambda _: None,
    ) -> tuple[Session, _Answer]:
        """Make one call in the current session, and once more in a new one if that has ended.

        `unanswered` is told in which session the bridge may have done what was asked for without answering.

        Raises:
            CallFailedError: there was no answer in time, or an error status.
        """
        session = self.session(deadline)
        try:
            return session, session.call(method, request, deadline)
        except CallFailedError as failure:
            if failure.session_ended:
                session.close()
            if session.alive or deadline.passed:
                if failure.unanswered:
                    unanswered(session)
                raise
        session = self.session(deadline)
        try:
            return session, session.call(method, request, deadline)
        except CallFailedError as failure:
            if failure.unanswered:
                unanswered(session)
            raise

    def stop_writing(self) -> None:
        """Let nothing that this process still writes reach an arena."""
        session = self._session
        if session is not None:
            session.stop_writing()

    def connect_anew(self) -> None:
        """Let the next call find a channel by the newest files, if files secure it, after a stream has failed."""
        session = self._session
        if session is not None and self._security.is_from_files:
            session.connect_anew()

    def close(self) -> None:
        """End the session and open no other; a second time does nothing."""
        self._closed = True
        session = self._session
        if session is not None:
            session.close()

    def snapshot(self) -> SessionSnapshot | None:
        """Return the current session's state, or None before the first call."""
        session = self._session
        return None if session is None else session.snapshot()

    def _current_or_new(self, deadline: Deadline) -> Session:
        session = self._session
        if session is not None and session.alive:
            return session
        if self._closed:
            raise CallFailedError(grpc.StatusCode.CANCELLED, "the bridge object was closed")
        if session is not None:
            session.close()
            self._session = None
        attachment = None if self.target.by_value else attach(self.target, deadline)
        session = Session(self.target, self._security, attachment)
        try:
            self._on_open(self)
        except CallFailedError:
            session.close()
            raise
        self._session = session
        if self._closed:  # Closed by another thread meanwhile, which may not have seen this session.
            session.close()
        return session
