"""What each tenant may use of the node, beside its memory: calls per second, and calls under way at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto, unique
from functools import partial
from typing import Any, TypeAlias

from kvbridge.config import BridgeConfig
from kvbridge.core.access import TenantQuota
from kvbridge.core.access.rate import TokenBucket
from kvbridge.core.errors import LimitExceededError, MemoryExhaustedError, TooManyRequestsError
from kvbridge.core.ledger import LedgerLimits, Usage
from kvbridge.node.tenancy import Tenancy
from kvbridge.observe.tenant_metrics import Level, TenantSample

Until: TypeAlias = Callable[[Callable[[Any], None]], None]
"""Takes what is to be called when something has ended, with whatever that is."""

_SHARED = 14 / 16
"""As much of all calls at once as the tenants share."""
_KEPT_BACK = 1 / 16
"""As much as they share for calls that end or keep what was granted, when they use up the rest."""
_LEAVING = 1 / 32
"""As much as they share for answers that are on their way; what is left of all is for nodes and administrators."""
_BUSY_RETRY_SECONDS = 1.0
NODE_LIMIT = "concurrent_calls_max"
RATE_LIMIT = "requests_per_second"
CALLS_LIMIT = "calls_max"
MEMORY_LIMIT = "arena_bytes"
TENANT_LIMITS = (
    MEMORY_LIMIT,
    "payloads_max",
    "references_max",
    "references_per_client_max",
    "payload_text_bytes_max",
    NODE_LIMIT,
    CALLS_LIMIT,
    RATE_LIMIT,
    "watches_max",
    "watches_per_client_max",
    "quarantines_max",
)
"""Limits that a tenant's calls are refused for; all others are counted as `other`."""
OTHER_LIMIT = "other"


@unique
class Weight(Enum):
    """What a call counts for."""

    ORDINARY = auto()
    """Refused above the tenant's rate, and above its share of calls at once."""
    KEEPING = auto()
    """Ends or keeps what was granted: refused only where so many are under way that they take others' room."""
    FREE = auto()
    """Never refused."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Standing:
    """One tenant's calls."""

    calls_max: int
    kept_back: int
    leaving_free: int
    leaving: int = 0
    bucket: TokenBucket | None = None
    calls: Counter[Weight] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        """Return how many calls stand in the tenant's share: those for which there is room apart do not."""
        keeping = max(self.calls[Weight.KEEPING] - self.kept_back, 0)
        # Answers that nobody reads are kept by the transport: whoever has many of them takes nobody else's places.
        return self.calls[Weight.ORDINARY] + keeping + max(self.leaving - self.leaving_free, 0)

    def has_room(self, weight: Weight) -> bool:
        """Tell whether one more call may be under way."""
        if weight is Weight.KEEPING and self.calls[Weight.KEEPING] < self.kept_back:
            return True
        return weight is Weight.FREE or self.used < self.calls_max


