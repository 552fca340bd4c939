"""The breaker: a sliding window of outcomes, a table of states, and trials.

1. **Time.** Every method that can change anything takes `now`, which must never go back, and first does what is due:
   outcomes leave the window, an open breaker becomes half-open, lost trials are given up. Nothing happens between
   calls, so a change carries the time of the call that found it due.
2. **Tripping.** A closed breaker trips as soon as the window holds enough samples and too large a share of them is bad,
   be it because a bad one came or because good ones left the window.
3. **Trials.** An open breaker waits, then lets a few handoffs through. One bad trial opens it again, for twice as long
   each time, up to a limit; enough good ones in a row close it. It then starts with an empty window: what was counted
   before would trip it again at once, although the trials have shown that it no longer holds.
4. **Lost outcomes.** A trial whose outcome does not come is given up and counts neither way. A good outcome that comes
   later earns nothing if no trial is in flight; a bad one opens the breaker again all the same. Outcomes do not say
   which trial they are of, so each ends the one that has been in flight for longest.
"""

from __future__ import annotations

import math
from collections import deque

from kvbridge.core.breaker.policy import BreakerPolicy
from kvbridge.core.breaker.records import Admission, AdmissionKind, BreakerChange, BreakerSnapshot
from kvbridge.core.breaker.states import BreakerEvent, BreakerState, next_state
from kvbridge.core.breaker.window import BadOutcome, OutcomeWindow

OPEN_FACTOR_MAX = 16
"""By how much bad trials lengthen the open time at most."""
CHANGES_MAX = 64
"""Changes that wait to be taken; beyond it the oldest is dropped, for the newest tells the state."""


