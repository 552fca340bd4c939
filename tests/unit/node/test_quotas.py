"""What a tenant's calls are refused for, and what follows when its quota changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from kvbridge.config import BridgeConfig
from kvbridge.core.access import TenantQuota
from kvbridge.core.errors import BridgeError, LimitExceededError, MemoryExhaustedError, TooManyRequestsError
from kvbridge.core.ledger.limits import LedgerLimits
from kvbridge.node.quotas import TENANT_LIMITS, Quotas, Weight
from kvbridge.node.tenancy import Tenancy, new_tenancy

CONFIG = BridgeConfig(arena_bytes=1 << 20, pretouch=False, huge_pages=False, concurrent_calls_max=16)
TENANTS = ("a", "b")


class Hall:
    """Two tenants, their quotas, and a clock that tests turn."""

    def __init__(self) -> None:
        """Open at time 0 without any quota of their own."""
        names = count()
        self.now = 0.0
        self.file: dict[str, TenantQuota] = {}
        self.tenancies = {tenant: self._tenancy(tenant, lambda: str(next(names))) for tenant in TENANTS}
        self.quotas = Quotas(CONFIG, self.tenancies, quotas=lambda: self.file, clock=lambda: self.now)

    def _tenancy(self, tenant: str, new_token: object) -> Tenancy:
        return new_tenancy(CONFIG, tenant=tenant, quota=TenantQuota(), epoch=1, new_token=new_token)  # type: ignore[arg-type]

    def change(self, tenant: str, **limits: float) -> None:
        """Give a tenant another quota."""
        self.file = {**self.file, tenant: TenantQuota(**limits)}  # type: ignore[arg-type]
        self.quotas.apply()

    def call(self, tenant: str, weight: Weight = Weight.ORDINARY) -> None:
        """Make a call that is answered at once."""
        with self.quotas.admitted(tenant, weight):
            pass

    def calls_at_once(self, stack: ExitStack, tenant: str, weight: Weight, calls_max: int = 100) -> int:
        """Begin calls until one is refused, or so many, and return how many are under way."""
        for number in range(calls_max):
            try:
                stack.enter_context(self.quotas.admitted(tenant, weight))
            except TooManyRequestsError:
                return number
        return calls_max

    def refusals(self, tenant: str) -> dict[str, int]:
        """Return what calls of a tenant were refused for."""
        [sample] = [sample for sample in self.quotas.samples() if sample.tenant == tenant]
        return {limit: number for limit, number in sample.refusals.items() if number}

    def level(self, tenant: str, limit: str) -> tuple[float, float]:
        """Return use and limit."""
        [sample] = [sample for sample in self.quotas.samples() if sample.tenant == tenant]
        return sample.levels[limit].used, sample.levels[limit].limit


@pytest.fixture
def hall() -> Iterator[Hall]:
    """Open a hall for one test."""
    opened = Hall()
    yield opened
    for tenancy in opened.tenancies.values():
        tenancy.close()


def test_without_a_rate_nobody_is_counted_out(hall: Hall) -> None:
    """As many calls as come, one after the other."""
    for _ in range(1000):
        hall.call("a")
    assert hall.refusals("a") == {}


def test_above_its_rate_a_tenant_is_refused_and_nobody_else(hall: Hall) -> None:
    """It is told when the next call will be taken."""
    hall.change("a", requests_per_second=2.0, requests_burst=3)
    for _ in range(3):
        hall.call("a")
    with pytest.raises(TooManyRequestsError, match="requests_per_second") as refusal:
        hall.call("a")
    assert refusal.value.retry_after_seconds == 0.5
    hall.call("b")
    hall.call("a", Weight.KEEPING)
    assert hall.level("a", "requests_per_second") == (3.0, 3.0)
    hall.now += 0.5
    hall.call("a")
    assert hall.refusals("a") == {"requests_per_second": 1}


def test_a_new_rate_holds_at_once_and_gives_nothing_away(hall: Hall) -> None:
    """A reload is no way to a fresh burst; a quota without a rate ends the counting."""
    hall.change("a", requests_per_second=1.0, requests_burst=1)
    hall.call("a")
    hall.change("a", requests_per_second=4.0, requests_burst=1)
    with pytest.raises(TooManyRequestsError) as refusal:
        hall.call("a")
    assert refusal.value.retry_after_seconds == 0.25
    hall.change("a")
    hall.call("a")


def test_calls_under_way_are_shared_evenly_and_some_are_kept_back(hall: Hall) -> None:
    """Of 16 calls at once each of two tenants has 7; what must not be refused still comes through."""
    with ExitStack() as stack:
        for _ in range(7):
            stack.enter_context(hall.quotas.admitted("a", Weight.ORDINARY))
        with pytest.raises(TooManyRequestsError, match="calls_max"):
            hall.call("a")
        stack.enter_context(hall.quotas.admitted("a", Weight.KEEPING))
        hall.call("b")
        assert (hall.level("a", "calls_max"), hall.quotas.calls) == ((7, 7), 8)
    assert (hall.level("a", "calls_max"), hall.quotas.calls) == ((0, 7), 0)
    hall.call("a")


@pytest.mark.parametrize("first", [Weight.ORDINARY, Weight.KEEPING])
def test_no_kind_of_call_takes_anybody_elses_room(hall: Hall, first: Weight) -> None:
    """What keeps a grant has a little room of its own and shares the rest; in whatever order, others have theirs."""
    second = Weight.KEEPING if first is Weight.ORDINARY else Weight.ORDINARY
    with ExitStack() as stack:
        begun = [hall.calls_at_once(stack, "a", weight) for weight in (first, second, first)]
        assert begun == ([7, 1, 0] if first is Weight.ORDINARY else [8, 0, 0])
        assert hall.calls_at_once(stack, "b", Weight.ORDINARY) == 7
        assert hall.calls_at_once(stack, "a", Weight.FREE) == 1
    assert hall.quotas.calls == 0


def test_beyond_all_calls_at_once_nobody_is_served(hall: Hall) -> None:
    """Whoever it is: of 16 there is none more."""
    with ExitStack() as stack:
        assert hall.calls_at_once(stack, "a", Weight.FREE) == 16
        for weight in Weight:
            with pytest.raises(TooManyRequestsError, match="concurrent_calls_max: the limit of 16"):
                hall.call("b", weight)
    assert hall.refusals("b") == {"concurrent_calls_max": 3}
    hall.call("b")


def test_answers_that_nobody_reads_take_their_tenants_places(hall: Hall) -> None:
    """But for a few that are on their way; they are counted out when they have left, and not before."""
    leaving: list[Callable[[object], None]] = []
    for _ in range(8):
        with hall.quotas.admitted("a", Weight.ORDINARY, until=leaving.append):
            pass
    assert (hall.level("a", "calls_max"), hall.quotas.calls) == ((7, 7), 8)
    with pytest.raises(TooManyRequestsError, match="calls_max"):
        hall.call("a")
    with ExitStack() as stack:
        assert hall.calls_at_once(stack, "b", Weight.ORDINARY) == 7
    for left in leaving:
        left(None)
    assert (hall.level("a", "calls_max"), hall.quotas.calls) == ((0, 7), 0)


def test_a_tenant_may_have_a_share_of_its_own(hall: Hall) -> None:
    """More or less than the even one."""
    hall.change("a", calls_max=1)
    with hall.quotas.admitted("a", Weight.ORDINARY), pytest.raises(TooManyRequestsError):
        hall.call("a")


@pytest.mark.parametrize(
    ("error", "counted_as"),
    [
        (LimitExceededError("payloads_max", 1), "payloads_max"),
        (LimitExceededError("orders_max", 1), "other"),
        (MemoryExhaustedError(2, 1, 1), "arena_bytes"),
    ],
)
def test_whatever_a_call_is_refused_for_is_counted(hall: Hall, error: BridgeError, counted_as: str) -> None:
    """Limits that are found out while it is answered, too."""
    with pytest.raises(type(error)), hall.quotas.admitted("a", Weight.FREE):
        raise error
    assert hall.refusals("a") == {counted_as: 1}
    assert hall.refusals("b") == {}


def test_counts_change_while_the_node_serves_and_memory_does_not(hall: Hall) -> None:
    """An arena cannot grow under its clients."""
    before = hall.level("a", "arena_bytes")
    hall.change("a", payloads_max=5, references_max=6, arena_bytes=1 << 30)
    assert (hall.level("a", "payloads_max"), hall.level("a", "references_max")) == ((0, 5), (0, 6))
    assert hall.level("a", "arena_bytes") == before
    hall.change("a")
    assert hall.level("a", "payloads_max") == (0, CONFIG.payloads_max)


def test_a_tenants_memory_is_its_own_quota() -> None:
    """What the quota does not say is as configured for each tenant."""
    quota = TenantQuota(arena_bytes=1 << 21, payloads_max=3)
    tenancy = new_tenancy(CONFIG, tenant="a", quota=quota, epoch=1, new_token=lambda: "t")
    try:
        with tenancy.ledger() as ledger:
            assert (ledger.usage().arena_bytes, tenancy.arena.size_bytes) == (1 << 21, 1 << 21)
            assert (ledger.limits.payloads_max, ledger.limits.references_max) == (3, CONFIG.references_max)
    finally:
        tenancy.close()


def test_every_limit_that_a_call_is_refused_for_is_documented() -> None:
    """Whoever reads the name of one in a refusal or a metric finds it, with its default."""
    page = (Path(__file__).parents[3] / "docs" / "quotas.md").read_text(encoding="utf-8")
    assert [name for name in TENANT_LIMITS if f"`{name}`" not in page] == []
    [row] = [line for line in page.splitlines() if line.startswith("| `payload_text_bytes_max`")]
    assert row.endswith(f"| {LedgerLimits().payload_text_bytes_max >> 20} MiB |")
