"""Typed operating errors of shared memory, on the node's side and on the client's."""

from __future__ import annotations

from enum import IntEnum, unique

from kvbridge.core.errors import BridgeError


class ArenaUnavailableError(BridgeError):
    """The host cannot give an arena of this size."""

    def __init__(self, size_bytes: int, problem: str) -> None:
        """Report the size asked for and what forbids it."""
        super().__init__(f"an arena of {size_bytes} bytes is not possible: {problem}")
        self.size_bytes = size_bytes
        self.problem = problem


class ArenaClosedError(BridgeError):
    """The arena was closed."""

    def __init__(self, arena_id: str) -> None:
        """Name the arena."""
        super().__init__(f"arena {arena_id} is closed")
        self.arena_id = arena_id


class MappingUnavailableError(BridgeError):
    """The kernel refused a mapping; a caller that only wanted to save a copy makes the copy instead."""

    def __init__(self, problem: str, error_number: int = 0) -> None:
        """Say what was refused; `error_number` is the kernel's errno, 0 where the kernel was not asked."""
        super().__init__(problem)
        self.error_number = error_number


class SlotHeaderError(BridgeError):
    """The page is not the header of a slot, or not of a version or state that this library knows."""


class SocketPathError(BridgeError):
    """The descriptor socket cannot be made at this path: the path, its directory or its mode is unfit."""


class SocketInUseError(SocketPathError):
    """Another process serves the descriptor socket at this path."""


class AttachmentError(BridgeError):
    """Base of what a client meets at the descriptor socket; every kind of it means: go on without shared memory."""


class NodeUnreachableError(AttachmentError):
    """No node serves the socket, or it did not take the connection in time."""

    def __init__(self, path: str, problem: str) -> None:
        """Name the `path` of the descriptor socket, and what is wrong."""
        super().__init__(f"no node answers at {path}: {problem}")
        self.problem = problem


class AttachmentTimeoutError(AttachmentError):
    """The node did not answer in time; the session goes on."""


class AttachmentEndedError(AttachmentError):
    """The session has ended: the node is gone, ended it, or `close` was called."""


class AttachmentForkedError(AttachmentError):
    """The session belongs to the process that opened it; a forked child must open its own."""


class DescriptorProtocolError(AttachmentError):
    """The node's answer makes no sense to this client."""


@unique
class RefusalCode(IntEnum):
    """Why the node refuses a request at the descriptor socket; the numbers of `DescriptorSocketErrorCode`."""

    UNSPECIFIED = 0
    MALFORMED = 1
    UNKNOWN_REQUEST = 2
    OUT_OF_ORDER = 3
    TOO_LARGE = 4
    UNEXPECTED_DESCRIPTORS = 5
    TOO_MANY_SESSIONS = 6
    HANDSHAKE_TIMEOUT = 7
    VERSION_UNSUPPORTED = 8
    NOT_PERMITTED = 9
    ARENA_UNKNOWN = 10
    DESCRIPTORS_EXHAUSTED = 11
    DRAINING = 12

    @classmethod
    def _missing_(cls, value: object) -> RefusalCode:  # noqa: ARG003 - the signature is given by `Enum`
        """Read a code of a newer node as unspecified: the message still says what is wrong."""
        return cls.UNSPECIFIED


class DescriptorRefusedError(AttachmentError):
    """The node refused the request; raised by the node's port, sent over the socket, and raised again at the client."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        """Give the kind of refusal and a sentence for people."""
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
