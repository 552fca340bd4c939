"""Resolves every dependency and writes the locks: exact versions for every supported platform, each file with its hash.

- `main.txt`: what the project, its extras and its dependency groups need, around the pins in `main.in`.
- `cuda.txt`: what belongs to a torch that was built for CUDA, and is left out where it was not.
- The others: each pin of the `.in` file of the same name, without what it depends on.

Versions that are locked stay as long as they fit, so that running this twice changes nothing; `--upgrade` takes newer
ones. The locks name no package index: whoever installs from one gets the same files or none.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
UV = Path(sys.executable).with_name("uv")
EXTRAS = ("transformers", "redis", "otel")
HEADER = "# Written by `make lock`; do not edit.\n"
CUDA = re.compile(r"(nvidia|cuda|triton)\b")
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)
_HASH = re.compile(r"--hash=(sha256:[0-9a-f]{64})")


def main() -> None:
    """Write every lock."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    lock_main(upgrade)
    for pins in sorted(LOCKS.glob("*.in")):
        if pins.stem != "main":
            write(pins.with_suffix(".txt"), compiled([str(pins), "--no-deps", *upgrade], pins.with_suffix(".txt")))


def lock_main(upgrade: list[str]) -> None:
    """Write `main.txt` and `cuda.txt`."""
    path, cuda = LOCKS / "main.txt", LOCKS / "cuda.txt"
    before = [*entries(path), *entries(cuda)]
    extras = [flag for extra in EXTRAS for flag in ("--extra", extra)]
    sources = ["pyproject.toml", *extras, "--group", "dev", "--constraint", str(LOCKS / "main.in"), *upgrade]
    found = compiled(sources, path, before)
    write(cuda, [entry for entry in found if CUDA.match(entry)])
    write(path, [with_other_builds(entry, before) for entry in found if not CUDA.match(entry)])


def compiled(arguments: list[str], lock: Path, before: list[str] | None = None) -> list[str]:
    """Return the resolved entries, sorted; what `lock`, or `before` in its place, names is kept if it fits."""
    known = "".join(entries(lock) if before is None else before)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "lock.txt")
        output.write_text(known, encoding="utf-8")
        flags = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        command = [str(UV), "pip", "compile", "--quiet", *flags, "--output-file", str(output), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return entries(output)


def entries(lock: Path) -> list[str]:
    """Return the requirements in a lock, each with the lines of its hashes."""
    if not lock.exists():
        return []
    return [entry for entry in _ENTRY.split(lock.read_text(encoding="utf-8")) if entry and not entry.startswith("#")]


def with_other_builds(entry: str, before: list[str]) -> str:
    """Return torch's entry with the hashes of builds that the resolver does not look for; any other one as it is.

    A build for the CPU alone has the same version with a local suffix (2.13.0+cpu) and lies elsewhere. Its hash stays
    for as long as the version does, and that of the build that pip takes here is added.
    """
    pin = entry.split(maxsplit=1)[0]
    if not pin.startswith("torch=="):
        return entry
    old = [other for other in before if other.split()[0] == pin]
    hashes = sorted({*_HASH.findall("".join([entry, *old])), preferred_build(pin)})
    requirement = entry.partition(" \\\n")[0]
    return " \\\n".join([requirement, *(f"    --hash={digest}" for digest in hashes)]) + "\n"


def preferred_build(pin: str) -> str:
    """Return the hash of the file that pip takes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, pin]
        subprocess.run(command, check=True)
        [file] = Path(folder).iterdir()
        with file.open("rb") as stream:
            return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def write(lock: Path, found: list[str]) -> None:
    """Write a lock."""
    lock.write_text(HEADER + "".join(found), encoding="utf-8")
    print(f"{lock.relative_to(ROOT)} pins {len(found)} packages.")


if __name__ == "__main__":
    main()
