"""Audits the supply chain without a network: locks, what is installed, licences, and the actions of workflows.

1. Every requirement in a lock names one version and the hash of every file that it may be, and no place to get it from.
2. Every installed distribution is locked with that version, and everything that is locked for this platform is there.
3. What each distribution asks for is installed in a version that it takes, because locks are installed without asking.
4. Every licence is allowed by `licences.toml`, which says why where that is not plain.
5. Every action of a workflow is pinned to a commit.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any, Self, TypeAlias

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
OVERLAY = ROOT / ".venv" / "overlays" / "transformers-5.0.0"
PROJECT = canonicalize_name("kvbridge")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_USES = re.compile(r"^[\s-]*uses:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)
_LICENCE_TOKEN = re.compile(r"[()]|[^\s()]+")

Installed: TypeAlias = Mapping[NormalizedName, metadata.Distribution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One requirement of a lock."""

    requirement: Requirement
    """Name, version and platform."""
    hashes: tuple[str, ...]
    """What its files may be."""
    place: str
    """The lock that it is in, for messages."""

    @property
    def name(self) -> NormalizedName:
        """Return the normalised name."""
        return canonicalize_name(self.requirement.name)

    @property
    def holds_here(self) -> bool:
        """Tell whether it is for this platform and Python."""
        return self.requirement.marker is None or self.requirement.marker.evaluate()

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with it."""
        specifiers = list(self.requirement.specifier)
        if self.requirement.url is not None:
            yield f"{self.place}: {self.name} comes from a place of its own"
        elif len(specifiers) != 1 or specifiers[0].operator != "==" or specifiers[0].version.endswith("*"):
            yield f"{self.place}: {self.name} is not pinned to one version"
        if not self.hashes or not all(HASH.fullmatch(digest) for digest in self.hashes):
            yield f"{self.place}: {self.name} has no hash, or another one than SHA-256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What `licences.toml` says."""

    allowed: frozenset[str]
    """Licences by their SPDX names."""
    names: Mapping[str, str]
    """SPDX names by what authors wrote before there were such."""
    exceptions: Mapping[str, str]
    """Reasons why packages may have another licence, by patterns of their names."""
    unmet: Mapping[str, str]
    """Reasons why packages may lack what they ask for, by patterns of both names."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the rules in a file."""
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            allowed=frozenset(content["allowed"]),
            names=content["names"],
            exceptions=content["exceptions"],
            unmet=content["unmet"],
        )

    def licence_of(self, distribution: metadata.Distribution) -> str:
        """Return a distribution's licence as an SPDX expression; empty if it names none that is known."""
        fields: Any = distribution.metadata
        classifiers = [text.rpartition(" :: ")[2] for text in fields.get_all("Classifier", []) if "License ::" in text]
        for words in (fields.get("License-Expression"), fields.get("License")):
            expression = self._expression(words or "")
            if expression:
                return expression
        return " AND ".join(filter(None, map(self._expression, classifiers)))

    def fault(self, name: str, expression: str) -> str | None:
        """Return what is wrong with a package's licence, if anything is."""
        if any(fnmatchcase(name, pattern) for pattern in self.exceptions):
            return None
        if not expression:
            return f"{name}: its licence is unknown"
        return None if permitted(expression, self.allowed) else f"{name}: its licence {expression} is not allowed"

    def _expression(self, words: str) -> str:
        try:
            return canonicalize_license_expression(self.names.get(words.strip(), words.strip()))
        except InvalidLicenseExpression:
            return ""


def permitted(expression: str, allowed: frozenset[str]) -> bool:
    """Tell whether the terms of an SPDX expression can be kept by what is allowed."""
    tokens = _LICENCE_TOKEN.findall(expression)
    result = _either(tokens, allowed)
    if tokens:
        raise ValueError(f"{expression!r} is no licence expression")
    return result


def _either(tokens: list[str], allowed: frozenset[str]) -> bool:
    result = _both(tokens, allowed)
    while tokens[:1] == ["OR"]:
        tokens.pop(0)
        result = _both(tokens, allowed) or result
    return result


def _both(tokens: list[str], allowed: frozenset[str]) -> bool:
    result = _term(tokens, allowed)
    while tokens[:1] == ["AND"]:
        tokens.pop(0)
        result = _term(tokens, allowed) and result
    return result