class Breaker:
    """The breaker of one route. Not thread-safe: its owner serialises the calls."""

    def __init__(self, policy: BreakerPolicy) -> None:
        """Start closed, with nothing counted."""
        self._policy = policy
        self._window = OutcomeWindow(policy.window_seconds)
        self._state = BreakerState.CLOSED
        self._now = self._since = -math.inf
        self._tripped_samples = self._tripped_bad = 0
        self._open_factor = 1
        self._trials_good = 0
        self._trials_in_flight: deque[float] = deque()  # when each began, the oldest first
        self._changes: deque[BreakerChange] = deque(maxlen=CHANGES_MAX)

    def __repr__(self) -> str:
        """Show the state and the figures behind it."""
        return (
            f"<Breaker {self._state}, {self._bad} of {self._window.samples} handoffs bad, {self._trials_good} of "
            f"{self._policy.trials} trials good, {len(self._trials_in_flight)} in flight>"
        )

    @property
    def policy(self) -> BreakerPolicy:
        """Return the policy in force."""
        return self._policy

    @property
    def state(self) -> BreakerState:
        """Return the state as of the last call that told the time."""
        return self._state

    def admit(self, now: float) -> Admission:
        """Say whether a handoff may take this route now; one that may as a trial counts as in flight from now on."""
        self._advance(now)
        if self._state is BreakerState.CLOSED:
            return self._admission(AdmissionKind.ALLOWED, self._bad, self._window.samples)
        kind = AdmissionKind.TRIAL if self._trial_is_free() else AdmissionKind.REFUSED
        if kind is AdmissionKind.TRIAL:
            self._trials_in_flight.append(now)
        return self._admission(kind, self._tripped_bad, self._tripped_samples)

    def record_good(self, now: float, *, trial: bool) -> None:
        """Count a handoff that went well; `trial` says that it was admitted as one."""
        self._advance(now)
        self._window.add(now, None)
        if trial and self._state is BreakerState.HALF_OPEN and self._trials_in_flight:
            self._trials_in_flight.popleft()
            self._trials_good += 1
        self._decide()

    def record_bad(self, now: float, outcome: BadOutcome, *, trial: bool, was_good: bool = False) -> None:
        """Count a handoff that turned out bad; `trial` says that it was admitted as one.

        `was_good` says that it was counted as a good one before, which it is no longer.
        """
        self._advance(now)
        if was_good:
            self._window.turn_bad(now, outcome)
        else:
            self._window.add(now, outcome)
        if trial and self._state is BreakerState.HALF_OPEN:
            self._open_factor = min(2 * self._open_factor, OPEN_FACTOR_MAX)
            self._change(BreakerEvent.TRIAL_BAD, f"a trial was bad: {outcome}; text for {self._open_seconds:g} s")
        self._decide()

    def abandon_trial(self, now: float) -> None:
        """Make room for another trial in place of one whose handoff did not take place for a reason of its own."""
        self._advance(now)
        if self._trials_in_flight:
            self._trials_in_flight.popleft()

    def replace_policy(self, now: float, policy: BreakerPolicy) -> None:
        """Follow another policy from now on, and keep the window, the state and the trials."""
        self._advance(now)
        if policy.window_seconds != self._policy.window_seconds:
            self._window.resize(now, policy.window_seconds)
        self._policy = policy
        self._advance(now)

    def take_changes(self) -> list[BreakerChange]:
        """Return the changes of state since the last call of this method, the oldest first."""
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def snapshot(self) -> BreakerSnapshot:
        """Return the figures as of the last call that told the time."""
        return BreakerSnapshot(
            state=self._state,
            since=self._since if math.isfinite(self._since) else None,
            samples=self._window.samples,
            bad=self._window.bad,
            tripped_samples=self._tripped_samples,
            tripped_bad=self._tripped_bad,
            retry_at=self._since + self._open_seconds if self._state is BreakerState.OPEN else None,
            trials_good=self._trials_good,
            trials_in_flight=len(self._trials_in_flight),
        )

    @property
    def _bad(self) -> int:
        return self._window.bad_samples

    @property
    def _open_seconds(self) -> float:
        return self._policy.open_seconds * self._open_factor

    def _advance(self, now: float) -> None:
        """Do what is due."""
        assert math.isfinite(now), now
        assert now >= self._now, (now, self._now)
        self._now = now
        if self._since == -math.inf:
            self._since = now
        self._window.advance(now)
        while self._trials_in_flight and self._trials_in_flight[0] + self._policy.open_seconds <= now:
            self._trials_in_flight.popleft()
        if self._state is BreakerState.OPEN and self._since + self._open_seconds <= now:
            self._change(BreakerEvent.WAIT_OVER, f"open for {self._open_seconds:g} s; the next handoffs are trials")
        self._decide()

    def _decide(self) -> None:
        """Trip or close if the figures say so."""
        if self._state is BreakerState.CLOSED and self._is_too_bad():
            self._trip()
        elif self._state is BreakerState.HALF_OPEN and self._trials_good >= self._policy.trials:
            self._close()

    def _is_too_bad(self) -> bool:
        samples = self._window.samples
        return samples >= self._policy.samples_min and self._bad / samples > self._policy.bad_share_max

    def _trip(self) -> None:
        self._tripped_samples, self._tripped_bad = self._window.samples, self._bad
        kinds = ", ".join(f"{outcome} {count}" for outcome, count in self._window.bad.items())
        self._change(
            BreakerEvent.TRIP,
            f"{self._tripped_bad} of {self._tripped_samples} handoffs were bad ({kinds}), a share over "
            f"{self._policy.bad_share_max:g}; text for {self._open_seconds:g} s",
        )

    def _close(self) -> None:
        self._open_factor = 1
        self._tripped_samples = self._tripped_bad = 0
        self._window.clear()
        self._change(BreakerEvent.TRIALS_GOOD, f"{self._trials_good} trials in a row were good")

    def _change(self, event: BreakerEvent, detail: str) -> None:
        before, self._state = self._state, next_state(self._state, event)
        self._since = self._now
        self._trials_good = 0
        self._trials_in_flight.clear()
        self._changes.append(BreakerChange(now=self._now, before=before, after=self._state, detail=detail))

    def _trial_is_free(self) -> bool:
        in_flight = len(self._trials_in_flight)
        return self._state is BreakerState.HALF_OPEN and in_flight < self._policy.trials_in_flight_max

    def _admission(self, kind: AdmissionKind, bad: int, samples: int) -> Admission:
        return Admission(
            kind=kind,
            bad_share=bad / samples if samples else 0.0,
            samples=samples,
            retry_after_seconds=self._retry_after_seconds() if kind is AdmissionKind.REFUSED else 0.0,
        )

    def _retry_after_seconds(self) -> float:
        if self._state is BreakerState.OPEN:
            return self._since + self._open_seconds - self._now
        surplus = len(self._trials_in_flight) - self._policy.trials_in_flight_max
        return self._trials_in_flight[surplus] + self._policy.open_seconds - self._now
