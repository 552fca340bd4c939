"""What a client can owe a node."""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class ReferenceKind(StrEnum):
    """What a token stands for."""

    RESERVATION = "RESERVATION"
    """The right to write and commit; ends by commit or abort."""
    HOLD = "HOLD"
    """The producer's own reference to what it committed."""
    LEASE = "LEASE"
    """A consumer's reference."""
