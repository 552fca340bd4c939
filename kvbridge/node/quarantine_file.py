"""Quarantines on disk: a quarantine that ended because a node was restarted would let contaminated caches through.

The file is one JSON object. Nobody but the node writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import BridgeError, InvalidFieldError
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Target
from kvbridge.node.state_file import content_of, replace_durably

FORMAT = 1
"""Version of the file's form."""
FILE_BYTES_MAX = 64 << 20
"""Largest file that is read."""
_KINDS: dict[str, type[Target]] = {"model": ModelPattern, "aligner": AlignerPattern, "payload": PayloadReference}


class QuarantineFileError(BridgeError):
    """The file of quarantines cannot be read or written, or holds what no node wrote."""


class QuarantineFile:
    """The quarantines of all tenants in one file."""

    def __init__(self, path: str) -> None:
        """Keep them at `path`, whose folder must exist."""
        self._path = Path(path)

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<QuarantineFile {self._path}>"

    def read(self) -> list[tuple[str, Quarantine]]:
        """Return the quarantines, oldest first, each with its tenant; none if there is no file yet.

        Raises:
            QuarantineFileError: the file cannot be read or understood.
        """
        try:
            content = content_of(self._path, FILE_BYTES_MAX)
        except (OSError, ValueError) as error:
            raise QuarantineFileError(f"quarantine_file: {error}") from error
        if content is None:
            return []
        try:
            return _decode(json.loads(content))
        except (
            ArithmeticError,
            AttributeError,
            InvalidFieldError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise QuarantineFileError(
                f"quarantine_file: {self._path} does not hold quarantines ({type(error).__name__}: {error}); "
                "repair it, or remove it to start without any"
            ) from error

    def write(self, quarantines: list[tuple[str, Quarantine]]) -> None:
        """Replace what is there.

        Raises:
            QuarantineFileError: it cannot be written; what was there before still is.
        """
        content = json.dumps(_encode(quarantines), indent=2).encode()
        try:
            replace_durably(self._path, content)
        except OSError as error:
            raise QuarantineFileError(f"quarantine_file: {error}") from error


def _encode(quarantines: list[tuple[str, Quarantine]]) -> dict[str, Any]:
    return {"format": FORMAT, "quarantines": [_encode_one(tenant, quarantine) for tenant, quarantine in quarantines]}


def _encode_one(tenant: str, quarantine: Quarantine) -> dict[str, Any]:
    target = quarantine.target
    kind = next(name for name, kind in _KINDS.items() if isinstance(target, kind))
    return {
        "tenant": tenant,
        "id": quarantine.quarantine_id,
        "since": quarantine.since,
        "why": quarantine.why,
        kind: {name: getattr(target, name) for name in target.__dataclass_fields__},
    }


def _decode(content: Any) -> list[tuple[str, Quarantine]]:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']} is not {FORMAT}")
    decoded = [(_text(one, "tenant"), _decode_one(one)) for one in content["quarantines"]]
    names = [quarantine.quarantine_id for _, quarantine in decoded]
    if len(set(names)) != len(names):
        raise ValueError("two quarantines have the same id")
    return decoded


def _decode_one(content: Mapping[str, Any]) -> Quarantine:
    [kind] = [name for name in _KINDS if name in content]
    fields = content[kind]
    if kind == "payload" and type(fields["generation"]) is not int:
        raise TypeError("generation must be a whole number")
    return Quarantine(
        quarantine_id=_text(content, "id"),
        target=_KINDS[kind](**fields),
        why=_text(content, "why"),
        since=float(content["since"]),
    )


def _text(content: Mapping[str, Any], name: str) -> str:
    if not isinstance(content[name], str):
        raise TypeError(f"{name} must be a string")
    return cast("str", content[name])
