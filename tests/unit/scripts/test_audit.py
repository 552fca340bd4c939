"""The audit of the supply chain finds what it is for."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from packaging.utils import NormalizedName

from scripts import audit

HASH = "sha256:" + "0" * 64
RULES = audit.Rules(
    allowed=frozenset({"MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"}),
    names={"MIT License": "MIT"},
    exceptions={"odd-*": "it is odd"},
    unmet={"whole part": "nobody needs the part"},
)


def environment(folder: Path, **versions: str) -> dict[NormalizedName, metadata.Distribution]:
    """Install empty distributions; behind a version may follow lines of metadata."""
    for name, words in versions.items():
        version, _, more = words.partition("\n")
        information = folder / f"{name}-{version}.dist-info"
        information.mkdir(parents=True)
        head = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        (information / "METADATA").write_text(f"{head}{more}\n", encoding="utf-8")
    return audit.installed([str(folder)])


def lock(folder: Path, *lines: str) -> list[audit.Pin]:
    """Write a lock and read it."""
    path = folder / "main.txt"
    path.write_text("# a comment\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return audit.read_lock(path)


def faults_of(pins: list[audit.Pin]) -> list[str]:
    """Return what is wrong with the pins themselves."""
    return [fault for pin in pins for fault in pin.faults()]


def test_the_locks_of_this_project_are_in_order() -> None:
    """Every requirement in every lock is pinned and has its hashes."""
    paths = sorted(audit.LOCKS.glob("*.txt"))
    assert {path.stem for path in paths} >= {"main", "torch-cpu", "torch-cuda", "pip", "model", "transformers-5.0"}
    assert [fault for path in paths for fault in faults_of(audit.read_lock(path))] == []


def test_a_pin_with_a_hash_is_in_order(tmp_path: Path) -> None:
    """A version, a platform and hashes over several lines are what a lock consists of."""
    [pin] = lock(tmp_path, "part==1.0 ; sys_platform == 'linux' \\", f"    --hash={HASH} \\", f"    --hash={HASH}")
    assert (pin.name, len(pin.hashes), faults_of([pin])) == ("part", 2, [])


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("part==1.0", "has no hash"),
        ("part==1.0 --hash=md5:00", "has no hash"),
        (f"part>=1.0 --hash={HASH}", "is not pinned"),
        (f"part==1.* --hash={HASH}", "is not pinned"),
        (f"part --hash={HASH}", "is not pinned"),
        (f"part @ https://example.org/part.whl --hash={HASH}", "comes from a place of its own"),
    ],
)
def test_a_pin_that_lets_anything_in_is_found(tmp_path: Path, line: str, fault: str) -> None:
    """What names no version, no hash or a place of its own is told."""
    [found] = faults_of(lock(tmp_path, line))
    assert fault in found


def test_an_option_in_a_lock_is_refused(tmp_path: Path) -> None:
    """A lock says what is installed, never from where."""
    with pytest.raises(ValueError, match="index-url"):
        lock(tmp_path, "--index-url https://example.org/simple")


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("1.0", None),
        ("1.0+cpu", None),
        ("1.1", "part is installed in version 1.1, and locked as part==1.0"),
    ],
)
def test_a_version_that_is_not_the_locks_is_found(tmp_path: Path, version: str, fault: str | None) -> None:
    """Another version than the locked one is told; a build of the same version is the same."""
    present = environment(tmp_path / "site", part=version)
    assert list(audit.differences(lock(tmp_path, f"part==1.0 --hash={HASH}"), present)) == ([fault] if fault else [])


def test_what_is_installed_and_not_locked_is_found_and_the_other_way_round(tmp_path: Path) -> None:
    """Nothing may be there that no lock names, and nothing may be missing that one does for this platform."""
    present = environment(tmp_path / "site", extra="2.0", kvbridge="0.1")
    pins = lock(tmp_path, f"part==1.0 --hash={HASH}", f"other==1.0 ; sys_platform == 'elsewhere' --hash={HASH}")
    assert sorted(audit.differences(pins, present)) == [
        "extra 2.0 is installed and not locked",
        "part is locked and not installed",
    ]


def test_what_is_asked_for_and_not_there_is_found(tmp_path: Path) -> None:
    """A requirement without its package, or with another version, is told, but for those with a reason."""
    present = environment(
        tmp_path / "site",
        whole="1.0\nRequires-Dist: part>1\nRequires-Dist: wheel>=2\nRequires-Dist: more; extra == 'all'",
        wheel="1.5",
    )
    assert list(audit.unmet(present, RULES)) == ["whole asks for wheel>=2, and finds 1.5"]


@pytest.mark.parametrize(
    ("metadata_lines", "fault"),
    [
        ("License-Expression: MIT", None),
        ("License: MIT License", None),
        ("License: see the file\nClassifier: License :: OSI Approved :: MIT License", None),
        ("License-Expression: GPL-3.0-only OR MIT", None),
        ("License-Expression: Apache-2.0 WITH LLVM-exception AND MIT", None),
        ("License-Expression: (GPL-3.0-only OR MIT) AND Apache-2.0", None),
        ("License-Expression: GPL-3.0-only", "part: its licence GPL-3.0-only is not allowed"),
        ("License-Expression: MIT AND GPL-3.0-only", "part: its licence MIT AND GPL-3.0-only is not allowed"),
        ("License: as you like", "part: its licence is unknown"),
        ("Summary: no word of it", "part: its licence is unknown"),
    ],
)
def test_a_licence_that_is_not_allowed_is_found(tmp_path: Path, metadata_lines: str, fault: str | None) -> None:
    """Whether a licence is said by expression, field or classifier, it has to be one of those that are allowed."""
    [distribution] = environment(tmp_path, part=f"1.0\n{metadata_lines}").values()
    assert RULES.fault("part", RULES.licence_of(distribution)) == fault


def test_an_exception_lets_a_package_in() -> None:
    """A package that is named with a reason may have any licence."""
    assert RULES.fault("odd-one", "GPL-3.0-only") is None


@pytest.mark.parametrize(("version", "lock_name"), [("2.13.0", "torch-cuda"), ("2.13.0+cpu", "torch-cpu")])
def test_the_build_of_torch_says_which_lock_is_its(tmp_path: Path, version: str, lock_name: str) -> None:
    """The build for the CPU has a lock of its own, without the libraries for CUDA."""
    assert audit.torch_lock(environment(tmp_path, torch=version)) == lock_name


def test_an_action_that_is_not_pinned_is_found() -> None:
    """A tag or a branch can be moved, a commit cannot; actions of this repository need none."""
    pinned = "actions/checkout@" + "a" * 40
    workflow = f"steps:\n  - uses: {pinned} # v4\n  - uses: ./here\n  - name: x\n    uses: 'actions/cache@v4'\n"
    assert list(audit.unpinned_actions(workflow)) == ["the action actions/cache@v4 is not pinned to a commit"]
