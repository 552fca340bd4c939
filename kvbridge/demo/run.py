"""`kvbridge demo`: start a bridge and two inference processes, hand a real cache over, and show what it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvbridge.core.errors import BridgeError
from kvbridge.core.reasons import Reason
from kvbridge.demo import checkpoint
from kvbridge.demo.events import parse

LENGTHS = (256, 512, 1000, 2000)
ARENA_BYTES = 512 << 20
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 20.0
_POLL_SECONDS = 0.05


class DemoFailedError(BridgeError):
    """A process of the demo ended in another way than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """What one length of the document took."""

    tokens: int
    """Tokens of the document."""
    bytes: int
    """Bytes of keys and values that were handed over."""
    ttft_text_seconds: float
    """Time to first token when B prefills the text."""
    ttft_cache_seconds: float
    """Time to first token when B acquires the cache."""
    speedup: float
    """The ratio of the two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallBack:
    """What a consumer with another checkpoint version got."""

    reason: str | None
    """Why it was not given the cache."""
    answer_correct: bool
    """Whether its answer from the text is the one that it gives without a bridge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that the demo shows; the object that `--json` prints."""

    identical_tokens: int
    """Greedy tokens after the longest document that agree with a full prefill."""
    compared_tokens: int
    """Greedy tokens that were compared."""
    lengths: tuple[Length, ...]
    """Figures by length."""
    fallback: FallBack
    """The second part."""

    @property
    def succeeded(self) -> bool:
        """Tell whether every token agreed, and the other version got the text for that reason and used it right."""
        right = self.fallback.answer_correct and self.fallback.reason == Reason.MODEL_VERSION_MISMATCH
        return self.identical_tokens == self.compared_tokens and right


def run_demo(*, as_json: bool, lengths: Sequence[int] = LENGTHS) -> int:
    """Run both parts; progress goes to standard error, the result to standard output; return the exit status.

    Raises:
        CheckpointUnavailableError: the model is not installed.
        DemoFailedError: a process failed; the message holds its last words.
    """
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    say(f"preparing {checkpoint.MODEL_NAME} (converted once, then kept)")
    folder = checkpoint.prepare()
    with tempfile.TemporaryDirectory(prefix="kvbridge-demo-") as directory, _bridge(directory, say) as target:
        outcome = _hand_over(target, folder, lengths, say)
    print(json.dumps(asdict(outcome)) if as_json else _table(outcome))
    return 0 if outcome.succeeded else 1


def _hand_over(target: str, folder: Path, lengths: Sequence[int], say: Callable[[str], None]) -> Outcome:
    compared: list[dict[str, Any]] = []
    fallback: dict[str, Any] = {}
    for role in ("producer", "consumer", "drifted-consumer"):
        say(f"starting {role}")
        for event in _events(role, target, folder, lengths):
            say(_told(role, event))
            if event["event"] == "compared":
                compared.append(event)
            if event["event"] == "fell_back":
                fallback = event
    longest = max(compared, key=lambda event: int(event["tokens"]))
    return Outcome(
        identical_tokens=longest["identical_tokens"],
        compared_tokens=longest["compared_tokens"],
        lengths=tuple(_length(event) for event in compared),
        fallback=FallBack(reason=fallback["reason"], answer_correct=fallback["answer_correct"]),
    )


def _length(event: dict[str, Any]) -> Length:
    return Length(
        tokens=event["tokens"],
        bytes=event["bytes"],
        ttft_text_seconds=event["ttft_text_seconds"],
        ttft_cache_seconds=event["ttft_cache_seconds"],
        speedup=event["ttft_text_seconds"] / event["ttft_cache_seconds"],
    )


def _told(role: str, event: dict[str, Any]) -> str:
    match event["event"]:
        case "loaded":
            return f"{role}: loaded; weights digested in {event['tag_seconds']:.2f} s: {event['revision']}"
        case "published":
            return (
                f"{role}: prefilled {event['tokens']} tokens in {event['prefill_seconds']:.2f} s, "
                f"published in {event['publish_seconds'] * 1e3:.0f} ms"
            )
        case "compared":
            return (
                f"{role}: first token after {event['tokens']} tokens: {event['ttft_text_seconds']:.2f} s from text, "
                f"{event['ttft_cache_seconds']:.3f} s from the cache"
            )
        case _:
            return f"{role}: took the text because of {event['reason']} ({event['detail']})"


def _table(outcome: Outcome) -> str:
    rows = [_row(row) for row in outcome.lengths]
    verdict = "correct" if outcome.fallback.answer_correct else "WRONG"
    return "\n".join(
        [
            "",
            f"{'':8}{'':12}{'time to first token in seconds':>28}",
            f"{'tokens':>8}{'MB handed':>12}{'from text':>14}{'from cache':>14}{'speed-up':>12}",
            *rows,
            "",
            f"Greedy tokens identical to a full prefill: {outcome.identical_tokens} of {outcome.compared_tokens}.",
            f"Another checkpoint version got the text ({outcome.fallback.reason}); its answer is {verdict}.",
        ]
    )


def _row(row: Length) -> str:
    seconds = f"{row.ttft_text_seconds:>14.3f}{row.ttft_cache_seconds:>14.3f}"
    return f"{row.tokens:>8,}{row.bytes / 1e6:>12.1f}{seconds}{row.speedup:>11.1f}x"


def _events(role: str, target: str, folder: Path, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Run one process of the demo to its end and yield what it tells."""
    command = [sys.executable, "-m", "kvbridge.demo.roles", role, "--target", target, "--checkpoint", str(folder)]
    command += ["--lengths", *(str(length) for length in lengths)]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, env=environment)  # noqa: S603
        try:
            assert process.stdout is not None
            yield from (event for event in map(parse, process.stdout) if event is not None)
            if process.wait(STOP_SECONDS_MAX):
                words.seek(0)
                raise DemoFailedError(
                    f"the {role} ended with status {process.returncode}:\n{words.read()[-2000:].strip()}"
                )
        finally:
            process.kill()
            process.wait()


@contextmanager
def _bridge(directory: str, say: Callable[[str], None]) -> Iterator[str]:
    """Run a bridge in a process of its own and yield its gRPC target."""
    target = f"unix:{directory}/bridge.sock"
    command = [sys.executable, "-m", "kvbridge", "serve", "--socket", f"{directory}/bridge.sock", "--listen", ""]
    command += ["--metrics-listen", ""]
    command += ["--arena-bytes", str(ARENA_BYTES), "--drain-seconds", "1"]
    with Path(directory, "bridge.log").open("w+") as log:
        process = subprocess.Popen(command, stderr=log)  # noqa: S603 - our own command
        try:
            say(f"starting a bridge with {ARENA_BYTES >> 20} MiB of memory")
            _wait_until_serving(target, process, Path(log.name))
            yield target
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_serving(target: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + START_SECONDS_MAX
    while process.poll() is None and time.monotonic() < ends_at:
        with grpc.insecure_channel(target) as channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                time.sleep(_POLL_SECONDS)
            else:
                return
    raise DemoFailedError(f"the bridge does not serve:\n{log.read_text()[-2000:]}")
