"""One acquire: ask the gate for every part, see to the bytes, and keep a record.

1. All parts are decided in one turn of the event loop, the one nearest to the consumer's new tokens first, so that the
   nearest segments are the ones that may be caches. Whoever passes is leased at once: what is checked next cannot go
   away meanwhile.
2. Then the bytes are seen to where the consumer asked for it, for all parts at once. What they are found to be is asked
   of the gate again, so that one check gives one reason whenever it is found.
3. A part that passed on a route that only shadows is given back, and the consumer takes the text.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvbridge.core.descriptor import Verification
from kvbridge.core.gate import AcquireTerms, Candidate, Conditions, Question, Verdict, decide
from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.core.journal import HandoffRecord
from kvbridge.core.ledger import Grant, Ledger, Payload
from kvbridge.core.plan import Place, placed, places
from kvbridge.core.reasons import Reason
from kvbridge.node.answers import HandoffAnswer
from kvbridge.node.byte_checks import ByteChecks, Failure
from kvbridge.node.fetching import Fetching, ForeignByKey, FormsByKey, PullsByKey
from kvbridge.node.foreign import Foreign, form_to_ask_for
from kvbridge.node.identity import Client
from kvbridge.node.journal import Journal
from kvbridge.node.locating import may_be_elsewhere
from kvbridge.node.parts import Part, answer_to, candidate_of, layout_of, readable, record_of
from kvbridge.node.surroundings import Circumstances, Found, Surroundings
from kvbridge.node.tenancy import Tenancy
from kvbridge.node.texts import Recalled, Texts

_HANDOFF_ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquisition:
    """One acquire as it was asked for."""

    client: Client
    """Who asks."""
    parts: tuple[AcquireTerms, ...]
    """What for, in the order in which it will stand in the consumer's context."""
    verification: Verification
    """How far the bytes are to be checked again now."""
    deadline_seconds: float | None
    """What the caller's deadline leaves; None if it has none."""
    not_asked: str = ""
    """Why no other node was asked for keys that may be one's, where that could not be done; else empty."""
    arrived_at: float = field(default_factory=time.perf_counter)
    """When it arrived, by the performance counter."""

    @property
    def seconds_left(self) -> float | None:
        """Return what is left of the caller's time; None if it has no deadline."""
        if self.deadline_seconds is None:
            return None
        return self.deadline_seconds - (time.perf_counter() - self.arrived_at)


