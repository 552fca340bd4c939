"""Enumerations: every member of the core has exactly one number on the wire, found by its name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from kvbridge.core.errors import InvalidFieldError

_Member = TypeVar("_Member", bound=StrEnum)


class EnumCodec(Generic[_Member]):
    """Translates one enumeration; number 0 is never a member."""

    def __init__(self, members: type[_Member], numbers: Mapping[str, int], prefix: str) -> None:
        """Pair each member with the number that the API gives to `prefix` + its name."""
        self._numbers: dict[_Member, int] = {member: numbers[prefix + member.name] for member in members}
        self._members: dict[int, _Member] = {number: member for member, number in self._numbers.items()}

    def encode(self, member: _Member) -> int:
        """Return the number of `member`."""
        return self._numbers[member]

    def decode(self, number: int, field: str) -> _Member:
        """Return the member with this `number`.

        Raises:
            InvalidFieldError: there is none, as for the unspecified number 0 and for numbers from a newer release.
        """
        member = self._members.get(number)
        if member is None:
            known = ", ".join(self._numbers)
            raise InvalidFieldError(field, f"has the unknown value {number}; known are {known}")
        return member
