"""`python -m tests.sim`: run fresh seeds, a range of seeds, or one seed again with everything that happens in it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tests.sim.bugs import BUGS, planted
from tests.sim.failpoints import Action, Failpoint, Strike
from tests.sim.running import Total, fresh_seeds, words
from tests.sim.world import run_world


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if anything went wrong."""
    asked = _parser().parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if asked.bug:
        with planted(asked.bug):
            return _run(asked)
    return _run(asked)


def _run(asked: argparse.Namespace) -> int:
    if asked.seed is not None and asked.seeds is None:
        return _replay(asked)
    count = asked.seeds or 100
    seeds = fresh_seeds(count) if asked.seed is None else range(asked.seed, asked.seed + count)
    total = Total()
    for seed in seeds:
        report = run_world(seed, strike=asked.strike, rough=asked.rough, crowded=asked.crowded)
        total.add(report)
        if report.problem:
            print(words(report, asked.strike, crowded=asked.crowded), flush=True)  # noqa: T201 - people read it
    _show(total)
    return bool(total.failures)


def _replay(asked: argparse.Namespace) -> int:
    report = run_world(asked.seed, strike=asked.strike, rough=asked.rough, crowded=asked.crowded, tracing=True)
    for line in report.trace:
        print(line)  # noqa: T201 - people read it
    print(report.problem or "nothing went wrong")  # noqa: T201 - people read it
    return bool(report.problem)


def _show(total: Total) -> None:
    print(  # noqa: T201 - people read it
        f"{total.runs} runs, {total.steps} steps, {total.seconds:.0f} simulated seconds, {total.reads} reads, "
        f"{total.from_holders} replicas from holders, {len(total.failures)} failures"
    )
    for what, counts in (("answers", total.answers), ("failpoints", total.fired)):
        shown = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        print(f"{what}: {shown}")  # noqa: T201 - people read it


def _strike(text: str) -> Strike:
    failpoint, _, action = text.partition(" ")
    return Strike(failpoint=Failpoint(failpoint), action=Action(action))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, help="how many seeds to run; without --seed, fresh ones (default 100)")
    parser.add_argument("--seed", type=int, help="the seed to run again, or with --seeds the first of a range")
    parser.add_argument("--strike", type=_strike, help='something that must happen, for example "verify.read crash"')
    parser.add_argument("--rough", action="store_true", help="let much more go wrong")
    parser.add_argument("--crowded", action="store_true", help="let several nodes want the payloads of one")
    parser.add_argument("--bug", choices=list(BUGS), help="a bug to plant")
    return parser


if __name__ == "__main__":
    sys.exit(main())
