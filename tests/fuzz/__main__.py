"""Coverage-guided fuzzing of every decoder: `python -m tests.fuzz --help`, and docs/hostile-input.md tells more.

Each target runs in a fork of this process, from the corpus that is kept beside this file. An input that makes a decoder
raise anything but its own errors ends its run; it is stored under `findings`, and the status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz import engine

if TYPE_CHECKING:
    from tests.fuzz.target import Target

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
FILE_BYTES_KEPT_MAX = 1024
"""Longest input that is added to the corpus."""
FILES_KEPT_MAX = 40
"""Most inputs of one target in the corpus, so that it stays small."""
TIMEOUT_SECONDS = 10
"""How long one input may take before it counts as a finding."""
_SHOWN_CHARACTERS_MAX = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one target is fuzzed."""

    name: str
    """The target."""
    run: Callable[[bytes], None]
    """What it runs."""
    seconds: float
    """For how long."""
    keeps: bool
    """Whether what reached something new is added to the corpus."""
    is_own_engine: bool
    """Whether atheris is not used."""

    @property
    def findings(self) -> Path:
        """Return the folder of its findings."""
        return FINDINGS / self.name

    @property
    def corpus(self) -> list[bytes]:
        """Return the inputs that are kept, the shortest first."""
        return sorted((path.read_bytes() for path in (CORPUS / self.name).glob("*")), key=len)


def main() -> int:
    """Fuzz, replay or seed; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Coverage-guided fuzzing of the decoders."
    )
    parser.add_argument("targets", nargs="*", help="what to fuzz (default: everything)")
    parser.add_argument("--seconds", type=float, default=600, help="for all targets together")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at once")
    parser.add_argument("--keep", action="store_true", help="add what reached something new to the corpus")
    parser.add_argument("--own-engine", action="store_true", help="do not use atheris although it is installed")
    parser.add_argument("--replay", metavar="FILE", help="give one input to one target")
    parser.add_argument("--seed-corpus", action="store_true", help="write what encoders write into the corpus")
    arguments = parser.parse_args()
    arguments.own_engine |= not engine.has_atheris()
    fuzzes = not arguments.replay and not arguments.seed_corpus
    with engine.instrumented() if fuzzes and not arguments.own_engine else nullcontext():
        from tests.fuzz.targets import TARGETS  # noqa: PLC0415 - importing it is what is instrumented
    unknown = set(arguments.targets) - set(TARGETS)
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    targets = {name: TARGETS[name] for name in arguments.targets or TARGETS}
    if arguments.replay:
        return _replay(targets, Path(arguments.replay))
    return _fuzz(targets, arguments) if fuzzes else _seed(targets)


def store(folder: Path, content: bytes) -> Path:
    """Write an input under its digest and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(content).hexdigest()[:16]
    path.write_bytes(content)
    return path


def _replay(targets: Mapping[str, Target], path: Path) -> int:
    for target in targets.values():
        target.run(path.read_bytes())
    print("nothing was found")
    return 0


def _seed(targets: Mapping[str, Target]) -> int:
    for name, target in targets.items():
        for content in target.seeds():
            store(CORPUS / name, content)
    return 0


def _fuzz(targets: Mapping[str, Target], arguments: argparse.Namespace) -> int:
    jobs = min(arguments.jobs, len(targets))
    share = arguments.seconds * jobs / len(targets)
    by = "the simple engine of this project" if arguments.own_engine else "atheris"
    print(f"{len(targets)} targets, {share:.1f} s each, {jobs} at once, by {by}", flush=True)
    waiting = [
        Plan(name=name, run=target.run, seconds=share, keeps=arguments.keep, is_own_engine=arguments.own_engine)
        for name, target in reversed(list(targets.items()))
    ]
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        under_way: dict[int, Plan] = {}
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                plan = waiting.pop()
                under_way[_fork(partial(_fuzz_one, plan), Path(folder, plan.name))] = plan
            process, status = os.wait()
            plan = under_way.pop(process)
            if status:
                failed.append(plan.name)
            _report(plan, Path(folder, plan.name).read_text(errors="replace"), is_good=not status)
    print(f"findings: {', '.join(failed)}" if failed else "nothing was found")
    return 1 if failed else 0


