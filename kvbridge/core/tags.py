"""Version tags: who computed a cache, and what mapped it to another model.

Two tags are the same version only if every field is equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvbridge.core.errors import InvalidFieldError

TAG_FIELD_CHARACTERS_MAX = 256
"""Longest tag field; long enough for a repository name or a hex digest with a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTag:
    """The version of one model as far as its cache depends on it."""

    name: str
    """The model's name, for people; not empty."""
    revision: str
    """A digest of the weights or a resolved commit; never a moving name such as `main`; not empty."""
    adapter: str = ""
    """Digest and scale of the active adapters; empty if there are none."""
    weight_dtype: str
    """The dtype that the weights compute in, such as `bfloat16`; not empty."""
    tokenizer_digest: str
    """A digest over tokenizer and chat template; not empty."""

    def __post_init__(self) -> None:
        """Refuse what could make two different versions look equal.

        Raises:
            InvalidFieldError: a field is empty (all but `adapter`), too long or holds control characters.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            _check_tag_field(field.name, value, may_be_empty=field.name == "adapter")

    def differences(self, other: ModelTag) -> tuple[TagDifference, ...]:
        """Return the fields in which `other` differs, in declaration order."""
        if self == other:
            return ()
        pairs = ((field.name, getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return tuple(
            TagDifference(field=name, expected=mine, found=theirs) for name, mine, theirs in pairs if mine != theirs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerTag:
    """The version of a map from one model's cache to another's, bound to exact versions of both."""

    name: str
    """The aligner's name, for people; not empty."""
    version: str
    """Its version; not empty."""
    source: ModelTag
    """The model whose caches it takes."""
    target: ModelTag
    """The model whose caches it makes."""
    digest: str
    """A digest of its parameters; not empty."""

    def __post_init__(self) -> None:
        """Refuse what could make two different versions look equal.

        Raises:
            InvalidFieldError: a field is empty, too long or holds control characters.
        """
        for name in ("name", "version", "digest"):
            _check_tag_field(name, getattr(self, name), may_be_empty=False, tag="aligner")

    def differences(self, other: AlignerTag) -> tuple[TagDifference, ...]:
        """Return the fields in which `other` differs, those of source and target by their path."""
        own = tuple(
            TagDifference(field=name, expected=getattr(self, name), found=getattr(other, name))
            for name in ("name", "version", "digest")
            if getattr(self, name) != getattr(other, name)
        )
        bound = tuple(
            TagDifference(field=f"{side}.{difference.field}", expected=difference.expected, found=difference.found)
            for side in ("source", "target")
            for difference in getattr(self, side).differences(getattr(other, side))
        )
        return own + bound


@dataclass(frozen=True, slots=True, kw_only=True)
class TagDifference:
    """One field in which two tags differ."""

    field: str
    """The field's name."""
    expected: str
    """What the consumer has."""
    found: str
    """What the payload carries."""

    def __str__(self) -> str:
        """Return one clause for a person."""
        return f"{self.field}: consumer has {self.expected!r}, payload has {self.found!r}"


def _check_tag_field(name: str, value: object, *, may_be_empty: bool, tag: str = "model") -> None:
    if not isinstance(value, str):
        raise InvalidFieldError(f"{tag}.{name}", f"must be a string, got {type(value).__name__}")
    if not value and not may_be_empty:
        raise InvalidFieldError(f"{tag}.{name}", "must not be empty")
    if len(value) > TAG_FIELD_CHARACTERS_MAX:
        raise InvalidFieldError(
            f"{tag}.{name}", f"is {len(value)} characters long; at most {TAG_FIELD_CHARACTERS_MAX} are allowed"
        )
    if not value.isprintable():
        raise InvalidFieldError(f"{tag}.{name}", "holds characters that do not print")
