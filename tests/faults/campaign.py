"""Many faults under load: `python -m tests.faults.campaign --kills 200` or `--restarts 20`.

1. Clients that share memory and clients by value publish, ask and judge every byte all the time (`load.py`).
2. `--kills` starts further clients meanwhile, drives each as far as a stage that the seed chooses, and kills it there.
   `--restarts` kills the bridge itself at moments that the seed chooses, and starts it again at the same addresses.
3. Afterwards everybody who lives says what it did and goes. No wrong byte was accepted, every call has ended, the last
   publication of each was taken, and the memory is as it was at the start; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any

from kvbridge import Bridge, connect
from tests.faults import contents
from tests.faults.crew import PATIENCE_SECONDS, Victim, memory, restart
from tests.faults.load import TIMEOUT_SECONDS
from tests.faults.test_clients import CONSUMER_STAGES, PRODUCER_STAGES, Stage
from tests.harness import BridgeProcess, running_bridge, wait_for

TTL_SECONDS = 3.0
"""How long references last here."""
ARENA_BYTES = 512 << 20
"""Room for whatever the load and the doomed publish at once."""
LOADERS = (("local", False), ("local", False), ("by value", True))
"""Who works all the time, and whether by value."""
LATE_SECONDS_MAX = 4 * TIMEOUT_SECONDS
"""A call that took longer than this hung, however busy the machine is."""
STAGES: tuple[Stage, ...] = (*PRODUCER_STAGES, *CONSUMER_STAGES)
_AT_ONCE = 3
_KEYS = [f"load/{number}" for number in range(6)]
_PAUSES_SECONDS = (0.3, 1.5)
_SEED_BITS = 32


@dataclass(slots=True, kw_only=True)
class Findings:
    """What a campaign has found."""

    seed: int
    """What decided it."""
    kills: Counter[str] = field(default_factory=Counter)
    """Kills by stage, or of the bridge."""
    published: int = 0
    """Payloads that the load published."""
    handoffs: int = 0
    """Handoffs of the load that were answered, with the cache or with the text."""
    accepted: int = 0
    """Those of which the cache was accepted."""
    bytes_verified: int = 0
    """Bytes that were accepted and compared."""
    wrong: int = 0
    """Clients that accepted a wrong byte or met an error that no client may meet; each ends with its traceback."""
    leaked_bytes: int = 0
    """Bytes of memory that did not come back within the TTL and some patience."""
    hung: int = 0
    """Clients that did not come to an end, or had a call that took far longer than it may."""
    not_served: int = 0
    """Clients that could not publish at the very end."""
    call_seconds_max: float = 0.0
    """The longest call of the load."""
    back_seconds: list[float] = field(default_factory=list)
    """From each kill of the bridge to the next cache that a client accepted."""
    seconds: float = 0.0
    """How long it all took."""

    @property
    def violations(self) -> int:
        """Count everything that must not be."""
        return self.wrong + self.hung + self.not_served + (self.leaked_bytes > 0)


class _Loaders:
    """The clients that work all the time."""

    def __init__(self, stack: ExitStack, bridge: BridgeProcess, seed: int) -> None:
        self._victims = [
            Victim("load", "working", bridge, by_value=by_value, seed=seed % 1000 + number, keys=_KEYS)
            for number, (_, by_value) in enumerate(LOADERS)
        ]
        for victim in self._victims:
            stack.callback(victim.end)
        for victim in self._victims:
            with victim.reached():
                pass

    def finish(self, findings: Findings) -> None:
        """Let them end, and add what they did."""
        for victim in self._victims:
            victim.go_on()
        with ThreadPoolExecutor(len(self._victims)) as pool:
            for victim, done in zip(self._victims, pool.map(_outcome, self._victims), strict=True):
                if done is None:
                    findings.wrong += not victim.hung
                    findings.hung += victim.hung
                else:
                    _add(findings, done)


def _outcome(victim: Victim) -> dict[str, Any] | None:
    """Return what a client did; None if it hangs, and is killed for that, or has ended with an error."""
    guard = threading.Timer(PATIENCE_SECONDS, victim.give_up)
    guard.start()
    try:
        return victim.outcome()
    except AssertionError:
        return None
    finally:
        guard.cancel()


def _add(findings: Findings, done: dict[str, Any]) -> None:
    findings.published += done["published"]
    findings.handoffs += done["accepted"] + done["text"]
    findings.accepted += done["accepted"]
    findings.bytes_verified += done["bytes_verified"]
    findings.call_seconds_max = max(findings.call_seconds_max, done["seconds_max"])
    findings.hung += done["seconds_max"] > LATE_SECONDS_MAX
    findings.not_served += not done["last_published"]


@contextmanager
def _under_load(findings: Findings) -> Iterator[BridgeProcess]:
    """Run a bridge under load, and look at what is left of everything at the end."""
    began_at = time.monotonic()
    ttl = str(TTL_SECONDS)
    with ExitStack() as stack:
        flags = ("--lease-ttl-seconds", ttl, "--reservation-ttl-seconds", ttl, "--arena-bytes", str(ARENA_BYTES))
        bridge = stack.enter_context(running_bridge(*flags))
        with connect(bridge.target) as onlooker:
            base = memory(onlooker)
        loaders = _Loaders(stack, bridge, findings.seed)
        yield bridge
        loaders.finish(findings)
        with connect(bridge.target) as onlooker:
            findings.leaked_bytes = _leaked(onlooker, base)
    findings.seconds = time.monotonic() - began_at


def _leaked(onlooker: Bridge, base: tuple[int, ...]) -> int:
    try:
        wait_for(lambda: memory(onlooker) == base, PATIENCE_SECONDS)
    except AssertionError:
        return max(base[0] - memory(onlooker)[0], 1)
    return 0


# Kills of clients


def kill_clients(kills: int, seed: int) -> Findings:
    """Kill clients at stages that the seed chooses, a few at once."""
    findings, draw = Findings(seed=seed), random.Random(seed)
    with _under_load(findings) as bridge, connect(bridge.target) as producer, ThreadPoolExecutor(_AT_ONCE) as pool:
        doomed = [(number, draw.choice(STAGES)) for number in range(kills)]
        for stage in pool.map(lambda each: _kill_one(bridge, producer, *each), doomed):
            findings.kills[str(stage)] += 1
    return findings


def _kill_one(bridge: BridgeProcess, producer: Bridge, number: int, stage: Stage) -> Stage:
    """Drive one client as far as its stage, and kill it; in some the bridge stands still for that moment."""
    key = f"killed/{number}"
    slot = contents.publish(producer, key, 1, tokens=stage.who["tokens"]) if stage.consumes else None
    victim = Victim(bridge=bridge, key=key, **stage.who)
    try:
        with victim.reached():
            victim.kill()
    finally:
        victim.end()
        if slot is not None:
            slot.release()
    contents.ask_and_read(producer, key)
    return stage


# Kills of the bridge


def restart_bridge(restarts: int, seed: int) -> Findings:
    """Kill the bridge and start it again, at moments that the seed chooses."""
    findings, draw = Findings(seed=seed), random.Random(seed)
    with _under_load(findings) as bridge, connect(bridge.target) as client:
        for number in range(restarts):
            time.sleep(draw.uniform(*_PAUSES_SECONDS))
            killed_at = time.monotonic()
            restart(bridge)
            findings.kills["bridge"] += 1
            wait_for(partial(_served, client, f"back/{number}"), PATIENCE_SECONDS)
            findings.back_seconds.append(time.monotonic() - killed_at)
    return findings


def _served(client: Bridge, key: str) -> bool:
    """Publish something, take it and give it back."""
    slot = contents.publish(client, key, 1)
    accepted = contents.ask_and_read(client, key).accepted
    slot.release()
    return accepted


# Telling


def table(findings: Findings) -> str:
    """Return everything in lines."""
    back, kills = findings.back_seconds, findings.kills
    told = {each.name: getattr(findings, each.name) for each in fields(findings)}
    rows: list[tuple[str, int | float]] = [("kills", sum(kills.values()))]
    rows += [(f"  {name}", count) for name, count in sorted(kills.items())]
    rows += [(name.replace("_", " "), value) for name, value in told.items() if isinstance(value, int | float)]
    if back:
        rows += [("seconds to come back, median", median(back)), ("seconds to come back, max", max(back))]
    rows.append(("violations", findings.violations))
    return "\n".join(f"{name:32} {value:>14{'.2f' if isinstance(value, float) else ''}}" for name, value in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if anything was found that must not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.campaign", description=__doc__)
    parser.add_argument("--kills", type=int, default=0, help="how many clients to kill")
    parser.add_argument("--restarts", type=int, default=0, help="how often to kill the bridge and start it again")
    parser.add_argument("--seed", type=int, help="what decides stages and moments (default: another one each time)")
    asked = parser.parse_args(arguments)
    seed = secrets.randbits(_SEED_BITS) if asked.seed is None else asked.seed
    found = 0
    for count, campaign in ((asked.kills, kill_clients), (asked.restarts, restart_bridge)):
        if count:
            print(f"seed {seed}", flush=True)  # noqa: T201 - people read it
            findings = campaign(count, seed)
            print(table(findings), flush=True)  # noqa: T201 - people read it
            found += findings.violations
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
