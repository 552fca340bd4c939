"""Both passes over all nodes, in as many processes as there may be.

A pass has many parts, and what each gives can be kept in a folder: a run that was stopped then goes on where it was.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.consumer import play_consumers
from benchmarks.scale.desk import SimulationError
from benchmarks.scale.owner import play_owners
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import Scale

_NODES_PER_TASK = 4
_SHOWN_EVERY_SECONDS = 30.0

_Result = TypeVar("_Result")


def simulate(scale: Scale, *, workers: int = 1, shows_progress: bool = False, kept: Path | None = None) -> Tally:
    """Live everybody's life and return what was counted; what lies in the folder `kept` already is not lived again.

    Raises:
        SimulationError: something happened that must not.
    """
    tally, answers = Tally(), []
    show = _shower(scale.nodes) if shows_progress else None
    ranges = [
        range(begin, min(begin + _NODES_PER_TASK, scale.nodes)) for begin in range(0, scale.nodes, _NODES_PER_TASK)
    ]
    folder = None if kept is None else _folder_of(scale, kept)
    for (part, answered), cpu_seconds in _spread(
        play_owners, ((scale, nodes) for nodes in ranges), workers, show, folder
    ):
        tally.add(part)
        tally.cpu_seconds += cpu_seconds
        answers.append(answered)
    by_consumer = np.concatenate(answers)
    by_consumer = by_consumer[np.lexsort((by_consumer["owner"], by_consumer["at"], by_consumer["consumer"]))]
    bounds = np.searchsorted(by_consumer["consumer"], [nodes.start for nodes in ranges] + [scale.nodes])
    shares = [by_consumer[begin:end] for begin, end in pairwise(bounds.tolist())]
    for part, cpu_seconds in _spread(play_consumers, ((scale, share) for share in shares), workers, show, folder):
        tally.add(part)
        tally.cpu_seconds += cpu_seconds
    _check(scale, tally, by_consumer)
    return tally


def answered(tally: Tally) -> int:
    """Return how many acquires got a lease or the text."""
    return sum(count for event, count in tally.events.items() if event.startswith(("leased ", "text ")))


def _check(scale: Scale, tally: Tally, answers: NDArray[Any]) -> None:
    events, calls = tally.events, tally.calls
    if events["published"] != scale.payloads:
        raise SimulationError(f"{events['published']} payloads were published, not {scale.payloads}")
    if answered(tally) != events["asked"]:
        raise SimulationError(f"of {events['asked']} acquires {answered(tally)} were answered")
    if events["leased after a pull"] > calls["Download"] or calls["OpenPayload"] > len(answers):
        raise SimulationError(f"more came than was asked for: {events}, {calls}")


def _spread(
    work: Callable[..., _Result],
    tasks: Iterable[tuple[Any, ...]],
    workers: int,
    show: Callable[[], None] | None,
    folder: Path | None,
) -> Iterator[tuple[_Result, float]]:
    """Yield what each part gives, and the processor seconds that it took."""
    named = ((None if folder is None else folder / f"{work.__name__}-{n}", task) for n, task in enumerate(tasks))
    if workers == 1:
        for file, task in named:
            yield _part(file, work, task)
            if show is not None:
                show()
        return
    with ProcessPoolExecutor(workers) as pool:
        for future in as_completed([pool.submit(_part, file, work, task) for file, task in named]):
            yield future.result()
            if show is not None:
                show()


def _part(file: Path | None, work: Callable[..., _Result], task: tuple[Any, ...]) -> tuple[_Result, float]:
    if file is not None and file.exists():
        kept: tuple[_Result, float] = pickle.loads(file.read_bytes())
        return kept
    began_at = time.process_time()
    done = work(*task), time.process_time() - began_at
    if file is not None:
        half = file.with_suffix(".half")
        half.write_bytes(pickle.dumps(done))
        half.replace(file)
    return done


def _folder_of(scale: Scale, kept: Path) -> Path:
    folder = kept / hashlib.blake2b(repr(scale).encode(), digest_size=8).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _shower(nodes: int) -> Callable[[], None]:
    tasks, done, shown_at = 2 * -(-nodes // _NODES_PER_TASK), 0, time.monotonic()

    def show() -> None:
        nonlocal done, shown_at
        done += 1
        if time.monotonic() - shown_at > _SHOWN_EVERY_SECONDS or done == tasks:
            shown_at = time.monotonic()
            print(f"{done} of {tasks} parts", file=sys.stderr, flush=True)

    return show
