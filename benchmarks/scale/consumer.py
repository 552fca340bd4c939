"""A node's life as a consumer of what others own: the second pass, once owners have answered."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.desk import Desk, SimulationError
from benchmarks.scale.owner import COMING, DIGESTS, HERE, PULLED, REASONS
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import (
    GEOMETRY,
    MODEL,
    OTHER_MODEL,
    TOKENS,
    Scale,
    key_of,
    node_id,
    slot_bytes,
    text,
    tokens,
)
from kvbridge.core.catalog import RoutePolicy
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification, seal
from kvbridge.core.gate import AcquireTerms, Conditions, Question, Verdict, decide
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.ledger import Committed, Payload, Tombstone
from kvbridge.link.port import Opened
from kvbridge.node.byte_checks import NODE_CLIENT_ID
from kvbridge.node.foreign import Foreign, opened, unheard
from kvbridge.node.parts import candidate_of

_CONSUMER = "consumer"


class Consumer:
    """One node as a consumer."""

    def __init__(self, scale: Scale, answers: NDArray[Any]) -> None:
        """Have a node ask what others have answered, in order of time."""
        self.tally = Tally()
        self._scale, self._rows = scale, answers.tolist()
        self._desk = Desk(scale, linger_seconds=scale.replica_linger_seconds)
        self._conditions = Conditions(policy=RoutePolicy())
        self._live_max = 0
        self._owners: set[int] = set()

    def play(self) -> None:
        """Live the node's life."""
        desk = self._desk
        for row in self._rows:
            _, owner, at, ready, hold, payload, slot, generation, outcome, wrong = row
            desk.wait_until(at)
            reference = PayloadReference(key=key_of(owner, payload, slot), generation=generation)
            name = HandoffReference(node_id=node_id(owner), payload=reference)
            if outcome == PULLED:
                self._owners.add(owner)
                desk.later(ready, self._arrived, name, self._reserve(name), hold)
            elif outcome in {HERE, COMING}:
                desk.later(ready, self._lease, str(name), hold, wrong)
            else:
                desk.later(ready, self._refused, name, outcome, wrong)
        desk.finish()
        self.tally.live_max.append(self._live_max)
        self.tally.owners_called.append(len(self._owners))

    def _reserve(self, name: HandoffReference) -> tuple[str, int]:
        """Lend a slot to the bytes that begin to come, for what the owner has said of them."""
        declared = PayloadSpec(
            key=name.payload.key,
            model=MODEL,
            geometry=GEOMETRY,
            capacity_tokens=TOKENS,
            tokens=tokens(),
            fallback=FallbackText(text=text()),
        )
        descriptor = seal(
            declared,
            generation=name.payload.generation,
            valid_length=None,
            tokens=None,
            layer_digests=DIGESTS,
            verification=Verification.DIGEST,
        )
        answer = Opened(lease_token="0", ttl_seconds=1.0, descriptor=descriptor, fallback=declared.fallback, epoch=1)
        _, spec = opened(name, answer)
        with self._desk.ledger() as ledger:
            grant = ledger.reserve(
                now=self._desk.now, client_id=NODE_CLIENT_ID, attached=True, spec=spec, slot_bytes=slot_bytes()
            )
            self._live_max = max(self._live_max, ledger.usage().payloads)
        return grant.token, grant.payload_id

    def _arrived(self, name: HandoffReference, slot: tuple[str, int], hold: float) -> None:
        token, payload_id = slot
        now = self._desk.now
        with self._desk.ledger() as ledger:
            ledger.begin_commit(
                now=now,
                client_id=NODE_CLIENT_ID,
                token=token,
                valid_length=None,
                tokens=None,
                fallback=None,
                layer_digests=DIGESTS,
                verification=Verification.DIGEST,
            )
            outcome = ledger.finish_commit(now=now, payload_id=payload_id, layer_digests=(), failure=None, hold=True)
            if not isinstance(outcome, Committed) or outcome.hold is None:
                raise SimulationError(f"{outcome}")
        self._lease(str(name), hold, False, how="leased after a pull")  # noqa: FBT003 - a column
        self._release(NODE_CLIENT_ID, outcome.hold.token)

    def _lease(self, key: str, hold: float, wrong: bool, *, how: str = "leased from a replica") -> None:  # noqa: FBT001
        desk = self._desk
        with desk.ledger() as ledger:
            found = ledger.find(now=desk.now, key=key)
            verdict = self._decided(found, key, wrong=wrong)
            if verdict.failure is not None:
                self.tally.events[f"text {verdict.failure.reason}"] += 1
                return
            if not isinstance(found, Payload):
                raise SimulationError(f"the gate lets {found} pass")
            grant = ledger.lease(now=desk.now, client_id=_CONSUMER, attached=True, payload_id=found.payload_id)
        self.tally.events[how] += 1
        desk.later(desk.now + hold, self._release, _CONSUMER, grant.token)

    def _refused(self, name: HandoffReference, outcome: int, wrong: bool) -> None:  # noqa: FBT001 - a column
        """Take the text, for the reason that was found before anything was brought over."""
        reason = REASONS[outcome - 1]
        lost = unheard(name).lost((reason, "as it was found"))
        verdict = self._decided(lost, str(name), wrong=wrong)
        if verdict.failure is None:
            raise SimulationError(f"{name} was refused as {reason}, and the gate lets it pass")
        self.tally.events[f"text {reason}"] += 1

    def _decided(self, found: Payload | Tombstone | Foreign | None, key: str, *, wrong: bool) -> Verdict:
        terms = AcquireTerms(
            reference=PayloadReference(key=key, generation=0),
            model=OTHER_MODEL if wrong else MODEL,
            tokens=tokens(),
        )
        candidate = candidate_of(found, quarantine=None, node_draining=False)
        return decide(Question(terms=terms, candidate=candidate, conditions=self._conditions))

    def _release(self, client: str, token: str) -> None:
        with self._desk.ledger() as ledger:
            if ledger.release(now=self._desk.now, client_id=client, tokens=[token]):
                raise SimulationError(f"the lease {token} ended before its time")


def play_consumers(scale: Scale, answers: NDArray[Any]) -> Tally:
    """Return what the nodes did that got these answers, which are in order of the nodes and of time."""
    tally = Tally()
    bounds = np.flatnonzero(np.diff(answers["consumer"], prepend=-1, append=-1))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        consumer = Consumer(scale, answers[begin:end])
        consumer.play()
        tally.add(consumer.tally)
    return tally
