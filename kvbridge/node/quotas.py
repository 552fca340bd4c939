"""What each tenant may use of the node, beside its memory: calls per second, and calls under way at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvbridge.config import BridgeConfig
from kvbridge.core.access import TenantQuota
from kvbridge.core.access.rate import TokenBucket
from kvbridge.core.errors import LimitExceededError, MemoryExhaustedError, TooManyRequestsError
from kvbridge.core.ledger import LedgerLimits, Usage
from kvbridge.node.tenancy import Tenancy
from kvbridge.observe.tenant_metrics import Level, TenantSample

_log = logging.getLogger(__name__)

_SHARED_EIGHTHS = 7
"""Eighths of all calls at once that the tenants share; the rest is for those that are never refused."""
_BUSY_RETRY_SECONDS = 1.0
RATE_LIMIT = "requests_per_second"
CALLS_LIMIT = "calls_max"
MEMORY_LIMIT = "arena_bytes"
TENANT_LIMITS = (
    MEMORY_LIMIT,
    "payloads_max",
    "references_max",
    "references_per_client_max",
    "payload_text_bytes_max",
    CALLS_LIMIT,
    RATE_LIMIT,
    "watches_max",
    "watches_per_client_max",
    "quarantines_max",
)
"""Limits that a tenant's calls are refused for; all others are counted as `other`."""
OTHER_LIMIT = "other"


@dataclass(slots=True, kw_only=True, eq=False)
class _Standing:
    """One tenant's calls."""

    calls_max: int
    bucket: TokenBucket | None = None
    calls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)


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
        """Calls of everybody that are under way."""
        calls = config.concurrent_calls_max
        share = calls if len(tenancies) == 1 else calls * _SHARED_EIGHTHS // 8 // len(tenancies)
        self._share = max(share, 1)
        self._standings = {tenant: _Standing(calls_max=self._share) for tenant in tenancies}
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
    def admitted(self, tenant: str, *, refusable: bool) -> Iterator[None]:
        """Count a call in, and whatever it is refused for; one that is not `refusable` is never too much.

        Raises:
            TooManyRequestsError: the tenant makes too many calls a second, or has too many under way.
        """
        standing = self._standings[tenant]
        try:
            if refusable:
                self._require_room(standing)
            standing.calls += refusable
            self.calls += 1
            try:
                yield
            finally:
                standing.calls -= refusable
                self.calls -= 1
        except LimitExceededError as error:
            standing.refusals[error.limit if error.limit in TENANT_LIMITS else OTHER_LIMIT] += 1
            raise
        except MemoryExhaustedError:
            standing.refusals[MEMORY_LIMIT] += 1
            raise

    def samples(self) -> list[TenantSample]:
        """Return every tenant's memory, limits and refusals."""
        return [self._sample(tenant, standing) for tenant, standing in self._standings.items()]

    def _sample(self, tenant: str, standing: _Standing) -> TenantSample:
        with self._tenancies[tenant].ledger() as ledger:
            usage, limits = ledger.usage(), ledger.limits
        levels = {**_ledger_levels(usage, limits), CALLS_LIMIT: Level(used=standing.calls, limit=standing.calls_max)}
        if (bucket := standing.bucket) is not None:
            levels[RATE_LIMIT] = Level(used=bucket.taken(now=self._clock()), limit=bucket.burst)
        refusals = {limit: standing.refusals[limit] for limit in (*TENANT_LIMITS, OTHER_LIMIT)}
        return TenantSample(tenant=tenant, usage=usage, levels=levels, refusals=refusals)

    def _require_room(self, standing: _Standing) -> None:
        if standing.calls >= standing.calls_max:
            raise TooManyRequestsError(CALLS_LIMIT, standing.calls_max, _BUSY_RETRY_SECONDS)
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
