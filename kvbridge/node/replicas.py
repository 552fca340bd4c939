"""Replicas of payloads of other nodes, and the visits that bring them.

A replica is an ordinary payload of this node, published by the node itself under the handoff reference as its key, and
with a mark behind that if it lost bits on its way (`kvbridge.core.transfer_encoding`). It
ends by its own linger and time to live; it never changes, because a reference names one generation of one start of its
owner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.transfer_encoding import EXACT_FORM, TransferForm, marked_key, unmarked_key
from kvbridge.link.port import Peers
from kvbridge.node.visit import Visit
from kvbridge.node.visitor import Visitor

EPOCHS_REMEMBERED_MAX = 65_536
"""Most replicas of which it is remembered from which start of their owner they came; others are brought over again."""


class Replicas:
    """Visits that are under way, and where replicas came from."""

    def __init__(self, peers: Peers, visitor: Visitor) -> None:
        """Visit `peers`."""
        self._peers = peers
        self._visitor = visitor
        self._visits: dict[tuple[str, str, TransferForm], Visit] = {}
        self._epochs: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.on_brought: Callable[[str, str, int], None] = lambda *_: None

    def __repr__(self) -> str:
        """Show how many visits are under way."""
        return f"<Replicas by {len(self._visits)} visits to {self._peers!r}>"

    def __len__(self) -> int:
        """Return how many visits are under way."""
        return len(self._visits)

    async def refresh(self, keys: Iterable[str], seconds_left: float | None) -> None:
        """Learn whether the owners of replicas have started again, if they were not heard of lately."""
        owners = {_owner(key) for key in keys}
        await self._visitor.incarnations.refresh(owners, seconds_left)

    def is_current(self, tenant: str, key: str) -> bool:
        """Tell whether a replica came from the newest start of its owner."""
        epoch = self._epochs.get((tenant, key))
        return epoch is not None and epoch == self._visitor.incarnations.of(_owner(key))

    def is_from(self, tenant: str, key: str, owner_epoch: int) -> bool:
        """Tell whether a replica came from this start of its owner, and no newer one was heard of."""
        return self._epochs.get((tenant, key)) == owner_epoch and self.is_current(tenant, key)

    @contextmanager
    def visiting(
        self, tenant: str, keys: Iterable[str], form: TransferForm = EXACT_FORM
    ) -> Iterator[Mapping[str, Visit]]:
        """Join or begin the visits to the owners of `keys`, handoff references of other nodes, for `form`."""
        visits: dict[str, Visit] = {}
        try:
            for key in keys:
                visits[key] = self._enter(tenant, key, form)
            yield visits
        finally:
            for key, visit in visits.items():
                self._leave(tenant, key, visit)

    def note(self, tenant: str, key: str, visit: Visit) -> None:
        """Remember where a replica came from."""
        if visit.epoch is None:
            return
        replica = (tenant, marked_key(key, visit.form))
        self._epochs[replica] = visit.epoch
        self._epochs.move_to_end(replica)
        if len(self._epochs) > EPOCHS_REMEMBERED_MAX:
            self._epochs.popitem(last=False)
        self.on_brought(tenant, key, visit.epoch)

    def hear(self, node_id: str, epoch: int) -> None:
        """Note the boot epoch in what another node said."""
        self._visitor.incarnations.hear(node_id, epoch)

    async def close(self) -> None:
        """Hang up on all nodes."""
        await self._peers.close()

    def _enter(self, tenant: str, key: str, form: TransferForm) -> Visit:
        visit = self._visits.get((tenant, key, form))
        if visit is None:
            reference = HandoffReference.parse(key)
            peer = self._peers.find(reference.node_id)
            visit = Visit(reference, tenant, peer=peer, visitor=self._visitor, form=form)
            self._visits[tenant, key, form] = visit
        visit.users += 1
        return visit

    def _leave(self, tenant: str, key: str, visit: Visit) -> None:
        """Leave a visit; the last one to leave ends it."""
        visit.users -= 1
        if not visit.users:
            del self._visits[tenant, key, visit.form]
            self._visitor.background.begin(visit.end())


def _owner(replica: str) -> str:
    return HandoffReference.parse(unmarked_key(replica)).node_id