def _term(tokens: list[str], allowed: frozenset[str]) -> bool:
    first = tokens.pop(0)
    if first == "(":
        result = _either(tokens, allowed)
        tokens.remove(")")
        return result
    if tokens[:1] == ["WITH"]:
        first = " ".join((first, tokens.pop(0), tokens.pop(0)))
    return first in allowed


def read_lock(path: Path) -> list[Pin]:
    """Return what a lock pins.

    Raises:
        ValueError: a line is neither a requirement nor a comment, such as an option of pip.
    """
    logical = path.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in logical.splitlines() if line.strip() and not line.startswith("#")]
    return [_pin(line, path.name) for line in lines]


def _pin(line: str, place: str) -> Pin:
    words, *hashes = re.split(r"\s+--hash=", line.strip())
    return Pin(requirement=Requirement(words), hashes=tuple(hashes), place=place)


def installed(paths: Sequence[str] | None = None) -> dict[NormalizedName, metadata.Distribution]:
    """Return every distribution, by default in this environment, by its normalised name."""
    found = metadata.distributions() if paths is None else metadata.distributions(path=list(paths))
    return {canonicalize_name(distribution.name): distribution for distribution in found}


def torch_lock(present: Installed) -> str:
    """Return which of the locks of torch an environment was made from."""
    torch = present.get(canonicalize_name("torch"))
    return "torch-cpu" if torch is not None and torch.version.endswith("+cpu") else "torch-cuda"


def differences(pins: Iterable[Pin], present: Installed) -> Iterator[str]:
    """Yield in what an environment differs from its locks."""
    expected = {pin.name: pin for pin in pins if pin.holds_here}
    for name, distribution in present.items():
        if name == PROJECT:
            continue
        if name not in expected:
            yield f"{name} {distribution.version} is installed and not locked"
        elif not expected[name].requirement.specifier.contains(distribution.version, prereleases=True):
            yield f"{name} is installed in version {distribution.version}, and locked as {expected[name].requirement}"
    for name in expected.keys() - present.keys():
        yield f"{name} is locked and not installed"


def unmet(present: Installed, rules: Rules) -> Iterator[str]:
    """Yield what distributions ask for and do not find."""
    for name, distribution in present.items():
        for requirement in filter(_is_wanted, map(Requirement, distribution.requires or ())):
            wanted = canonicalize_name(requirement.name)
            other = present.get(wanted)
            if any(fnmatchcase(f"{name} {wanted}", pattern) for pattern in rules.unmet):
                continue
            if other is None or not requirement.specifier.contains(other.version, prereleases=True):
                yield f"{name} asks for {requirement}, and finds {other.version if other else 'nothing'}"


def _is_wanted(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def unpinned_actions(workflow: str) -> Iterator[str]:
    """Yield the actions in a workflow's text that may change under their names."""
    for action in _USES.findall(workflow):
        if not action.startswith("./") and COMMIT.fullmatch(action.rpartition("@")[2]) is None:
            yield f"the action {action} is not pinned to a commit"


def audit() -> Iterator[str]:
    """Yield everything that is wrong with this working copy and its environment."""
    rules = Rules.read(Path(__file__).with_name("licences.toml"))
    present, overlay = installed(), installed([str(OVERLAY)])
    locks = {path.stem: read_lock(path) for path in sorted(LOCKS.glob("*.txt"))}
    for pins in locks.values():
        for pin in pins:
            yield from pin.faults()
    names = ("main", "pip", "model", torch_lock(present))
    yield from differences([pin for name in names for pin in locks[name]], present)
    yield from differences(locks["transformers-5.0"], overlay)
    yield from unmet(present, rules)
    yield from unmet({**present, **overlay}, rules)
    for name, distribution in [*present.items(), *overlay.items()]:
        yield from filter(None, [rules.fault(name, rules.licence_of(distribution))])
    for path in [*ROOT.glob(".github/workflows/*.y*ml"), *ROOT.glob(".github/actions/*/action.y*ml")]:
        yield from (f"{path.name}: {fault}" for fault in unpinned_actions(path.read_text(encoding="utf-8")))


def main() -> int:
    """Print what is wrong; return 1 if anything is."""
    faults = sorted(set(audit()))
    for fault in faults:
        print(fault)
    print(f"{len(installed())} distributions audited, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
