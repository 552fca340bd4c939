"""Resolves every dependency and writes the locks: exact versions for every supported platform, each file with its hash.

- `main.txt`: what the project, its extras and its dependency groups need, around the pins in `main.in`, but torch.
- `torch-cuda.txt`: the package index's torch with the CUDA libraries that it asks for.
- `torch-cpu.txt`: the much smaller build of the same version for the CPU alone, which lies elsewhere.
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
TORCH = re.compile(r"(torch|nvidia|cuda|triton)\b")
HASH = re.compile(r"sha256:[0-9a-f]{64}")
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)


def main() -> None:
    """Write every lock."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that fit")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    lock_main(upgrade)
    for pins in sorted(LOCKS.glob("*.in")):
        if pins.stem != "main":
            lock = pins.with_suffix(".txt")
            write(lock, compiled([str(pins), "--no-deps", *upgrade], entries(lock)))


def lock_main(upgrade: list[str]) -> None:
    """Write `main.txt` and both locks of torch."""
    main, cuda, cpu = (LOCKS / name for name in ("main.txt", "torch-cuda.txt", "torch-cpu.txt"))
    extras = [flag for extra in EXTRAS for flag in ("--extra", extra)]
    sources = ["pyproject.toml", *extras, "--group", "dev", "--constraint", str(LOCKS / "main.in"), *upgrade]
    found = compiled(sources, [*entries(main), *entries(cuda)])
    write(main, [entry for entry in found if not TORCH.match(entry)])
    write(cuda, [entry for entry in found if TORCH.match(entry)])
    [torch] = (entry.split(maxsplit=1)[0] for entry in found if entry.startswith("torch=="))
    write(cpu, [cpu_build(f"{torch}+cpu", entries(cpu))])


def compiled(arguments: list[str], before: list[str]) -> list[str]:
    """Return the resolved entries, sorted; what `before` names is kept if it fits."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "lock.txt")
        output.write_text("".join(before), encoding="utf-8")
        flags = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        command = [str(UV), "pip", "compile", "--quiet", *flags, "--output-file", str(output), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return entries(output)


def entries(lock: Path) -> list[str]:
    """Return the requirements in a lock, each with the lines of its hashes."""
    if not lock.exists():
        return []
    return [entry for entry in _ENTRY.split(lock.read_text(encoding="utf-8")) if entry and not entry.startswith("#")]


def cpu_build(pin: str, before: list[str]) -> str:
    """Return the entry of torch for the CPU: the hashes that are known, and that of the file that pip finds here.

    It is not in the package index, and where it lies is not this project's to say, so only pip's settings tell.
    """
    known = {digest for entry in before if entry.split(maxsplit=1)[0] == pin for digest in HASH.findall(entry)}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *flags, pin], check=not known)
        for file in Path(folder).iterdir():
            with file.open("rb") as stream:
                known.add(f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}")
    return " \\\n".join([pin, *(f"    --hash={digest}" for digest in sorted(known))]) + "\n"


def write(lock: Path, found: list[str]) -> None:
    """Write a lock."""
    lock.write_text(HEADER + "".join(found), encoding="utf-8")
    print(f"{lock.relative_to(ROOT)} pins {len(found)} packages.")


if __name__ == "__main__":
    main()
