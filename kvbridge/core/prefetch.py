"""What a node says when it is asked to bring a payload over before anybody acquires it."""

from __future__ import annotations

from enum import StrEnum, unique


@unique
class PrefetchState(StrEnum):
    """What is done about a payload."""

    STARTED = "STARTED"
    """It is being brought over."""
    HERE = "HERE"
    """It is here already."""
    REFUSED = "REFUSED"
    """It is not brought over."""