class Acquiring:
    """Answers acquires."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        surroundings: Surroundings,
        byte_checks: ByteChecks,
        fetching: Fetching,
        texts: Texts,
        journal: Journal,
    ) -> None:
        """Ask `surroundings` what holds, see to bytes by the others, and tell `journal`; `clock` is the ledger's.

        Of what the ledger knows nothing of, `texts` may have kept something.
        """
        self._clock = clock
        self._surroundings = surroundings
        self._byte_checks = byte_checks
        self._fetching = fetching
        self._texts = texts
        self._journal = journal

    async def acquire(self, asked: Acquisition, tenancy: Tenancy, *, is_draining: Callable[[], bool]) -> HandoffAnswer:
        """Answer with a lease or the text for each part; `is_draining` tells whether the node is shutting down.

        Raises:
            LimitExceededError: the client or the node has too many references; none is left of this call.
        """
        parts = await self._decide_with_others(asked, tenancy, is_draining=is_draining)
        _refuse_what_is_not_here(parts)
        if asked.verification is not Verification.NONE:
            await self._see_to_all_bytes(asked, tenancy, parts)
            self._look_again(asked, tenancy, parts)
        self._end_shadows(asked, tenancy, parts)
        answer = HandoffAnswer(
            handoff_id=secrets.token_hex(_HANDOFF_ID_BYTES),  # Never looks like an option to a command.
            parts=tuple(answer_to(part) for part in parts),
            layout=layout_of(parts),
        )
        self._record(asked, tenancy, answer, parts)
        return answer

    # Deciding

    def _decide_all(
        self, asked: Acquisition, tenancy: Tenancy, foreign: ForeignByKey, kept: Recalled, *, node_draining: bool
    ) -> list[Part]:
        """Decide every part, the nearest first, and lease what passes and is here; all or, on an error, nothing."""
        parts: list[Part] = []
        with tenancy.ledger() as ledger:
            found = [self._find(ledger, tenancy.tenant, terms, foreign, kept) for terms in asked.parts]
            wanted = list(zip(asked.parts, found, places(list(map(readable, found, asked.parts))), strict=True))
            try:
                for terms, payload, place in reversed(wanted):
                    nearer = sum(part.passes for part in parts)
                    stands = placed(terms, place, cached_segments_nearer=nearer)
                    part = self._decide(asked, tenancy, stands, payload, place, node_draining=node_draining)
                    parts.append(part)
                    part.passes = _is_leased(part)
                    if part.passes and isinstance(payload, Payload):
                        part.grant = self._lease(asked.client, ledger, part)
            except BaseException:
                self._drop(asked.client, ledger, parts)
                raise
        return parts[::-1]

    def _find(self, ledger: Ledger, tenant: str, terms: AcquireTerms, foreign: ForeignByKey, kept: Recalled) -> Found:
        reference = terms.reference
        said = foreign.get(reference.key)
        if said is not None:
            return said
        if is_handoff_reference(reference.key):
            return self._fetching.find(
                ledger, tenant, reference.key, lambda _, payload: self._surroundings.takes(terms, payload)
            )
        return ledger.find(now=self._clock(), key=reference.key, generation=reference.generation) or kept.get(reference)

    async def _decide_with_others(
        self, asked: Acquisition, tenancy: Tenancy, *, is_draining: Callable[[], bool]
    ) -> list[Part]:
        """Bring over from other nodes what passes every check but that of its bytes, and decide every part.

        What is here already stays leased meanwhile, so that it does not make room for what comes.
        """
        kept: list[Part] = []
        references = [terms.reference for terms in asked.parts]
        texts = await self._texts.recall(tenancy, references, seconds_max=asked.seconds_left)

        def decide_all(foreign: ForeignByKey) -> list[Part]:
            return self._decide_all(asked, tenancy, foreign, texts, node_draining=is_draining())

        def passing(foreign: ForeignByKey) -> FormsByKey:
            parts = decide_all(foreign)
            self._surroundings.forgo((part.passage for part in parts), now=self._clock())
            kept.extend(parts)
            return {
                part.terms.reference.key: form_to_ask_for(part.found, part.passage.conditions.policy.transfer_form)
                for part in parts
                if part.passes and isinstance(part.found, Foreign)
            }

        def seconds_left() -> float | None:
            return asked.seconds_left

        keys = [terms.reference.key for terms in asked.parts]
        by_key = {terms.reference.key: terms for terms in asked.parts}
        missing = await self._fetching.missing(
            tenancy, keys, seconds_left, lambda key, payload: self._surroundings.takes(by_key[key], payload)
        )
        try:
            foreign: ForeignByKey = {}
            pulls: PullsByKey = {}
            if missing:
                foreign = await self._fetching.fetch(
                    tenancy, missing, passing=passing, seconds_left=seconds_left, pulls=pulls
                )
            parts = decide_all(foreign)
            for part in parts:
                part.pull = pulls.get(part.terms.reference.key)
            return parts
        finally:
            with tenancy.ledger() as ledger:
                self._give_back(asked.client, ledger, kept)

    def _decide(
        self,
        asked: Acquisition,
        tenancy: Tenancy,
        terms: AcquireTerms,
        found: Found,
        place: Place,
        *,
        node_draining: bool,
    ) -> Part:
        made = Circumstances(
            tenant=tenancy.tenant,
            attached=asked.client.attached,
            verification=asked.verification,
            deadline_seconds=asked.seconds_left,
        )
        passage = self._surroundings.passage(terms, found, made, now=self._clock())
        not_asked = asked.not_asked if found is None and may_be_elsewhere(terms.reference) else ""
        candidate = candidate_of(found, quarantine=passage.quarantine, node_draining=node_draining, not_asked=not_asked)
        if passage.probe_figures:
            candidate = replace(candidate, probe_figures=passage.probe_figures)
        verdict = _ask(terms, candidate, passage.conditions)
        return Part(terms=terms, place=place, found=found, passage=passage, verdict=verdict)

    def _lease(self, client: Client, ledger: Ledger, part: Part) -> Grant:
        assert isinstance(part.found, Payload), part
        return ledger.lease(
            now=self._clock(), client_id=client.client_id, attached=client.attached, payload_id=part.found.payload_id
        )

    # Bytes

    async def _see_to_all_bytes(self, asked: Acquisition, tenancy: Tenancy, parts: Sequence[Part]) -> None:
        leased = [part for part in parts if part.grant is not None]
        try:
            await asyncio.gather(*(self._see_to_bytes(asked, tenancy, part) for part in leased))
        except BaseException:
            with tenancy.ledger() as ledger:
                self._drop(asked.client, ledger, parts)
            raise

    async def _see_to_bytes(self, asked: Acquisition, tenancy: Tenancy, part: Part) -> None:
        """Check a leased part's bytes; it loses its lease if they are bad or late."""
        assert part.grant is not None, part
        assert isinstance(part.found, Payload), part
        left = asked.seconds_left
        failure = await self._byte_checks.check(
            tenancy,
            part.found,
            part.grant,
            client_id=asked.client.client_id,
            level=asked.verification,
            seconds_max=left,
        )
        part.verified_now = asked.verification
        if failure is not None:
            # What was quarantined meanwhile cannot be checked any more, and that it is quarantined is why.
            self._refuse(asked, tenancy, part, *(self._quarantined(tenancy, part) or failure))

    def _look_again(self, asked: Acquisition, tenancy: Tenancy, parts: Sequence[Part]) -> None:
        """Refuse what may not be handed over any more, whatever happened while the bytes were checked."""
        kill_switch = self._surroundings.kill_switch_reason()
        for part in parts:
            failure = (
                None if part.grant is None else self._quarantined(tenancy, part) or self._lost(asked, tenancy, part)
            )
            if failure is not None:
                self._refuse(asked, tenancy, part, *failure)
            elif part.grant is not None and kill_switch is not None:
                self._switch_off(asked, tenancy, part, kill_switch)

    def _lost(self, asked: Acquisition, tenancy: Tenancy, part: Part) -> Failure | None:
        assert part.grant is not None, part
        with tenancy.ledger() as ledger:
            return self._byte_checks.lost(ledger, asked.client.client_id, part.grant)

    def _switch_off(self, asked: Acquisition, tenancy: Tenancy, part: Part, kill_switch: str) -> None:
        with tenancy.ledger() as ledger:
            self._give_back(asked.client, ledger, [part])
        conditions = replace(part.passage.conditions, kill_switch=kill_switch)
        candidate = candidate_of(part.found, quarantine=None, node_draining=False)
        part.verdict = part.verdict.after(_ask(part.terms, candidate, conditions))

    def _quarantined(self, tenancy: Tenancy, part: Part) -> Failure | None:
        assert part.found is not None, part
        quarantine = self._surroundings.quarantine(part.terms, part.found, tenancy.tenant)
        return None if quarantine is None else (Reason.QUARANTINED, quarantine)

    def _refuse(self, asked: Acquisition, tenancy: Tenancy, part: Part, reason: Reason, detail: str) -> None:
        with tenancy.ledger() as ledger:
            self._give_back(asked.client, ledger, [part])
        ended = Candidate(known=True, ended=reason, ended_detail=detail)
        part.verdict = part.verdict.after(_ask(part.terms, ended, part.passage.conditions))

    def _end_shadows(self, asked: Acquisition, tenancy: Tenancy, parts: Sequence[Part]) -> None:
        shadows = [part for part in parts if part.grant is not None and part.verdict.failure is not None]
        with tenancy.ledger() as ledger:
            self._give_back(asked.client, ledger, shadows)

    def _drop(self, client: Client, ledger: Ledger, parts: Sequence[Part]) -> None:
        """Leave nothing of an acquire that is not answered."""
        self._give_back(client, ledger, parts)
        self._surroundings.forgo((part.passage for part in parts), now=self._clock())

    def _give_back(self, client: Client, ledger: Ledger, parts: Sequence[Part]) -> None:
        """Return leases that the consumer was never told of, however they stand by now."""
        for part in parts:
            if part.grant is not None:
                self._byte_checks.give_back(ledger, client.client_id, part.grant)
                part.grant = None

    # Remembering

    def _record(self, asked: Acquisition, tenancy: Tenancy, answer: HandoffAnswer, parts: Sequence[Part]) -> None:
        terms = asked.parts[0]
        record = HandoffRecord(
            handoff_id=answer.handoff_id,
            at=time.time(),
            tenant=tenancy.tenant,
            principal=asked.client.principal.name,
            client_id=asked.client.client_id,
            model=terms.model,
            edge=terms.edge,
            depth=terms.depth,
            seconds=time.perf_counter() - asked.arrived_at,
            deadline_seconds=asked.deadline_seconds,
            by_value=not asked.client.attached,
            parts=tuple(record_of(part) for part in parts),
        )
        self._surroundings.note(record, [part.grant for part in parts], now=self._clock())
        self._journal.add(record)


def _ask(terms: AcquireTerms, candidate: Candidate, conditions: Conditions) -> Verdict:
    return decide(Question(terms=terms, candidate=candidate, conditions=conditions), clock=time.perf_counter)


def _refuse_what_is_not_here(parts: Sequence[Part]) -> None:
    """Fail what passes now, but did not when it could still have been brought over."""
    for part in parts:
        if part.passes and isinstance(part.found, Foreign):
            lost = part.found.lost((Reason.TRANSFER_FAILED, "the bytes were not brought over"))
            candidate = candidate_of(lost, quarantine=None, node_draining=False)
            part.verdict = part.verdict.after(_ask(part.terms, candidate, part.passage.conditions))
            part.passes = False


def _is_leased(part: Part) -> bool:
    """Tell whether a part gets a lease, be it only to see what would have become of it on a route that shadows."""
    return part.verdict.failure is None or (part.passage.shadows and part.verdict.would_pass)
