"""One tenant's share of one start of a node: its books, what is contaminated in it, and everything else in common."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.handoff_reference import lineage
from kvbridge.core.ledger import Committed
from kvbridge.core.reasons import Reason
from tests.sim.book import Book, Call, Slot

if TYPE_CHECKING:
    from kvbridge.node.tenancy import Tenancy
    from tests.sim.node import Start

T = TypeVar("T")


class Share:
    """What a start is for the clients of one tenant."""

    def __init__(self, start: Start, tenancy: Tenancy) -> None:
        """Keep the books of a tenancy from here on."""
        self.start, self.tenant, self.bridge, self.answers = start, tenancy.tenant, start.bridge, start.answers
        self._tenancy = tenancy
        self.reading: Counter[int] = Counter()
        """Payloads whose bytes are being checked."""
        self._origins: dict[PayloadReference, tuple[PayloadReference, ...]] = {}
        self._marks: dict[PayloadReference, set[str]] = {}
        self._in_force: dict[str, PayloadReference] = {}
        self._failed: list[tuple[Slot, Reason]] = []
        self.book = Book(tenancy._ledger, tenancy.arena, epoch=start.bridge.epoch)
        self.book.told = self._hear
        self.book.on_change = lambda: start.world.note_change(self)
        self.book.problems = start.world.judge.problems
        tenancy._ledger = self.book  # type: ignore[assignment]
        memory = tenancy.arena.view(0, tenancy.arena.size_bytes)
        self._addresses = range(first := _address(memory), first + memory.nbytes)

    def __getattr__(self, name: str) -> Any:
        """Look at what all tenants have in common."""
        return getattr(self.start, name)

    async def serve(self, name: str, work: Callable[[Call], Coroutine[Any, Any, T]]) -> T:
        """Answer a call; errors as for `Start.serve`."""
        return await self.start.serve(name, work)

    def __repr__(self) -> str:
        """Show which start of which node it is, and whose share."""
        return f"{self.start!r} of {self.tenant}"

    def holds(self, slot: memoryview) -> bool:
        """Tell whether a slot lies in this tenant's arena."""
        return _address(slot) in self._addresses

    def bytes_of(self, slot: Slot) -> memoryview:
        """Return the bytes of a slot, header included."""
        return self._tenancy.slot(slot.extent)

    def look(self) -> None:
        """Look at everything after a step."""
        failed, self._failed = self._failed, []
        for slot, reason in failed:
            self.start.world.judge.revoked(self, slot, reason)
        self.book.compare()

    # Contamination

    @property
    def in_force(self) -> list[str]:
        """Return the quarantines that somebody imposed here and nobody lifted."""
        return list(self._in_force)

    def contaminated(self, reference: PayloadReference) -> bool:
        """Tell whether a payload was put into quarantine here, or derived from one that was while that was in force."""
        return bool(self._marks.get(lineage(reference)))

    def enter(self, reference: PayloadReference, derived_from: Iterable[PayloadReference]) -> None:
        """Note what a payload that was reserved derives from."""
        name, sources = lineage(reference), tuple(map(lineage, derived_from))
        self._origins[name] = sources
        inherited = {mark for source in sources for mark in self._marks.get(source, ())}
        if inherited & self._in_force.keys():
            self._marks[name] = inherited & self._in_force.keys()

    def impose(self, quarantine_id: str, target: PayloadReference) -> None:
        """Note a quarantine that is in force from here on."""
        self._in_force[quarantine_id] = lineage(target)
        pending = [lineage(target)]
        while pending:
            one = pending.pop()
            marks = self._marks.setdefault(one, set())
            if quarantine_id not in marks:
                marks.add(quarantine_id)
                pending += [name for name, sources in self._origins.items() if one in sources]

    def lift(self, quarantine_id: str) -> None:
        """Note that a quarantine holds no more for what comes; what it touched and was published here stays refused."""
        del self._in_force[quarantine_id]
        for name in [name for name in self._marks if name not in self._origins]:
            self._marks[name].discard(quarantine_id)

    def _hear(self, what: str, told: Any) -> None:
        if what == "committed":
            committed: Committed = told
            self.start.world.judge.committed(self, committed)
        elif what == "failed":
            self._failed.append(told)
        elif what == "freed":
            slot: Slot = told
            if self.reading[slot.payload_id] and self.start.alive:
                raise self.book._violated(f"{slot} is freed while its bytes are read")


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
