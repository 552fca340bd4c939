"""The gate: what it takes inside a node, with how many payloads it grows, and when those are answered who wait.

1. *Inside*: `Bridge.acquire` without bytes, in a node with 2,000 models, 1,000 aligners, 1,000 routes and 100,000
   payloads.
2. *Through the server*: an acquire by the SDK at 100,000 payloads and at 100, by turns.
3. *A crowd*: 200 callers with one deadline who all wait for a check that takes longer; when they are answered, counted
   from their deadline, and how many of them by the node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import torch

import kvbridge
from benchmarks.gate_node import (
    ASKED,
    PROMPT_TOKENS,
    asked_key,
    config,
    fill,
    full_catalog,
    pair,
    terms,
    token_ids,
)
from benchmarks.timing import percentile
from benchmarks.workload import GEOMETRY
from kvbridge.core.descriptor import Verification
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Leased
from kvbridge.node.bridge import Bridge
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.v1.handoff_service_pb2_grpc import HandoffServiceStub
from kvbridge.wire import encode_aligner_tag, encode_model_tag

INSIDE_P50_SECONDS_TARGET = 200e-6
GROWTH_TARGET = 1.2
LATE_P99_SECONDS_TARGET = 10e-3
CALLERS = 200
CROWD_DEADLINE_SECONDS = 2.0
CROWD_CLIENT = (("kvbridge-client", "benchmark-of-the-crowd"),)
STOP_SECONDS_MAX = 30.0
WARM_UPS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The gate inside a node."""

    payloads: int
    """Payloads in the node."""
    p50_seconds: float
    """Median of one acquire."""
    p99_seconds: float
    """What 99 of 100 do not exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Acquires through the server."""

    few: int
    """Payloads in the small node."""
    many: int
    """Payloads in the large one."""
    few_p50_seconds: float
    """Median at the small node."""
    many_p50_seconds: float
    """Median at the large one."""

    @property
    def ratio(self) -> float:
        """Return how many times as long it takes at the large node."""
        return self.many_p50_seconds / self.few_p50_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Callers who waited in vain."""

    callers: int
    """How many."""
    deadline_seconds: float
    """Their deadline."""
    told_by_node: int
    """Those who got the node's text and reason; the others ran into their own deadline."""
    late_p50_seconds: float
    """Median of how long after the deadline they were answered; negative before it."""
    late_p99_seconds: float
    """What 99 of 100 do not exceed."""


async def inside(payloads: int, repetitions: int) -> Inside:
    """Time acquires in a node of this process."""
    with tempfile.TemporaryDirectory(prefix="kvb-gate-") as directory:
        bridge = Bridge(config(f"{directory}/s", payloads))
        await bridge.start()
        bridge.catalog.change(lambda _: full_catalog())
        client = await fill(bridge, payloads)
        prompt, samples = token_ids(PROMPT_TOKENS), []
        for number in range(WARM_UPS + repetitions):
            asked = Acquisition(
                client=client, parts=(terms(number, prompt),), verification=Verification.NONE, deadline_seconds=1.0
            )
            started = time.perf_counter()
            answer = await bridge.acquire(asked)
            samples.append(time.perf_counter() - started)
            [part] = answer.parts
            if not isinstance(part, Leased):
                raise RuntimeError(  # noqa: TRY004 - an answer, not an argument
                    f"the gate refused: {part.finding.reason}: {part.finding.problem}"
                )
            bridge.release(client, [part.grant.token])
        await bridge.close()
    samples = samples[WARM_UPS:]
    return Inside(payloads=payloads, p50_seconds=median(samples), p99_seconds=percentile(samples, 99))


@contextmanager
def full_node(payloads: int, *flags: str) -> Iterator[str]:
    """Run a node of its own process with so many payloads, and yield its target once it is full."""
    with tempfile.TemporaryDirectory(prefix="kvb-gate-") as directory:
        socket = str(Path(directory, "bridge.sock"))
        command = [sys.executable, "-m", "benchmarks.gate_node", "--socket", socket, "--payloads", str(payloads)]
        command += flags
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "full":
                raise RuntimeError(f"the node ended with status {process.wait(STOP_SECONDS_MAX)}")
            yield f"unix:{socket}"
        finally:
            process.terminate()
            process.wait(STOP_SECONDS_MAX)


def growth(few: int, many: int, repetitions: int) -> Growth:
    """Time acquires at two nodes by turns, so that both see the same machine."""
    samples: dict[int, list[float]] = {few: [], many: []}
    with full_node(few) as small, full_node(many) as large, kvbridge.connect(small) as a, kvbridge.connect(large) as b:
        for number in range(WARM_UPS + repetitions):
            for payloads, bridge in ((few, a), (many, b)):
                samples[payloads].append(_acquire_seconds(bridge, number))
    return Growth(
        few=few,
        many=many,
        few_p50_seconds=median(samples[few][WARM_UPS:]),
        many_p50_seconds=median(samples[many][WARM_UPS:]),
    )


