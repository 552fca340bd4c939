"""Bugs planted on purpose, one at a time: a simulator that finds none of these would find no other either."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from google.protobuf.message import Message

from kvbridge.core.allocator import Allocator, Extent
from kvbridge.core.descriptor import FallbackText, Verification
from kvbridge.core.layout import PAGE_BYTES
from kvbridge.core.ledger import Ledger
from kvbridge.core.ledger.entries import PayloadEntry, ReferenceEntry
from kvbridge.core.ledger.keys import KeyIndex
from kvbridge.core.ledger.lifecycle import Lifecycle
from kvbridge.core.ledger.records import Tombstone
from kvbridge.core.ledger.slots import SlotTable
from kvbridge.core.ledger.states import PayloadEvent, PayloadState
from kvbridge.core.quarantine import Quarantines
from kvbridge.core.references import ReferenceKind
from kvbridge.node.acquiring import Acquiring
from kvbridge.node.bridge import Bridge
from kvbridge.node.byte_checks import NODE_CLIENT_ID, ByteChecks
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.catalog_watch import WatchedFile
from kvbridge.node.identity import Client, Sessions
from kvbridge.node.lender import Lender
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.node.replicas import Replicas
from kvbridge.node.upload import Upload
from kvbridge.node.verification import ByteFinding, Verifier
from kvbridge.node.visit import Visit
from kvbridge.server import answers
from kvbridge.server.answers import TenantAnswers
from kvbridge.v1 import handoff_service_pb2 as pb

_find = KeyIndex.find
_free = Allocator.free
_move = SlotTable.move
_leave = Lifecycle.leave
_bury = Lifecycle._bury
_retire = Lifecycle._retire
_check = Verifier.check
_check_leased = ByteChecks._check
_commit = Bridge.commit
_reserved = QuarantineKeeper.reserved


def _give_back(self: Lifecycle, reference: ReferenceEntry, **_: Any) -> None:
    self._drop(reference)


def _lease(self: Ledger, *, now: float, client_id: str, attached: bool, payload_id: int) -> Any:
    self._begin(now)
    entry = self._life.payloads[payload_id]
    return self._grant(entry, ReferenceKind.LEASE, client_id=client_id, attached=attached)


def _find_whatever(self: KeyIndex, key: str, generation: int) -> PayloadEntry | Tombstone | None:
    return self.occupant(key, generation) or _find(self, key, generation)


def _free_too_much(self: Allocator, extent: Extent) -> None:
    _free(self, extent)
    if extent.end_bytes in self._used:
        start, _ = self._remove_free(next(o for o, n in self._free_by_offset.items() if o + n == extent.end_bytes))
        self._add_free(start, extent.end_bytes + PAGE_BYTES - start)


def _move_and_lose(self: SlotTable, entry: PayloadEntry, event: PayloadEvent) -> None:
    _move(self, entry, event)
    if entry.state is PayloadState.QUARANTINED:
        self._bytes[entry.state] -= entry.slot.length_bytes


def _renew_residue(self: Ledger, reference: ReferenceEntry) -> float | None:
    if reference.residue:
        self._life.acknowledge(reference)
        return None
    self._life.renew(reference, now=self._now)
    return reference.ttl_seconds


def _renew_by_adding(self: Lifecycle, reference: ReferenceEntry, *, now: float) -> None:
    del now
    if reference.expires_at is not None:
        reference.expires_at += reference.ttl_seconds
        self.deadlines.set(reference, reference.expires_at)


def _leave_residues(self: Lifecycle, reference: ReferenceEntry, *, now: float) -> None:
    if not reference.residue:
        _leave(self, reference, now=now)


def _bury_the_text(self: Lifecycle, tombstone: Tombstone) -> None:
    _bury(self, replace(tombstone, fallback=FallbackText()))


def _retire_unread(self: Lifecycle, entry: PayloadEntry) -> None:
    if not entry.referenced:
        _retire(self, entry)


async def _check_nothing(self: Verifier, *_: Any, **__: Any) -> ByteFinding:
    del self
    await asyncio.sleep(0)
    return ByteFinding()


async def _check_without_zeroing(self: Verifier, *terms: Any, **named: Any) -> ByteFinding:
    return await _check(self, *terms, **{**named, "zero_padding": False})


async def _check_without_lease(self: ByteChecks, tenancy: Any, payload: Any, level: Verification) -> Any:
    finding = await self._found(tenancy, payload, level)
    return finding.failure


async def _commit_replica_unchecked(self: Bridge, client: Client, *terms: Any, **named: Any) -> Any:
    if client.client_id == NODE_CLIENT_ID:
        named = {**named, "digested": True}
    return await _commit(self, client, *terms, **named)


def _refuse_and_keep(self: Acquiring, asked: Any, tenancy: Any, part: Any, *failure: Any) -> None:
    part.grant = None
    _refuse(self, asked, tenancy, part, *failure)


_refuse = Acquiring._refuse


async def _wait_for_ever(self: Any, task: asyncio.Task[Any], seconds: float | None) -> bool:
    del self, seconds
    await asyncio.wait({task})
    return True


async def _end_and_keep_the_lease(self: Visit) -> None:
    self._lease_token = ""
    await _end(self)


async def _end_and_keep_the_hold(self: Visit) -> None:
    self._hold = None
    await _end(self)


_end = Visit.end


async def _give_back_twice(self: Visit, peer: Any, opened_there: Any) -> None:
    await _give_back_to_holder(self, peer, opened_there)
    await _give_back_to_holder(self, peer, opened_there)


async def _give_nothing_back(*_: Any) -> None:
    await asyncio.sleep(0)


async def _try_in_vain(self: Visit, holder: Any, answer: Any, spec: Any, seconds_max: float) -> bool:
    with self._visitor.costs.sources.trying(holder):
        return await self._receive_from(holder.node_id, answer, spec, seconds_max)


_give_back_to_holder = Visit._give_back


def _reserved_from_nothing(self: QuarantineKeeper, client: Any, grant: Any, spec: Any) -> None:
    _reserved(self, client, grant, replace(spec, derived_from=()))


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _never(*_: Any, **__: Any) -> bool:
    return False


def _always(*_: Any, **__: Any) -> bool:
    return True


def _first_tenancy(self: Bridge, client: Client) -> Any:
    del client
    return next(iter(self._tenancies.values()))


def _lend_of_the_first(self: Lender, client: Client, tenant: str, *terms: Any, **named: Any) -> Any:
    del tenant
    return _lend(self, client, next(iter(self._tenancies)), *terms, **named)


async def _anew(self: TenantAnswers, client_id: str, request_id: str, request: Any, work: Any, **_: Any) -> Any:
    del self, client_id, request_id, request
    return await work()


async def _once_for_all(self: TenantAnswers, client_id: str, *terms: Any, **named: Any) -> Any:
    del client_id
    return await _once(self, "", *terms, **named)


def _anew_if(kind: type[Message]) -> Any:
    """Return a memory of answers that remembers none to messages of this kind."""

    async def once(self: TenantAnswers, client_id: str, request_id: str, request: Any, work: Any, **named: Any) -> Any:
        if isinstance(request, kind):
            return await work()
        return await _once(self, client_id, request_id, request, work, **named)

    return once


async def _once_while_heard(self: TenantAnswers, *terms: Any, stops_unheard: bool, **named: Any) -> Any:
    del stops_unheard
    return await _once(self, *terms, stops_unheard=True, **named)


def _look_once(self: WatchedFile) -> Any:
    return None if self._judged else _look(self)


def _lift_and_forgive(self: Quarantines, quarantine_id: str) -> bool:
    for origin in self.provenance._origins.values():
        origin.marks.pop(quarantine_id, None)
    return _lift(self, quarantine_id)


_lend, _once, _look, _lift = Lender.lend, TenantAnswers.once, WatchedFile.look, Quarantines.lift


BUGS: Mapping[str, Sequence[tuple[Any, str, Any]]] = MappingProxyType(
    {
        "a release does not count": [(Lifecycle, "give_back", _give_back)],
        "a payload that has ended is leased": [(KeyIndex, "find", _find_whatever), (Ledger, "lease", _lease)],
        "freeing takes a page of the neighbour along": [(Allocator, "free", _free_too_much)],
        "quarantined bytes are not counted": [(SlotTable, "move", _move_and_lose)],
        "a renewal acknowledges a residue": [(Ledger, "_renew", _renew_residue)],
        "a renewal adds to what is left": [(Lifecycle, "renew", _renew_by_adding)],
        "the end of a client leaves its residues": [(Lifecycle, "leave", _leave_residues)],
        "memory is freed under leases": [
            (PayloadEntry, "referenced", property(lambda self: self.holds > 0)),
        ],
        "an expired reader leaves no residue": [
            (ReferenceEntry, "leaves_residue", property(lambda _: False)),
        ],
        "tombstones lose the text": [(Lifecycle, "_bury", _bury_the_text)],
        "the header of bad bytes is not retired": [(Lifecycle, "_retire", _retire_unread)],
        "a commit is not checked": [(Verifier, "check", _check_nothing)],
        "padding is not zeroed": [(Verifier, "check", _check_without_zeroing)],
        "a check holds no lease of its own": [(ByteChecks, "_check", _check_without_lease)],
        "a replica is not checked": [(Bridge, "commit", _commit_replica_unchecked)],
        "a part that is refused keeps its lease": [(Acquiring, "_refuse", _refuse_and_keep)],
        "a cancelled acquire keeps its leases": [(Acquiring, "_drop", _nothing)],
        "checks ignore deadlines": [(ByteChecks, "_ends_in_time", _wait_for_ever)],
        "pulls ignore deadlines": [(Visit, "_ends_in_time", _wait_for_ever)],
        "an upload that breaks off keeps its slot": [(Upload, "__exit__", _nothing)],
        "a visit keeps its lease at the owner": [(Visit, "end", _end_and_keep_the_lease)],
        "a visit keeps its hold on the replica": [(Visit, "end", _end_and_keep_the_hold)],
        "what a holder sends is not compared": [(Visit, "_is_as_sealed", _always)],
        "a holder's lease is kept": [(Visit, "_give_back", _give_nothing_back)],
        "a holder's lease is given back twice": [(Visit, "_give_back", _give_back_twice)],
        "a holder's answer that nobody waits for is forgotten": [(Visit, "_give_back_later", _give_nothing_back)],
        "a replica of another start of its owner is lent on": [(Replicas, "is_from", _always)],
        "the owner is not asked when a holder has failed": [(Visit, "_tried", _try_in_vain)],
        "a client that has ended is answered": [(Bridge, "_require_still_alive", _nothing)],
        "quarantine forgets what derives": [(QuarantineKeeper, "reserved", _reserved_from_nothing)],
        "quarantine forgets what is being checked": [
            (QuarantineKeeper, "commit_failure", _nothing),
        ],
        "quarantine tells nobody": [(QuarantineKeeper, "_tell", _nothing)],
        "bad bytes are not told of": [(QuarantineKeeper, "_is_live", _never)],
        "replicas of an earlier start are used": [(Replicas, "is_current", _always)],
        "quarantine forgets what waits for a check": [(Acquiring, "_look_again", _nothing)],
        "all tenants share one memory": [(Bridge, "_tenancy", _first_tenancy)],
        "nodes are lent the payloads of another tenant": [(Lender, "lend", _lend_of_the_first)],
        "a repeated request is carried out anew": [(TenantAnswers, "once", _anew)],
        "answers are remembered without whose they are": [(TenantAnswers, "once", _once_for_all)],
        "a repeated reserve lends two slots": [(TenantAnswers, "once", _anew_if(pb.ReserveRequest))],
        "a repeated commit commits twice": [(TenantAnswers, "once", _anew_if(pb.CommitRequest))],
        "a repeated release returns twice": [(TenantAnswers, "once", _anew_if(pb.ReleaseRequest))],
        "what has an effect stops with its caller": [(TenantAnswers, "once", _once_while_heard)],
        "errors are remembered": [(TenantAnswers, "_forget", _nothing)],
        "the id of a request stands for any request": [(answers, "_fingerprint", lambda _: b"")],
        "the reservation of a client that has ended stays": [(Sessions, "require_alive", _nothing)],
        "the kill switch is not obeyed": [(CatalogKeeper, "kill_switch_reason", _nothing)],
        "the kill switch is forgotten while a check goes on": [(Acquiring, "_switch_off", _nothing)],
        "the file of the catalog is read once": [(WatchedFile, "look", _look_once)],
        "lifting a quarantine forgives": [(Quarantines, "lift", _lift_and_forgive)],
    }
)
"""What is replaced by what, by the name of the bug."""


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """Let the product have a bug."""
    with ExitStack() as patches:
        for place, name, replacement in BUGS[bug]:
            patches.enter_context(patch.object(place, name, replacement))
        yield