class Quotas:
    """Counts every tenant's calls, and refuses what is too much. All of it happens on the event loop's thread."""

    def __init__(
        self,
        config: BridgeConfig,
        tenancies: Mapping[str, Tenancy],
        *,
        quotas: Callable[[], Mapping[str, TenantQuota]],
        clock: Callable[[], float],
    ) -> None:
        """Hold these tenants to what `quotas` says of each now, and again after each `apply`."""
        self._config = config
        self._tenancies = tenancies
        self._quotas = quotas
        self._clock = clock
        self.calls = 0
        """Calls under way of everybody who has proved who it is, those included whose answers are on their way."""
        calls, tenants = config.concurrent_calls_max, len(tenancies)
        self._share = max(int(calls * _SHARED) // tenants, 1)
        kept_back, leaving_free = (max(int(calls * share) // tenants, 1) for share in (_KEPT_BACK, _LEAVING))
        self._standings = {
            tenant: _Standing(calls_max=self._share, kept_back=kept_back, leaving_free=leaving_free)
            for tenant in tenancies
        }
        self.apply()

    def __repr__(self) -> str:
        """Show how many calls are under way."""
        return f"<Quotas of {len(self._standings)} tenants: {self.calls} calls>"

    def apply(self) -> None:
        """Put into force what the quotas say now: all of them but the memory, which needs a restart."""
        quotas = self._quotas()
        for tenant, standing in self._standings.items():
            quota = quotas.get(tenant, TenantQuota())
            standing.calls_max = quota.calls_max or self._share
            standing.bucket = self._bucket(standing.bucket, quota)
            self._tenancies[tenant].apply(self._config, quota)

    @contextmanager
    def admitted(self, tenant: str, weight: Weight, *, until: Until | None = None) -> Iterator[None]:
        """Count a call in, and whatever it is refused for.

        It counts until its answer has left: `until` takes what has to be called then, and without it that is the end of
        the context.

        Raises:
            TooManyRequestsError: the tenant makes too many calls a second, or too many are under way.
        """
        standing = self._standings[tenant]
        try:
            self._require_room(standing, weight)
            standing.calls[weight] += 1
            self.calls += 1
            if until is not None:
                until(partial(self._left, standing))
            try:
                yield
            finally:
                standing.calls[weight] -= 1
                standing.leaving += 1
                if until is None:
                    self._left(standing)
        except LimitExceededError as error:
            standing.refusals[error.limit if error.limit in TENANT_LIMITS else OTHER_LIMIT] += 1
            raise
        except MemoryExhaustedError:
            standing.refusals[MEMORY_LIMIT] += 1
            raise

    def _left(self, standing: _Standing, _: Any = None) -> None:
        standing.leaving -= 1
        self.calls -= 1

    def samples(self) -> list[TenantSample]:
        """Return every tenant's memory, limits and refusals."""
        return [self._sample(tenant, standing) for tenant, standing in self._standings.items()]

    def _sample(self, tenant: str, standing: _Standing) -> TenantSample:
        with self._tenancies[tenant].ledger() as ledger:
            usage, limits = ledger.usage(), ledger.limits
        levels = {**_ledger_levels(usage, limits), CALLS_LIMIT: Level(used=standing.used, limit=standing.calls_max)}
        if (bucket := standing.bucket) is not None:
            levels[RATE_LIMIT] = Level(used=bucket.taken(now=self._clock()), limit=bucket.burst)
        refusals = {limit: standing.refusals[limit] for limit in (*TENANT_LIMITS, OTHER_LIMIT)}
        return TenantSample(tenant=tenant, usage=usage, levels=levels, refusals=refusals)

    def _require_room(self, standing: _Standing, weight: Weight) -> None:
        if self.calls >= self._config.concurrent_calls_max:
            raise TooManyRequestsError(NODE_LIMIT, self._config.concurrent_calls_max, _BUSY_RETRY_SECONDS)
        if not standing.has_room(weight):
            raise TooManyRequestsError(CALLS_LIMIT, standing.calls_max, _BUSY_RETRY_SECONDS)
        if weight is not Weight.ORDINARY:
            return
        wait = 0.0 if standing.bucket is None else standing.bucket.take(now=self._clock())
        if wait and standing.bucket is not None:
            raise TooManyRequestsError(RATE_LIMIT, standing.bucket.per_second, wait)

    def _bucket(self, bucket: TokenBucket | None, quota: TenantQuota) -> TokenBucket | None:
        rate = quota.requests_per_second
        if rate is None:
            return None
        if bucket is None:
            return TokenBucket(per_second=rate, burst=quota.burst, now=self._clock())
        bucket.change(per_second=rate, burst=quota.burst, now=self._clock())
        return bucket


def _ledger_levels(usage: Usage, limits: LedgerLimits) -> dict[str, Level]:
    references = usage.reservations + usage.holds + usage.leases + usage.residues
    kept_bytes = usage.arena_bytes - usage.free_bytes - usage.evictable_bytes
    return {
        MEMORY_LIMIT: Level(used=kept_bytes, limit=usage.arena_bytes),
        "payloads_max": Level(used=usage.payloads, limit=limits.payloads_max),
        "references_max": Level(used=references, limit=limits.references_max),
        "payload_text_bytes_max": Level(used=usage.payload_text_bytes, limit=limits.payload_text_bytes_max),
    }
