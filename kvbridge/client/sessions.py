"""One client's standing with one bridge: its name, its channel, and the arenas it maps."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvbridge.client.arenas import ArenaView
from kvbridge.client.deadlines import Deadline
from kvbridge.client.failures import DRAINING, CallFailedError
from kvbridge.client.rpc import Method, Rpc
from kvbridge.client.security import ChannelSecurity
from kvbridge.client.targets import Target
from kvbridge.memory.attachment import Attachment
from kvbridge.memory.errors import (
    AttachmentError,
    AttachmentTimeoutError,
    DescriptorRefusedError,
    MappingUnavailableError,
    NodeUnreachableError,
    RefusalCode,
)

_CLIENT_NAME_BYTES = 24
CONNECT_ANEW_SECONDS_MAX = 1.0
"""Longest wait for whoever maps an arena meanwhile."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSnapshot:
    """A session at one moment, without the name that proves it."""

    attached: bool
    """Whether it shares memory with the bridge."""
    epoch: int
    """Boot epoch of the bridge; 0 for clients by value."""
    alive: bool
    """Whether references of this session may still be live."""
    arenas: tuple[str, ...]
    """Arenas that are mapped."""


class Session:
    """Owns references at the bridge. A local session ends with the bridge's process; one by value never does."""

    def __init__(self, target: Target, security: ChannelSecurity, attachment: Attachment | None) -> None:
        """Speak for the client that `attachment` names, or for a new one of a name that nobody can guess.

        Raises:
            CallFailedError: the files that secure the channel cannot be used.
        """
        self._target = target
        self._security = security
        self._attachment = attachment
        self.client = attachment.session_token if attachment else secrets.token_urlsafe(_CLIENT_NAME_BYTES)
        self.epoch = attachment.epoch if attachment else 0
        self._rpc = Rpc(target.grpc_target, security)
        self._arenas: dict[tuple[str, bool], ArenaView] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        kind = "attached" if self._attachment else "by value"
        return f"<Session {kind} at {self._target.grpc_target}, {'alive' if self.alive else 'ended'}>"

    @property
    def alive(self) -> bool:
        """Tell, without waiting, whether references of this session may still be live."""
        return not self._closed and (self._attachment is None or not self._attachment.closed)

    @property
    def shares_memory(self) -> bool:
        """Tell whether slots are read and written in place."""
        return self._attachment is not None

    def call(self, method: Method[_Answer], request: Any, deadline: Deadline) -> _Answer:
        """Make one call, and a second one over a new channel if the first found no connection.

        Raises:
            CallFailedError: there was no answer in time, or an error status.
        """
        rpc = self._rpc
        try:
            return rpc.call(method(rpc), request, deadline, self.client)
        except CallFailedError as failure:
            if not self._worth_repeating(failure, deadline):
                raise
        rpc = self._reconnected(rpc, deadline)
        return rpc.call(method(rpc), request, deadline, self.client)

    def connect_anew(self) -> None:
        """Replace the channel, unless nobody can say soon which one there is."""
        with suppress(CallFailedError):
            self._reconnected(self._rpc, Deadline(CONNECT_ANEW_SECONDS_MAX))

    def streaming(self) -> Rpc:
        """Return the channel to stream over; a stream that breaks is not repeated here."""
        return self._rpc

    def arena(self, arena_id: str, deadline: Deadline, *, writable: bool) -> ArenaView:
        """Return an arena, mapped once for all who ask.

        Raises:
            CallFailedError: the bridge gives no descriptor, or the kernel no mapping.
        """
        view = self._arenas.get((arena_id, writable))
        if view is not None:
            return view
        if self._attachment is None:
            raise CallFailedError(grpc.StatusCode.FAILED_PRECONDITION, "a client by value maps no arena")
        if not self._lock.acquire(timeout=deadline.remaining_seconds):
            raise CallFailedError.timed_out("mapping the arena")
        try:
            view = self._arenas.get((arena_id, writable))
            if view is None:
                view = self._arenas[arena_id, writable] = _mapped(
                    self._attachment, arena_id, deadline, writable=writable
                )
        finally:
            self._lock.release()
        return view

    def stop_writing(self) -> None:
        """Let nothing that this process still writes reach an arena: its slots are about to be somebody else's."""
        for (_, writable), view in list(self._arenas.items()):
            if writable:
                with suppress(MappingUnavailableError):  # The kernel refuses nothing that needs no room.
                    view.part()

    def close(self) -> None:
        """End the session, and with it, for a local client, all of its references; a second time does nothing."""
        self._closed = True
        self.stop_writing()
        if self._attachment is not None:
            self._attachment.close()
        self._rpc.close()
        for view in list(self._arenas.values()):
            view.close()

    def snapshot(self) -> SessionSnapshot:
        """Return the session's state."""
        return SessionSnapshot(
            attached=self._attachment is not None,
            epoch=self.epoch,
            alive=self.alive,
            arenas=tuple(sorted({arena_id for arena_id, _ in self._arenas})),
        )

    def _worth_repeating(self, failure: CallFailedError, deadline: Deadline) -> bool:
        # A call is cancelled when another thread, whose call failed first, replaces the channel.
        unconnected = failure.code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
        return unconnected and not failure.draining and self.alive and not deadline.passed

    def _reconnected(self, failed: Rpc, deadline: Deadline) -> Rpc:
        """Return a channel other than the one that `failed`, made by whichever thread comes first."""
        # Another thread may map an arena under the same lock, and has a deadline of its own for that.
        if not self._lock.acquire(timeout=deadline.remaining_seconds):
            raise CallFailedError.timed_out("connecting anew")
        try:
            if self._rpc is failed and not self._closed:
                self._rpc = Rpc(self._target.grpc_target, self._security)
                failed.close()
            return self._rpc
        finally:
            self._lock.release()


def attach(target: Target, deadline: Deadline) -> Attachment:
    """Open a session at the descriptor socket of a bridge with which memory is shared.

    Raises:
        CallFailedError: no bridge answers there in time, or it refuses.
    """
    path = target.descriptor_socket
    assert path is not None, target
    try:
        return _attached(lambda: Attachment.open(path, deadline.remaining_seconds))
    except NodeUnreachableError as error:  # By the name that people gave it, which is not that of this socket.
        raise CallFailedError.no_answer(target.grpc_target, error.problem) from error


def _mapped(attachment: Attachment, arena_id: str, deadline: Deadline, *, writable: bool) -> ArenaView:
    fd = _attached(lambda: attachment.arena_descriptor(arena_id, writable, deadline.remaining_seconds))
    try:
        return ArenaView(arena_id, fd, writable=writable)
    except MappingUnavailableError as error:
        raise CallFailedError(grpc.StatusCode.INTERNAL, str(error)) from error


def _attached(work: Callable[[], _Answer]) -> _Answer:
    """Do something at the descriptor socket, and raise its errors, but that nobody is there, as those of a call."""
    try:
        return work()
    except AttachmentTimeoutError as error:
        raise CallFailedError(grpc.StatusCode.DEADLINE_EXCEEDED, str(error)) from error
    except NodeUnreachableError:
        raise
    except AttachmentError as error:
        refused = isinstance(error, DescriptorRefusedError) and error.code is RefusalCode.DRAINING
        raise CallFailedError(grpc.StatusCode.UNAVAILABLE, str(error), about=DRAINING if refused else "") from error