def _acquire_seconds(bridge: kvbridge.Bridge, number: int) -> float:
    asked = pair(number % ASKED)
    started = time.perf_counter()
    handoff = bridge.acquire(
        asked_key(number),
        model=asked.target,
        tokens=range(PROMPT_TOKENS),
        geometry=GEOMETRY,
        aligner=asked.aligner,
        edge="plan",
        depth=1,
        affinity=f"conversation-{number}",
    )
    seconds = time.perf_counter() - started
    with handoff:
        if handoff.kv is None:
            raise RuntimeError(f"the gate refused: {handoff.reason}: {handoff.detail}")
    return seconds


def crowd(callers: int, deadline_seconds: float) -> Crowd:
    """Let many wait for a check by a node whose checking threads are busy with something else."""
    late: list[float] = []
    with full_node(ASKED, "--busy") as target, grpc.insecure_channel(target) as channel:
        acquire = HandoffServiceStub(channel).Acquire
        requests = [_request(number) for number in range(callers)]
        acquire(_request(callers, types_pb2.VERIFICATION_NONE), metadata=CROWD_CLIENT)  # Connects.
        calls: list[Any] = []
        for request in requests:
            due = time.perf_counter() + deadline_seconds
            call: Any = acquire.future(request, metadata=CROWD_CLIENT, timeout=deadline_seconds)
            call.add_done_callback(lambda _, due=due: late.append(time.perf_counter() - due))
            calls.append(call)
        told = sum(call.exception() is None for call in calls)
        while len(late) < callers:
            time.sleep(0.001)
    return Crowd(
        callers=callers,
        deadline_seconds=deadline_seconds,
        told_by_node=told,
        late_p50_seconds=median(late),
        late_p99_seconds=percentile(late, 99),
    )


def _request(number: int, verification: Any = types_pb2.VERIFICATION_FULL) -> pb.AcquireRequest:
    asked = pair(0)
    return pb.AcquireRequest(
        request_id=f"crowd-{number}",
        payloads=[types_pb2.PayloadReference(key=asked_key(0))],
        model=encode_model_tag(asked.target),
        aligner=encode_aligner_tag(asked.aligner),
        tokens=pb.ExpectedTokens(any=True),
        edge="plan",
        verification=verification,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and print it."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    many, repetitions = (2_000, 300) if options.quick else (100_000, 3_000)
    load = os.getloadavg()[0]
    _say("a crowd that waits")
    waited = crowd(CALLERS, CROWD_DEADLINE_SECONDS)
    _say("inside a node")
    gate = asyncio.run(inside(many, repetitions))
    _say("through the server")
    grown = growth(max(many // 1_000, ASKED + 36), many, repetitions)
    figures = {
        "inside": asdict(gate),
        "growth": {**asdict(grown), "ratio": grown.ratio},
        "crowd": asdict(waited),
        "machine": {"processors": os.cpu_count(), "load_before": load},
    }
    print(json.dumps(figures) if options.json else _table(gate, grown, waited, load))
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _table(gate: Inside, grown: Growth, waited: Crowd, load: float) -> str:
    told = f"{waited.told_by_node} of {waited.callers} told by the node"
    rows = [
        _row(
            f"gate inside a node of {gate.payloads:,} payloads, p50",
            f"{gate.p50_seconds * 1e6:.0f} us",
            passes=gate.p50_seconds <= INSIDE_P50_SECONDS_TARGET,
            target=f"<= {INSIDE_P50_SECONDS_TARGET * 1e6:.0f} us",
        ),
        _row("the same, p99", f"{gate.p99_seconds * 1e6:.0f} us"),
        _row(f"acquire at {grown.few:,} payloads, p50", f"{grown.few_p50_seconds * 1e3:.2f} ms"),
        _row(
            f"acquire at {grown.many:,} payloads, p50",
            f"{grown.many_p50_seconds * 1e3:.2f} ms",
            passes=grown.ratio <= GROWTH_TARGET,
            target=f"<= {GROWTH_TARGET:g} times, is {grown.ratio:.2f}",
        ),
        _row(
            f"{waited.callers} callers after a deadline of {waited.deadline_seconds:g} s, p99",
            f"{waited.late_p99_seconds * 1e3:+.0f} ms",
            passes=waited.late_p99_seconds <= LATE_P99_SECONDS_TARGET,
            target=f"<= {LATE_P99_SECONDS_TARGET * 1e3:+.0f} ms; {told}",
        ),
    ]
    return "\n".join([f"{os.cpu_count()} processors, load {load:.2f} before", "", *rows])


def _row(what: str, value: str, *, passes: bool | None = None, target: str = "") -> str:
    verdict = "" if passes is None else "pass" if passes else "FAIL"
    return f"{what:<60}{value:>12}  {verdict:<6}{target}".rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="2,000 payloads, to see that it works")
    return parser


if __name__ == "__main__":
    sys.exit(main())
