"""The breaker against a naive model that keeps every outcome and every trial."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.breaker import AdmissionKind, BadOutcome, Breaker, BreakerPolicy, BreakerState

WINDOW = 12  # One second is one bucket, so that the window of a list of whole seconds is the breaker's own.
POLICY = BreakerPolicy(
    window_seconds=float(WINDOW), bad_share_max=0.3, samples_min=3, open_seconds=4.0, trials=3, trials_in_flight_max=2
)
S = BreakerState


class Model:
    """A breaker that says what should happen by looking through all it ever saw."""

    def __init__(self) -> None:
        self.policy = POLICY
        self.outcomes: list[tuple[int, bool]] = []  # when, and whether bad; since the breaker last closed
        self.state = S.CLOSED
        self.opened, self.bad_rounds = 0, 0
        self.in_flight: list[int] = []
        self.good = 0
        self.tripped = (0, 0)
        self.changes: list[tuple[float, BreakerState]] = []

    def figures(self, now: int) -> tuple[int, int]:
        recent = [bad for time, bad in self.outcomes if now - time < WINDOW]
        return sum(recent), len(recent)

    def enter(self, state: BreakerState, now: int) -> None:
        self.state, self.good, self.in_flight = state, 0, []
        self.changes.append((now, state))

    def due(self, now: int) -> None:
        self.in_flight = [begun for begun in self.in_flight if now - begun < self.policy.open_seconds]
        wait = self.policy.open_seconds * 2 ** min(self.bad_rounds, 4)
        if self.state is S.OPEN and now - self.opened >= wait:
            self.enter(S.HALF_OPEN, now)
        bad, samples = self.figures(now)
        enough = samples >= self.policy.samples_min
        if self.state is S.CLOSED and enough and bad / samples > self.policy.bad_share_max:
            self.tripped, self.opened = (bad, samples), now
            self.enter(S.OPEN, now)
        elif self.state is S.HALF_OPEN and self.good >= self.policy.trials:
            self.outcomes, self.bad_rounds, self.tripped = [], 0, (0, 0)
            self.enter(S.CLOSED, now)

    def admit(self, now: int) -> AdmissionKind:
        self.due(now)
        if self.state is S.CLOSED:
            return AdmissionKind.ALLOWED
        if self.state is S.OPEN or len(self.in_flight) >= self.policy.trials_in_flight_max:
            return AdmissionKind.REFUSED
        self.in_flight.append(now)
        return AdmissionKind.TRIAL

    def record(self, now: int, bad: bool, trial: bool, was_good: bool = False) -> None:
        self.due(now)
        good = [index for index, (time, was_bad) in enumerate(self.outcomes) if not was_bad and now - time < WINDOW]
        if was_good and good:
            del self.outcomes[good[-1]]
        self.outcomes.append((now, bad))
        if trial and self.state is S.HALF_OPEN and bad:
            self.bad_rounds, self.opened = self.bad_rounds + 1, now
            self.enter(S.OPEN, now)
        elif trial and self.state is S.HALF_OPEN and self.in_flight:
            self.in_flight.pop(0)
            self.good += 1
        self.due(now)


class BreakerMachine(RuleBasedStateMachine):
    """Drives a breaker and the model through whole seconds."""

    def __init__(self) -> None:
        """Start both closed."""
        super().__init__()
        self.breaker, self.model, self.now = Breaker(POLICY), Model(), 0
        self.changes: list[tuple[float, BreakerState]] = []

    @rule(seconds=st.integers(min_value=1, max_value=6) | st.just(64))
    def wait(self, seconds: int) -> None:
        """Let time pass; nobody notices before the next call."""
        self.now += seconds

    @rule()
    def admit(self) -> None:
        """Ask for a handoff; the answers agree, and a refusal's wait is right for an open breaker."""
        answer = self.breaker.admit(self.now)
        assert answer.kind is self.model.admit(self.now)
        closed = self.model.state is S.CLOSED
        bad, samples = self.model.figures(self.now) if closed else self.model.tripped
        assert (answer.bad_share, answer.samples) == (bad / samples if samples else 0.0, samples)
        assert (answer.retry_after_seconds > 0) is (answer.kind is AdmissionKind.REFUSED)

    @rule(trial=st.booleans())
    def good(self, trial: bool) -> None:
        """Record a good handoff, perhaps as a trial that there never was."""
        self.breaker.record_good(self.now, trial=trial)
        self.model.record(self.now, bad=False, trial=trial)

    @rule(outcome=st.sampled_from(BadOutcome), trial=st.booleans(), was_good=st.booleans())
    def bad(self, outcome: BadOutcome, trial: bool, was_good: bool) -> None:
        """Record a bad handoff, perhaps one that was counted as good before."""
        self.breaker.record_bad(self.now, outcome, trial=trial, was_good=was_good)
        self.model.record(self.now, bad=True, trial=trial, was_good=was_good)

    @rule()
    def pass_all_trials(self) -> None:
        """Wait until an open breaker tries again and let every trial succeed: a path that chance rarely takes."""
        self.now += 64
        for _ in range(self.model.policy.trials):
            self.admit()
            self.good(trial=True)

    @rule()
    def abandon(self) -> None:
        """Give a trial back."""
        self.breaker.abandon_trial(self.now)
        self.model.due(self.now)
        self.model.in_flight = self.model.in_flight[1:]

    @rule(
        samples_min=st.integers(min_value=1, max_value=6),
        share=st.sampled_from([0.05, 0.3, 0.75, 1.0]),
        open_seconds=st.sampled_from([1.0, 4.0, 9.0]),
        trials=st.integers(min_value=1, max_value=4),
        in_flight=st.integers(min_value=1, max_value=3),
    )
    def replace_policy(self, samples_min: int, share: float, open_seconds: float, trials: int, in_flight: int) -> None:
        """Change everything but the window's length."""
        policy = replace(
            POLICY,
            samples_min=samples_min,
            bad_share_max=share,
            open_seconds=open_seconds,
            trials=trials,
            trials_in_flight_max=in_flight,
        )
        self.breaker.replace_policy(self.now, policy)
        self.model.due(self.now)
        self.model.policy = policy
        self.model.due(self.now)

    @invariant()
    def both_agree(self) -> None:
        """State, trials and every change are the model's."""
        snapshot = self.breaker.snapshot()
        assert snapshot.state is self.model.state
        assert (snapshot.trials_good, snapshot.trials_in_flight) == (self.model.good, len(self.model.in_flight))
        self.changes += [(change.now, change.after) for change in self.breaker.take_changes()]
        assert self.changes == self.model.changes

    def teardown(self) -> None:
        """Whatever happened, good trials alone bring the breaker back: it is never wedged."""
        for _ in range(2 * self.model.policy.trials + 2):
            self.now += 200
            if self.breaker.admit(self.now).kind is AdmissionKind.TRIAL:
                self.breaker.record_good(self.now, trial=True)
        assert self.breaker.state is S.CLOSED


TestBreaker = BreakerMachine.TestCase
TestBreaker.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
