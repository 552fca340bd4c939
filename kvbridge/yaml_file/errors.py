"""What is wrong with a file, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbridge.core.errors import BridgeError

PROBLEMS_MAX = 100
"""Most problems that are told of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem:
    """One thing that a file may not say."""

    line: int
    """Where, counted from 1; 0 if it concerns the file as a whole."""
    field: str
    """What, by its path in the schema; empty if it is not about a field."""
    problem: str
    """Why, for people."""

    def __str__(self) -> str:
        """Return one line for a person."""
        return ": ".join(part for part in (str(self.line) if self.line else "", self.field, self.problem) if part)


class YamlFileError(BridgeError):
    """A file is not read: nothing of it is believed."""

    def __init__(self, path: str, problems: Sequence[FileProblem]) -> None:
        """Name the file and everything that was found in it, by line; there is at least one problem."""
        ordered = sorted(problems, key=lambda problem: problem.line)
        self.path = path
        self.problems = tuple(ordered[:PROBLEMS_MAX])
        self.problems_total = len(ordered)
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """Return one line, FILE:LINE: FIELD: PROBLEM, for each problem."""
        lines = [f"{self.path}:{' ' if not problem.line else ''}{problem}" for problem in self.problems]
        left_out = self.problems_total - len(self.problems)
        return [*lines, f"{self.path}: {left_out} more problems"] if left_out else lines

    @property
    def line(self) -> int:
        """Return the line of the first problem."""
        return self.problems[0].line

    @property
    def field(self) -> str:
        """Return the field of the first problem."""
        return self.problems[0].field

    @property
    def problem(self) -> str:
        """Return the first problem."""
        return self.problems[0].problem
