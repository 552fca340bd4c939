"""What one node has to do with others: orders, the directory and its neighbours, as one part of a bridge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbridge.config import BridgeConfig
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.gate import AcquireTerms
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.directory import Directory, Member
from kvbridge.link.neighbour import Neighbours, OrderNews, Owned
from kvbridge.node.announcing import Announcer, newest
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.containment import Containment
from kvbridge.node.locating import Located, located
from kvbridge.node.neighbourhood import Neighbourhood, NeighbourhoodLimits
from kvbridge.node.orders import OrderKeeper
from kvbridge.node.replicas import Replicas
from kvbridge.node.tenancy import Tenancy
from kvbridge.observe.directory_metrics import DirectorySample

KEYS_ASKED_MAX = 1024
"""Most keys that another node may ask for at once."""
_NOT_ASKED = "the directory does not answer, so no other node was asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourPicture:
    """Another node at one moment."""

    node_id: str
    """Its name."""
    target: str
    """Where it is called."""
    epoch: int
    """Its boot epoch; 0 if it never answered."""
    is_reachable: bool
    """Whether it answered last."""
    agrees: bool
    """Whether it knows of the same orders."""


class Cluster:
    """Other nodes, as far as this one has to do with them."""

    def __init__(
        self,
        config: BridgeConfig,
        tenancies: Mapping[str, Tenancy],
        *,
        epoch: int,
        containment: Containment,
        catalog: CatalogKeeper,
        replicas: Replicas,
        directory: Directory | None,
        neighbours: Neighbours | None,
        clock: Callable[[], float],
    ) -> None:
        """Find others by `directory` and call them by `neighbours`, or, without these, be on its own."""
        self._config = config
        self._tenancies = tenancies
        self._epoch = epoch
        self._clock = clock
        self._quarantines = containment.quarantines
        self.orders = OrderKeeper(
            node_id=config.node_id, epoch=epoch, quarantines=containment.quarantines, catalog=catalog
        )
        replicas.on_brought = self.orders.end_if_revoked
        self._announcer: Announcer | None = None
        self.neighbourhood: Neighbourhood | None = None
        if directory is not None and neighbours is not None:
            self._announcer = Announcer(tenancies, key_ttl_seconds=config.directory_key_ttl_seconds, clock=clock)
            self.orders.on_ended = self._announcer.ended
            self.neighbourhood = Neighbourhood(
                directory,
                neighbours,
                orders=self.orders,
                announcer=self._announcer,
                limits=NeighbourhoodLimits(heartbeat_seconds=config.heartbeat_seconds, may_call=config.may_call),
                hear=replicas.hear,
                clock=clock,
            )

    def __repr__(self) -> str:
        """Show who is known, and what was ordered."""
        return f"<Cluster: {self.neighbourhood!r}, {self.orders!r}>"

    # Life

    def begin(self) -> None:
        """Take what is in force from the start for orders."""
        self.orders.begin()

    async def start(self, target: str) -> None:
        """Begin to speak to others, who reach this node at `target`, or nowhere if that is empty."""
        if self.neighbourhood is not None:
            await self.neighbourhood.start(Member(node_id=self._config.node_id, target=target, epoch=self._epoch))

    async def close(self) -> None:
        """Leave, once what others said is in this node's files."""
        if self.neighbourhood is not None:
            await self.neighbourhood.close()
        await self._quarantines.settle()

    # What happens here

    def committed(self, tenant: str, reference: PayloadReference) -> None:
        """Note a payload that can be had from now on."""
        if self._announcer is not None:
            self._announcer.committed(tenant, reference.key)

    async def located(self, parts: Sequence[AcquireTerms], tenant: str, *, seconds_left: float | None) -> Located:
        """Find out who owns what is not here."""
        if self.neighbourhood is None:
            return Located(parts=tuple(parts))
        found = await located(
            parts,
            self._tenancies[tenant],
            self.neighbourhood,
            seconds_left=seconds_left,
            seconds_max=self._config.directory_timeout_seconds,
            clock=self._clock,
        )
        return found if self.neighbourhood.standing.is_up else replace(found, not_asked=_NOT_ASKED)

    # What others ask

    def owned(self, tenant: str, keys: Sequence[str]) -> list[Owned]:
        """Return what this node owns under those of the keys of which it can tell anything."""
        tenancy = self._tenancies.get(tenant)
        return [] if tenancy is None else [owned for owned in (self._owned(tenancy, key) for key in keys) if owned]

    def exchange(self, news: OrderNews) -> OrderNews:
        """Take what another node knows of orders, and return what this one does, unless that is the same."""
        self.orders.take(news)
        return OrderNews(digest=self.orders.digest) if news.digest == self.orders.digest else self.orders.news()

    def neighbours(self) -> list[NeighbourPicture]:
        """Return every other node that is known."""
        contacts = {} if self.neighbourhood is None else self.neighbourhood.contacts
        return [
            NeighbourPicture(
                node_id=name,
                target=contact.member.target,
                epoch=contact.epoch,
                is_reachable=contact.is_reachable,
                agrees=contact.agrees,
            )
            for name, contact in contacts.items()
        ]

    def sample(self) -> DirectorySample:
        """Return how things stand, for a scrape."""
        if self.neighbourhood is None:
            return DirectorySample(orders=len(self.orders))
        standing = self.neighbourhood.standing
        age = standing.age_seconds
        return DirectorySample(
            is_up=standing.is_up,
            age_seconds=float("inf") if age is None else age,
            failures=standing.failures,
            look_ups=standing.look_ups,
            neighbours=Counter(map(_state, self.neighbours())),
            orders=len(self.orders),
        )

    def _owned(self, tenancy: Tenancy, key: str) -> Owned | None:
        if is_handoff_reference(key):
            return None
        found = newest(tenancy, key, now=self._clock())
        if found is None:
            return None
        generation, committed_at = found
        return Owned(reference=PayloadReference(key=key, generation=generation), committed_at=committed_at)


def _state(neighbour: NeighbourPicture) -> str:
    if not neighbour.is_reachable:
        return "unreachable"
    return "agreeing" if neighbour.agrees else "behind"
