"""The client's end of the descriptor socket: a session with the node of this host."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Self

from kvbridge.memory.descriptor_wire import PROTOCOL_VERSION, close_all, receive_response, send_packet
from kvbridge.memory.errors import (
    AttachmentEndedError,
    AttachmentForkedError,
    AttachmentTimeoutError,
    DescriptorProtocolError,
    DescriptorRefusedError,
    NodeUnreachableError,
    RefusalCode,
)
from kvbridge.v1 import descriptor_socket_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachmentSnapshot:
    """A session at one moment, without its token, which is a secret."""

    path: str
    """Where the node was found."""
    tenant: str
    """The tenant that the client acts for."""
    epoch: int
    """Boot epoch of the node."""
    closed: bool
    """Whether the session has ended."""
    requests_total: int
    """Requests made so far."""


class Attachment:
    """A session, which lasts until `close`, the end of this process, or the end of the node.

    Threads may share it: requests take turns. A forked child may not: it loses its copy of the socket at the fork, so
    that the session still ends with the process that opened it, and every call there raises `AttachmentForkedError`.
    """

    session_token: str
    """Unguessable name of the session."""
    tenant: str
    """The tenant that the client acts for."""
    epoch: int
    """Boot epoch of the node."""

    def __init__(self, sock: socket.socket, path: str, timeout_seconds: float) -> None:
        """Take over a connected socket and attach; `open` is the way to make one."""
        self._socket = sock
        self._path = path
        self._timeout_seconds = timeout_seconds
        self._owner_pid = os.getpid()
        self._turn = threading.Lock()
        self._closing = False
        self._watcher: threading.Thread | None = None
        self._requests_total = 0
        _forget_in_children()
        _open_attachments.add(self)
        request = pb.DescriptorSocketRequest(attach=pb.AttachRequest(protocol_version=PROTOCOL_VERSION))
        attached = self._ask(request, timeout_seconds)[0].attach
        self.session_token, self.tenant, self.epoch = attached.session_token, attached.tenant, attached.epoch

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], timeout_seconds: float, on_end: Callable[[], None] | None = None
    ) -> Attachment:
        """Connect to the node and attach, or raise an `AttachmentError`.

        `timeout_seconds` holds for connecting, for attaching, and for later requests that name no other. `on_end` is
        called once, from a thread of its own, when the node ends the session; not when `close` is called.
        """
        path = os.fspath(path)
        sock = _connect(path, timeout_seconds)
        try:
            attachment = cls(sock, path, timeout_seconds)
        except BaseException:  # An interrupt included: the node must not keep a session that nobody has.
            sock.close()
            raise
        if on_end is not None:
            attachment._start_watcher(on_end)
        return attachment

    def __repr__(self) -> str:
        """Show where the session leads and whether it lives."""
        state = "closed" if self.closed else "open"
        return f"<Attachment {self._path}, tenant {self.tenant}, epoch {self.epoch:#x}, {state}>"

    def __enter__(self) -> Self:
        """Return the session, which the `with` block closes at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the session."""
        self.close()

    @property
    def closed(self) -> bool:
        """Tell whether the session has ended, with one system call and without waiting."""
        descriptor = self._socket.fileno()
        if self._closing or descriptor < 0 or self._owner_pid != os.getpid():
            return True
        return _hung_up(descriptor, timeout_milliseconds=0)

    def fileno(self) -> int:
        """Return the socket's descriptor, to be polled for `POLLRDHUP`; -1 after `close`."""
        return self._socket.fileno()

    def arena_descriptor(
        self,
        arena_id: str,
        writable: bool,  # noqa: FBT001 - every caller names its access, and there is no default to forget
        timeout_seconds: float | None = None,
    ) -> int:
        """Obtain a descriptor of an arena, which the caller closes; read-only unless `writable`."""
        request = pb.DescriptorSocketRequest(arena=pb.ArenaRequest(arena_id=arena_id, writable=writable))
        response, descriptors = self._ask(request, timeout_seconds)
        problem = _arena_problem(response.arena, descriptors)
        if problem:
            close_all(descriptors)
            raise DescriptorProtocolError(f"arena {arena_id}: {problem}")
        return descriptors[0]

    def close(self) -> None:
        """End the session; more than once does nothing. A forked child only lets go of its copy of the socket."""
        if self._closing:
            return
        self._closing = True
        _open_attachments.discard(self)
        if self._owner_pid == os.getpid():
            self._wake_and_wait()
        self._socket.close()

    def abandon(self) -> None:
        """Let go of the socket in a forked child; shutting it down would end the parent's session."""
        self._closing = True
        self._socket.close()

    def snapshot(self) -> AttachmentSnapshot:
        """Return the session's state."""
        return AttachmentSnapshot(
            path=self._path,
            tenant=self.tenant,
            epoch=self.epoch,
            closed=self.closed,
            requests_total=self._requests_total,
        )

    def _wake_and_wait(self) -> None:
        """Shut the connection down and wait for the threads that use it, before its descriptor's number is freed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._watcher and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._turn:  # A request under way ends at once, because the connection does.
            pass

    def _ask(
        self, request: pb.DescriptorSocketRequest, timeout_seconds: float | None
    ) -> tuple[pb.DescriptorSocketResponse, list[int]]:
        """Make a request and return the response to it, which answers the very kind of request."""
        self._check_usable()  # Before the lock, which a forked child may have inherited locked for ever.
        timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        if not self._turn.acquire(timeout=timeout_seconds):
            raise AttachmentTimeoutError("other requests took all the time")
        try:
            self._check_usable()
            response, descriptors = self._exchange(request, deadline)
        finally:
            self._turn.release()
        if response.WhichOneof("response") != request.WhichOneof("request"):
            close_all(descriptors)
            raise _refusal(response)
        return response, descriptors

    def _exchange(
        self, request: pb.DescriptorSocketRequest, deadline: float
    ) -> tuple[pb.DescriptorSocketResponse, list[int]]:
        self._requests_total += 1
        request.request_number = self._requests_total
        try:
            self._send(request, deadline)
            while True:
                response, descriptors = self._receive(deadline)
                # Zero is the number of a request that the node could not read or did not wait for.
                if response.request_number in {0, request.request_number}:
                    return response, descriptors
                close_all(descriptors)  # The answer to a request that timed out.
        except TimeoutError as error:
            raise AttachmentTimeoutError("the node did not answer in time") from error
        except OSError as error:
            raise AttachmentEndedError(f"the session has ended: {error}") from error

    def _send(self, request: pb.DescriptorSocketRequest, deadline: float) -> None:
        self._socket.settimeout(_remaining(deadline))
        with suppress(BrokenPipeError, ConnectionResetError):  # The node may have said why before it hung up.
            send_packet(self._socket, request)

    def _receive(self, deadline: float) -> tuple[pb.DescriptorSocketResponse, list[int]]:
        self._socket.settimeout(_remaining(deadline))
        response, descriptors = receive_response(self._socket)
        if response is None:
            raise AttachmentEndedError("the node has ended the session")
        return response, descriptors

    def _check_usable(self) -> None:
        if self._owner_pid != os.getpid():
            raise AttachmentForkedError("the session belongs to the parent process")
        if self._closing:
            raise AttachmentEndedError("the session was closed")

    def _start_watcher(self, on_end: Callable[[], None]) -> None:
        self._watcher = threading.Thread(target=self._watch, args=(on_end,), name="kvbridge-attachment", daemon=True)
        self._watcher.start()

    def _watch(self, on_end: Callable[[], None]) -> None:
        if _hung_up(self._socket.fileno(), timeout_milliseconds=None) and not self._closing:
            on_end()


_open_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
"""What a forked child must let go of."""


@cache
def _forget_in_children() -> None:
    """Arrange, once in a process, that forked children abandon the sessions of their parent."""
    os.register_at_fork(after_in_child=_abandon_all)


def _abandon_all() -> None:
    for attachment in tuple(_open_attachments):
        attachment.abandon()
    _open_attachments.clear()


def _connect(path: str, timeout_seconds: float) -> socket.socket:
    """Connect, and wait for a full queue as long as the timeout allows.

    A non-blocking connect fails at once when the queue is full, and unlike with TCP there is nothing to poll for. So
    the socket blocks, and the kernel's own send timeout bounds it.
    """
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # This process has too many files open.
        raise NodeUnreachableError(path, f"this process can open no socket: {error.strerror or error}") from error
    try:
        seconds, fraction = divmod(max(timeout_seconds, 1e-6), 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6)))
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise NodeUnreachableError(path, error.strerror or str(error)) from error
    return sock


def _hung_up(descriptor: int, timeout_milliseconds: int | None) -> bool:
    """Wait for the other end to hang up and tell whether it did; data that wait to be read do not matter."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(timeout_milliseconds))


def _remaining(deadline: float) -> float:
    """Return the seconds left, or raise `TimeoutError`: a socket takes zero to mean that it must not wait."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining


def _refusal(response: pb.DescriptorSocketResponse) -> DescriptorRefusedError | DescriptorProtocolError:
    if response.WhichOneof("response") == "error":
        return DescriptorRefusedError(RefusalCode(response.error.code), response.error.message)
    return DescriptorProtocolError("the response answers another request")


def _arena_problem(arena: pb.ArenaResponse, descriptors: list[int]) -> str:
    """Return what is wrong with the descriptors that came with an arena, empty if nothing is."""
    if len(descriptors) != 1:
        return f"{len(descriptors)} descriptors came instead of one"
    size_bytes = os.fstat(descriptors[0]).st_size
    if size_bytes != arena.size_bytes:
        return f"the file has {size_bytes} bytes, not {arena.size_bytes}"
    return ""
