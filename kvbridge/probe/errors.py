"""What is wrong with a fingerprint, as opposed to a payload."""

from __future__ import annotations

from kvbridge.core.errors import BridgeError
from kvbridge.core.tags import TagDifference


class FingerprintFileError(BridgeError):
    """A file is not a fingerprint that this release can read, or is damaged."""

    def __init__(self, path: str, problem: str) -> None:
        """Name the file and say what is wrong with it."""
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class FingerprintMismatchError(BridgeError):
    """A fingerprint belongs to another model version than the one that was asked for."""

    def __init__(self, path: str, differences: tuple[TagDifference, ...]) -> None:
        """Name the file and the fields in which the tags differ."""
        clauses = (f"{each.field} is {each.found!r}, not {each.expected!r}" for each in differences)
        super().__init__(f"{path}: belongs to another model version: {'; '.join(clauses)}")
        self.path = path
        self.differences = differences


class FingerprintBuildError(BridgeError):
    """A model's keys and values do not follow from its tokens in the way that a fingerprint needs."""

    def __init__(self, name: str, problem: str) -> None:
        """Name the model, setting or figure that is refused and say why."""
        super().__init__(f"{name}: {problem}")
        self.name = name
        self.problem = problem
