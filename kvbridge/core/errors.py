"""Typed operating errors of the core; `kvbridge.server.errors` maps each to one gRPC status."""

from __future__ import annotations


class BridgeError(Exception):
    """Base of every error that a caller, not a programmer, can cause."""


class InvalidFieldError(BridgeError):
    """A request field holds a value that the API does not allow."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the `field` by its path in the request and say what is wrong with it."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownReferenceError(BridgeError):
    """A lease, hold or reservation token is unknown, released, expired or from an earlier start of the node."""

    def __init__(self, field: str, problem: str = "no live reference has this token") -> None:
        """Name the request `field` that carried the token."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class NotYoursError(BridgeError):
    """A token is valid but was given to another client."""

    def __init__(self, field: str) -> None:
        """Name the request `field` that carried the token."""
        super().__init__(f"{field}: the token belongs to another client")
        self.field = field


class WrongStateError(BridgeError):
    """The payload's lifecycle does not allow this operation now."""

    def __init__(self, field: str, problem: str) -> None:
        """Name the request `field` that selected the payload and say what state forbids."""
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class MemoryExhaustedError(BridgeError):
    """The arena cannot lend a slot of this size, even after evicting what nobody references."""

    retry_after_seconds: float = 1.0
    """When it may make sense to ask again."""

    def __init__(self, requested_bytes: int, available_bytes: int, arena_bytes: int) -> None:
        """Report the request beside what could have been had at most in one piece."""
        super().__init__(
            f"a slot of {requested_bytes} bytes was asked for; at most {available_bytes} bytes in one piece "
            f"of the {arena_bytes}-byte arena are free or evictable"
        )
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes
        self.arena_bytes = arena_bytes


class LimitExceededError(BridgeError):
    """A configured limit on a count or size is reached."""

    def __init__(self, limit: str, value_max: float) -> None:
        """Name the `limit` as the configuration names it."""
        super().__init__(f"{limit}: the limit of {value_max} is reached")
        self.limit = limit
        self.value_max = value_max


class TooManyRequestsError(LimitExceededError):
    """A tenant makes more calls than its quota allows."""

    def __init__(self, limit: str, value_max: float, retry_after_seconds: float) -> None:
        """Name the `limit` and say when the next call may be made."""
        super().__init__(limit, value_max)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(BridgeError):
    """The node is draining or not yet serving."""


class TooLateError(BridgeError):
    """The caller's deadline had passed before anything was granted."""


class UnauthenticatedError(BridgeError):
    """Nothing proves who makes a call. What it says never repeats a secret."""


class NotPermittedError(BridgeError):
    """The caller is known, and none of its roles allows the call."""

    def __init__(self, problem: str, *, principal: str = "") -> None:
        """Say what it may not do; `principal` is its name in the file that says who may call, for the log."""
        super().__init__(problem)
        self.principal = principal