def _fork(work: Callable[[], int], output: Path) -> int:
    """Do some work in a process of its own, whose words go to a file, and return its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, sys.stdout.fileno())
        os.dup2(descriptor, sys.stderr.fileno())
        status = work()
    except BaseException:  # noqa: BLE001 - nothing may leave the fork
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _report(plan: Plan, output: str, *, is_good: bool) -> None:
    if is_good:
        summary = (line for line in reversed(output.splitlines()) if line.startswith(("Done", "own:")))
        print(f"{plan.name}: {next(summary, 'done')}", flush=True)
        return
    print(f"== {plan.name}: FOUND\n{output[-_SHOWN_CHARACTERS_MAX:]}")
    for path in sorted(plan.findings.glob("*"), key=lambda path: path.stat().st_mtime)[-1:]:
        print(f"== the input: {path.read_bytes()!r}\n== replay: python -m tests.fuzz {plan.name} --replay {path}")


def _fuzz_one(plan: Plan) -> int:
    plan.findings.mkdir(parents=True, exist_ok=True)
    return _fuzz_by_own_engine(plan) if plan.is_own_engine else _fuzz_by_atheris(plan)


def _fuzz_by_atheris(plan: Plan) -> int:
    """Let libFuzzer end a fork of this process, and look at what it leaves."""
    with tempfile.TemporaryDirectory() as found:
        flags = [
            f"-max_total_time={max(int(plan.seconds) - 1, 1)}",  # It ends in the second behind that.
            f"-max_len={engine.INPUT_BYTES_MAX}",
            f"-timeout={TIMEOUT_SECONDS}",
            f"-artifact_prefix={plan.findings}/",  # For what libFuzzer finds itself: inputs that take too long.
            found,
            str(CORPUS / plan.name),
        ]
        process = os.fork()
        if not process:
            engine.run_atheris(partial(_run_and_store, plan), flags)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if plan.keeps and not status:
            _keep(plan, [path.read_bytes() for path in Path(found).iterdir()])
    return 1 if status else 0


def _run_and_store(plan: Plan, content: bytes) -> None:
    try:
        plan.run(content)
    except BaseException:
        store(plan.findings, content)
        raise


def _fuzz_by_own_engine(plan: Plan) -> int:
    signal.signal(signal.SIGALRM, _took_too_long)
    signal.alarm(round(plan.seconds) + TIMEOUT_SECONDS)
    fuzzer = engine.OwnEngine(plan.run, plan.corpus, seed=int.from_bytes(os.urandom(4), "big"))
    before = len(fuzzer.kept)
    try:
        fuzzer.run_for(plan.seconds)
    except Exception:  # noqa: BLE001 - whatever it is, it is the finding
        traceback.print_exc()
        store(plan.findings, fuzzer.last)
        return 1
    print(f"own: {fuzzer.runs} runs, {len(fuzzer.kept) - before} new inputs")
    if plan.keeps:
        _keep(plan, fuzzer.kept[before:])
    return 0


def _took_too_long(*_: object) -> None:
    raise TimeoutError("an input took too long")


def _keep(plan: Plan, found: Sequence[bytes]) -> None:
    """Add to the corpus, shortest first, what reaches a line that nothing before it reaches."""
    corpus = plan.corpus
    measured = engine.OwnEngine(plan.run, corpus, seed=0)
    short = [content for content in sorted(found, key=len) if len(content) <= FILE_BYTES_KEPT_MAX]
    for content in measured.additions(short)[: max(FILES_KEPT_MAX - len(corpus), 0)]:
        store(CORPUS / plan.name, content)


if __name__ == "__main__":
    sys.exit(main())
