"""What must never happen, beyond what the books say: wrong bytes, late answers, lost leases, what is contaminated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvbridge.core.descriptor import PayloadDescriptor, PayloadReference, Verification
from kvbridge.core.events import Event, PayloadQuarantined, PayloadRevoked
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference, lineage
from kvbridge.core.ledger import Committed
from kvbridge.core.reasons import Reason
from kvbridge.node.acquiring import Acquisition
from kvbridge.node.answers import Fallback, HandoffAnswer, Leased
from kvbridge.node.lending import Lent
from tests.sim import content
from tests.sim.book import Call, Slot, ViolatedError

if TYPE_CHECKING:
    from tests.sim.node import Start
    from tests.sim.share import Share

WAIT_SECONDS_MAX = 60.0
"""Longest wait for the answer to a call without a deadline: other nodes may take some time, but not for ever."""
_SOON_SECONDS = 1e-6
_WITHOUT_TEXT = frozenset({Reason.PAYLOAD_UNKNOWN, Reason.OWNER_UNREACHABLE, Reason.DRAINING, Reason.PAYLOAD_NOT_READY})
"""Reasons that a node may give although it knows no text."""

Name = tuple[str, int, str, str, int]
"""A payload as only the world knows it: node, its start, tenant, key and generation."""


@dataclass(slots=True, kw_only=True)
class Judge:
    """Knows whose bytes are whose."""

    problems: list[str] = field(default_factory=list)
    """What went wrong; anything ends the run."""
    answers: dict[str, int] = field(default_factory=dict)
    """How often which reason was answered, and how often a lease."""
    reads: int = 0
    """How often bytes were looked at."""
    from_holders: int = 0
    """How many replicas came from other nodes than the owner."""
    _stamps: dict[Name, int] = field(default_factory=dict)
    _starts: dict[str, int] = field(default_factory=dict)
    _unfit: set[Name] = field(default_factory=set)
    _undigested: set[Name] = field(default_factory=set)

    def broken(self, problem: str) -> ViolatedError:
        """Note what must not have happened, and return the error that says so."""
        self.problems.append(problem)
        return ViolatedError(problem)

    # Producers

    def stamp(self, start: Share, reference: PayloadReference) -> int:
        """Return what the payload's bytes follow from."""
        self._starts[start.host] = max(self._starts.get(start.host, 0), start.number)
        return self._stamps.setdefault(_name(start, reference), len(self._stamps) + 1)

    def expect_rejection(self, start: Share, reference: PayloadReference) -> None:
        """Note that what was written must not pass the checks that its producer asked for."""
        self._unfit.add(_name(start, reference))

    def distrust_digests(self, start: Share, reference: PayloadReference) -> None:
        """Note that the declared digests are wrong, and were not asked to be checked."""
        self._undigested.add(_name(start, reference))

    def committed(self, start: Share, committed: Committed) -> None:
        """Look at a payload that has become available."""
        reference = committed.descriptor.reference
        if _name(start, reference) in self._unfit:
            raise self.broken(f"{reference} at {start} passed its check, and is not what was declared")
        if start.contaminated(reference):
            raise self.broken(f"{reference} at {start} was committed under quarantine")
        if is_handoff_reference(reference.key):
            self._brought(start, committed)

    def _brought(self, start: Share, committed: Committed) -> None:
        """Look at a replica before anybody can lease it."""
        reference = committed.descriptor.reference
        [slot] = (slot for slot in start.book.slots.values() if slot.reference == reference)
        candidates, memory = self._candidates(start, reference), start.bytes_of(slot)
        if all(content.wrong_at(memory, committed.descriptor, stamp) is not None for stamp in candidates):
            raise self.broken(f"{start} took wrong bytes for {reference}")
        owner = HandoffReference.parse(reference.key).node_id
        self.from_holders += start.asked_last.get((start.tenant, reference.key), owner) != owner

    # Consumers

    def lent(self, start: Share, lent: Lent) -> None:
        """Look at what one node leases to another one."""
        if start.contaminated(lent.grant.reference):
            raise self.broken(f"{lent.grant.reference} at {start} was lent under quarantine")

    def lent_replica(self, start: Share, lent: Lent, number: int) -> None:
        """Look at a replica that one node leases to another one, which wants it of a start of its owner."""
        slot = start.book.slot_of(lent.grant.token)
        if slot is None or slot.flipped:
            return
        named = HandoffReference.parse(lent.grant.reference.key)
        stamp = self._stamps.get((named.node_id, number, start.tenant, named.payload.key, named.payload.generation))
        if stamp is None or content.wrong_at(start.bytes_of(slot), lent.descriptor, stamp) is not None:
            raise self.broken(f"{start} lent {lent.grant.reference} as of start {number} of its owner, which it is not")

    def asked_in_vain(self, start: Start, key: str, asked_last: str) -> None:
        """Look at whom a node asked last for bytes that did not come."""
        if asked_last not in ("", HandoffReference.parse(key).node_id):
            raise self.broken(f"{start} gave {key} up when {asked_last} had failed, and did not ask its owner")

    def unsound(self, start: Share) -> set[int]:
        """Return the payloads whose bytes have changed and are not being checked, so that the next check must tell."""
        return {slot.payload_id for slot in start.book.slots.values() if slot.flipped} - set(+start.reading)

    def answered(
        self, start: Share, call: Call, asked: Acquisition, answer: HandoffAnswer, *, seconds: float, unsound: set[int]
    ) -> None:
        """Look at an answer as it leaves the node."""
        self.in_time(start, asked, seconds=seconds)
        leased = [part for part in answer.parts if isinstance(part, Leased)]
        if leased and (start.switched or start.declared):
            raise self.broken(f"{start} handed over {leased[0].grant.reference} although its kill switch is on")
        self.all_told(start, call, {part.grant.token for part in leased})
        if len(answer.parts) != len(asked.parts):
            raise self.broken(f"{len(answer.parts)} parts were answered of {len(asked.parts)}")
        for part in leased:
            known = start.book.references.get(part.grant.token)
            if known is None:
                raise self.broken(f"{start} handed over {part.grant.reference}, which nobody of its tenant leased")
            known.told = True
            self._leased(start, asked, part, unsound=unsound)
            self._of_this_life(start, asked, part, arrived_at=start.world.loop.time() - seconds)
        for terms, said in zip(asked.parts, answer.parts, strict=True):
            if isinstance(said, Fallback):
                self._count(said.finding.reason)
                self._text(start, terms.reference.key, said)
            else:
                self._count("LEASED")

    def carried_out(self, start: Share, client_id: str, request_id: str) -> None:
        """Look at a request that has had an effect: whoever repeats it must be given its first answer."""
        start.answered[client_id, request_id] += 1
        if start.answered[client_id, request_id] > 1:
            raise self.broken(f"{start} carried out {request_id} of {client_id} twice")

    def changed_nothing(self, start: Share, client_id: str, request_id: str) -> None:
        """Note that a request failed instead, and may be tried again."""
        start.answered[client_id, request_id] -= 1

    def repeated(self, start: Share, name: str, answers: Sequence[object]) -> None:
        """Look at what the same request of the same client was answered."""
        if any(answer is not answers[0] for answer in answers):
            raise self.broken(f"{start} answered one {name} in several ways: {answers}")

    def taken(self, start: Share, client_id: str, answer: HandoffAnswer) -> None:
        """Look whose leases a client is given."""
        for part in answer.parts:
            known = start.book.references.get(part.grant.token) if isinstance(part, Leased) else None
            if known is not None and known.client_id != client_id:
                raise self.broken(f"{start} gave {client_id} what was granted to {known.client_id}: {known}")

    def in_time(self, start: Share, asked: Acquisition, *, seconds: float) -> None:
        """Look at how long an acquire took."""
        limit = WAIT_SECONDS_MAX if asked.deadline_seconds is None else asked.deadline_seconds
        if start.alive and seconds > limit + _SOON_SECONDS:
            raise self.broken(f"{start} took {seconds:g} s to answer a handoff with a deadline of {limit:g} s")

    def all_told(self, start: Share, call: Call, told: set[str]) -> None:
        """Look at what is left of a call that has ended."""
        orphans = start.book.orphans(call, told)
        if orphans and start.alive:
            raise self.broken(f"{call.name} at {start} has ended and left {orphans[0]}")

    def _leased(self, start: Share, asked: Acquisition, part: Leased, *, unsound: set[int]) -> None:
        reference = part.grant.reference
        if start.contaminated(reference):
            raise self.broken(f"{reference} at {start} was handed over under quarantine")
        if not asked.verification.includes(Verification.DIGEST):
            return
        if part.grant.payload_id in unsound:
            raise self.broken(f"{reference} at {start} was handed over as checked, and its bytes have changed")
        if _name(start, reference) in self._undigested:
            raise self.broken(f"{reference} at {start} was handed over as checked, and its digests are wrong")

    def _of_this_life(self, start: Share, asked: Acquisition, part: Leased, *, arrived_at: float) -> None:
        """Look whether a replica comes from a start of its owner that is known to be over."""
        reference = part.grant.reference
        if not is_handoff_reference(reference.key):
            return
        named = HandoffReference.parse(reference.key)
        number, heard_at = start.heard.get(named.node_id, (1, 0.0))
        if arrived_at <= heard_at:
            return
        slot = start.bridge.slot_of(asked.client, part.grant)
        for earlier in range(1, number):
            stamp = self._stamps.get(
                (named.node_id, earlier, start.tenant, named.payload.key, named.payload.generation)
            )
            if stamp is not None and content.wrong_at(slot, part.descriptor, stamp) is None:
                raise self.broken(f"{reference} at {start} is of start {earlier}, and start {number} was heard of")

    def revoked(self, start: Share, slot: Slot, reason: Reason) -> None:
        """Look whether those who hold what was found bad were told."""
        if reason is not Reason.QUARANTINED:
            self._all_told_of(start, slot, partial(_revokes, slot=slot))

    def _all_told_of(self, start: Share, slot: Slot, fits: Callable[[Event], bool]) -> None:
        for one in start.book.held(slot.payload_id):
            told = start.told(one.client_id)
            if told is not None and not any(map(fits, told)):
                raise self.broken(f"{slot.reference} at {start} is bad or contaminated, and {one} was not told")

    def contained(self, start: Share) -> None:
        """Look at what is left of what has just been quarantined."""
        for slot in start.book.slots.values():
            assert slot.reference is not None, slot
            if not slot.sealed or not start.contaminated(slot.reference):
                continue
            if not slot.ended or not slot.retired:
                raise self.broken(f"{slot.reference} at {start} is quarantined, and its header does not say so")
            self._all_told_of(start, slot, partial(_warns, slot=slot))

    def read(self, start: Share, token: str, descriptor: PayloadDescriptor, slot: memoryview) -> None:
        """Look at bytes that a consumer reads because everything says that it may."""
        self.reads += 1
        lent = start.book.slot_of(token)
        if lent is not None and lent.flipped:
            return
        stamps = list(self._candidates(start, descriptor.reference))
        wrong = [content.wrong_at(slot, descriptor, stamp) for stamp in stamps]
        if None not in wrong:
            raise self.broken(f"{descriptor.reference} at {start} holds wrong bytes, at {wrong} for stamps {stamps}")
        if content.dirty_padding(slot, descriptor):
            raise self.broken(f"{descriptor.reference} at {start} holds something behind its valid length")

    def downloaded(self, start: Share, token: str, descriptor: PayloadDescriptor, got: bytes) -> None:
        """Look at bytes that a client by value was sent."""
        self.reads += 1
        lent = start.book.slot_of(token)
        if lent is not None and lent.flipped:
            return
        stamps = self._candidates(start, descriptor.reference)
        if not any(content.content(stamp, len(got)).tobytes() == got for stamp in stamps):
            raise self.broken(f"{descriptor.reference} was downloaded from {start} as wrong bytes")

    def _text(self, start: Share, key: str, part: Fallback) -> None:
        if is_handoff_reference(key):
            key = HandoffReference.parse(key).payload.key
        said = part.fallback.text
        if said != content.text(start.tenant, key) and (said is not None or part.finding.reason not in _WITHOUT_TEXT):
            raise self.broken(f"{key} was refused for {part.finding.reason} with the text {said!r}")

    def _count(self, what: str) -> None:
        self.answers[what] = self.answers.get(what, 0) + 1

    def _candidates(self, start: Share, reference: PayloadReference) -> Iterable[int]:
        """Return the stamps that a payload may have; a handoff reference does not say of which start it was."""
        if not is_handoff_reference(reference.key):
            if _name(start, reference) not in self._stamps:
                raise self.broken(f"{start} has handed over {reference}, which nobody of its tenant has written")
            return [self._stamps[_name(start, reference)]]
        named = HandoffReference.parse(reference.key)
        numbers: Sequence[int] = range(1, self._starts.get(named.node_id, 0) + 1)
        payload = named.payload
        names = [(named.node_id, number, start.tenant, payload.key, payload.generation) for number in numbers]
        return [self._stamps[name] for name in names if name in self._stamps]


def _revokes(event: Event, slot: Slot) -> bool:
    return isinstance(event, PayloadRevoked) and event.reference == slot.reference


def _warns(event: Event, slot: Slot) -> bool:
    assert slot.reference is not None, slot
    return isinstance(event, PayloadQuarantined) and event.held and event.reference == lineage(slot.reference)


def _name(start: Share, reference: PayloadReference) -> Name:
    return start.host, start.number, start.tenant, reference.key, reference.generation
