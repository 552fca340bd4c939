"""Named places where the world may strike: crash whoever is there, cancel the call that led there, or hold it up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Action(StrEnum):
    """What may happen at a failpoint."""

    CRASH = "crash"
    """The node, or the client at a client's failpoint, is gone from one step to the next."""
    CANCEL = "cancel"
    """Whoever waits for the call that led here gives up."""
    DELAY = "delay"
    """Everything else goes on for a while first."""


@unique
class Failpoint(StrEnum):
    """Every place."""

    CALL_ARRIVED = "call.arrived"
    """A node has received a reserve, an upload, an abort or a release."""
    CALL_ANSWERED = "call.answered"
    """The answer to a reserve, an abort or a release is under way."""
    ACQUIRE_ARRIVED = "acquire.arrived"
    """A node has received an acquire."""
    ACQUIRE_ANSWERED = "acquire.answered"
    """The answer to an acquire is under way."""
    COMMIT_ARRIVED = "commit.arrived"
    """A node has received a commit."""
    COMMIT_ANSWERED = "commit.answered"
    """The answer to a commit is under way."""
    UPLOAD_CHUNK = "upload.chunk"
    """A chunk of an upload is under way."""
    DOWNLOAD_CHUNK = "download.chunk"
    """A chunk of a download is under way."""
    VERIFY_BEGIN = "verify.begin"
    """A check of bytes is about to begin."""
    VERIFY_READ = "verify.read"
    """A thread is about to read the bytes."""
    VERIFY_END = "verify.end"
    """A check of bytes has ended, and nobody has heard yet."""
    BACKGROUND_BEGIN = "background.begin"
    """Work that outlives its caller is about to begin."""
    OPEN_REQUEST = "open.request"
    """A node's request for another node's payload is under way."""
    OPEN_ANSWER = "open.answer"
    """The owner has leased it, and its answer is under way."""
    PULL_BEGIN = "pull.begin"
    """A node's request for the bytes is under way."""
    PULL_CHUNK = "pull.chunk"
    """A chunk between nodes is under way."""
    PULL_END = "pull.end"
    """All bytes have arrived."""
    RENEW_REQUEST = "renew.request"
    """A node's renewal of a lease at another node is under way."""
    RELEASE_REQUEST = "release.request"
    """A node's return of a lease at another node is under way."""
    PING_REQUEST = "ping.request"
    """A node asks another one whether it has started again."""
    RESERVE_ANSWERED = "reserve.answered"
    """A producer has a slot and has not written yet."""
    WRITE_MIDDLE = "write.middle"
    """A producer has written half of a slot."""
    READ_MIDDLE = "read.middle"
    """A consumer has read half of a slot."""
    RENEW_ASKED = "renew.asked"
    """A client is about to renew."""
    RELEASE_ASKED = "release.asked"
    """A client is about to release."""
    QUARANTINE_ASKED = "quarantine.asked"
    """Somebody is about to impose a quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One thing that must happen in a run."""

    failpoint: Failpoint
    """Where."""
    action: Action
    """What."""
    visit: int = 1
    """At which visit to the failpoint, counted from 1."""


class Failpoints:
    """Decides what happens where."""

    def __init__(self, seed: str, *, share: float, strike: Strike | None = None) -> None:
        """Strike at a `share` of all visits, and for certain at `strike`."""
        self.fired: Counter[tuple[Failpoint, Action]] = Counter()
        """How often what happened where."""
        self._visits: Counter[Failpoint] = Counter()
        self._chance = random.Random(f"{seed} failpoints")
        self._share = share
        self._strike = strike
        self.enabled = True
        """Whether anything may happen any more."""

    async def reach(self, failpoint: Failpoint, *, crash: Callable[[], None], cancel: Callable[[], None]) -> None:
        """Let happen what is to happen here; `crash` and `cancel` do it to whoever is here."""
        self._visits[failpoint] += 1
        action = self._drawn(failpoint)
        if action is None:
            return
        self.fired[failpoint, action] += 1
        if action is Action.DELAY:
            await asyncio.sleep(self._chance.choice((0.0, 0.01, 0.3, 1.5, 7.0)))
            return
        (crash if action is Action.CRASH else cancel)()
        await asyncio.sleep(0)

    def _drawn(self, failpoint: Failpoint) -> Action | None:
        if not self.enabled:
            return None
        strike = self._strike
        if strike is not None and strike.failpoint is failpoint and self._visits[failpoint] == strike.visit:
            return strike.action
        if self._chance.random() >= self._share:
            return None
        # Crashes take everything along that other strikes would meet, so they are rarer.
        return self._chance.choices((Action.CRASH, Action.CANCEL, Action.DELAY), (1, 4, 4))[0]
