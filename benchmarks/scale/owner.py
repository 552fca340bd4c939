"""An owner's life: what it publishes, whom it leases that to, and what its uplink carries.

The first of two passes. A node owes others nothing but answers, so each owner is played on its own, and what it
answers whom is written down for the second pass. The gate of the node that asks is asked here, too, because bytes go
over the owner's uplink only if it passes.
"""

from __future__ import annotations

from itertools import chain
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.desk import TENANT, Desk, SimulationError
from benchmarks.scale.tally import Tally
from benchmarks.scale.workload import (
    GEOMETRY,
    LAYERS,
    MODEL,
    OTHER_MODEL,
    TOKENS,
    Scale,
    key_of,
    node_id,
    payload_bytes,
    slot_bytes,
    text,
    tokens,
    workload,
)
from kvbridge.core.catalog import RoutePolicy
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec, Verification
from kvbridge.core.gate import AcquireTerms, Conditions, Costs, Question, Verdict, decide
from kvbridge.core.handoff_reference import HandoffReference
from kvbridge.core.ledger import Committed, Payload, PayloadEnded, Tombstone
from kvbridge.core.reasons import Reason
from kvbridge.core.tags import ModelTag
from kvbridge.link.port import Opened
from kvbridge.node.announcing import Announcer, newest
from kvbridge.node.costs import CostKeeper
from kvbridge.node.foreign import Foreign, opened
from kvbridge.node.identity import Client
from kvbridge.node.lending import Lent, Refused, lend
from kvbridge.node.parts import candidate_of
from kvbridge.node.tenancy import Tenancy

PULLED, HERE, COMING = 0, -1, -2
"""What became of an acquire: the bytes were brought, were there, or were on their way; a reason's number otherwise."""
REASONS = tuple(Reason)
"""Reasons by their numbers, from 1."""
ANSWER = np.dtype(
    [
        ("consumer", "i4"),
        ("owner", "i4"),
        ("at", "f8"),
        ("ready", "f8"),
        ("hold", "f8"),
        ("payload", "i4"),
        ("slot", "i2"),
        ("generation", "i4"),
        ("outcome", "i2"),
        ("wrong", "?"),
    ]
)
"""What one acquire of another node's payload came to."""
DIGESTS = tuple(bytes([layer]) * 16 for layer in range(LAYERS))
"""Stand for the digests of the layers."""
_PRODUCER = "producer"
_RENEWALS_PER_TTL = 3


class Owner:
    """One node as an owner."""

    def __init__(self, scale: Scale, node: int) -> None:
        """Play the node of this number."""
        self.tally = Tally()
        self._scale, self._node = scale, node
        self._desk = Desk(scale, linger_seconds=scale.linger_seconds)
        self._announcer = Announcer(
            {TENANT: self._desk},
            key_ttl_seconds=scale.config().directory_key_ttl_seconds,
            clock=self._desk.clock,
            draw=Random(f"{scale.seed} {node}").random,
        )
        self._desk.on_ended.append(self._ended)
        # As if every node that pulls from this one told all others how long it took.
        self._costs = CostKeeper("others", clock=self._desk.clock)
        self._policy = RoutePolicy()
        self._conditions = Conditions(policy=self._policy)
        self._uplink_free_at = self._uplink_busy = 0.0
        self._replicas: dict[tuple[str, int, int], tuple[float, float]] = {}
        self._answers: list[tuple[Any, ...]] = []
        self._generations: list[int] = []  # of each publication, as its reference names it
        self._live_max = 0

    def play(self) -> NDArray[Any]:
        """Live the node's life and return what others were answered."""
        published_at, slots, asks = workload(self._scale, self._node)
        times = np.concatenate([published_at, asks["at"]])
        rows = asks.tolist()
        for index in np.argsort(times, kind="stable").tolist():
            self._desk.wait_until(float(times[index]))
            if index < len(slots):
                self._publish(index, int(slots[index]))
            else:
                row = rows[index - len(slots)]
                self._ask(row, int(slots[row[2]]))
            self._announce()
        self._desk.finish()
        self._announce()
        self.tally.uplink_busy_seconds.append(self._uplink_busy)
        self.tally.live_max.append(self._live_max)
        return np.array(self._answers, ANSWER)

    # Publishing

    def _publish(self, payload: int, slot: int) -> None:
        desk = self._desk
        spec = PayloadSpec(
            key=key_of(self._node, payload, slot),
            model=MODEL,
            geometry=GEOMETRY,
            capacity_tokens=TOKENS,
            tokens=tokens(),
            fallback=FallbackText(text=text()),
        )
        with desk.ledger() as ledger:
            grant = ledger.reserve(now=desk.now, client_id=_PRODUCER, attached=True, spec=spec, slot_bytes=slot_bytes())
            ledger.begin_commit(
                now=desk.now,
                client_id=_PRODUCER,
                token=grant.token,
                valid_length=None,
                tokens=None,
                fallback=None,
                layer_digests=DIGESTS,
                verification=Verification.DIGEST,
            )
            outcome = ledger.finish_commit(
                now=desk.now, payload_id=grant.payload_id, layer_digests=(), failure=None, hold=False
            )
            self._live_max = max(self._live_max, ledger.usage().payloads)
        if not isinstance(outcome, Committed):
            raise SimulationError(f"{outcome}")
        self.tally.events["published"] += 1
        self._generations.append(grant.reference.generation)
        self.tally.generation_max = max(self.tally.generation_max, grant.reference.generation)
        self._announcer.committed(TENANT, spec.key)

    def _ended(self, _: Tenancy, ended: PayloadEnded) -> None:
        self.tally.events[f"ended {ended.reason}"] += 1
        self._announcer.ended(TENANT, ended)

    def _announce(self) -> None:
        """Tell a directory that keeps keys what there is to be told, as a node does when it is woken."""
        more = True
        while more:
            entries, more = self._announcer.batch()
            if entries:
                self.tally.calls["announce: round trips"] += 1
                self.tally.calls["announce: keys"] += len(entries)
                self.tally.note_writes(self._desk.now, sum(2 if entry.generation else 1 for entry in entries))

    # Being asked

    def _ask(self, row: tuple[Any, ...], slot: int) -> None:
        at, hold, payload, consumer, by_key, wrong = row
        self.tally.events["asked"] += 1
        key = key_of(self._node, payload, slot)
        if consumer == self._node:
            self._ask_here(key, hold, wrong=wrong)
            return
        generation = self._located(key) if by_key else self._generations[payload]
        ready, outcome = at, REASONS.index(Reason.PAYLOAD_UNKNOWN) + 1
        if generation:
            ready, outcome = self._ask_from(consumer, PayloadReference(key=key, generation=generation), hold, wrong)
        self._answers.append((consumer, self._node, at, ready, hold, payload, slot, generation or 1, outcome, wrong))

    def _located(self, key: str) -> int:
        """Return the generation of a key that a directory knows, or 0."""
        self.tally.calls["locate: keys"] += 1
        found = newest(self._desk, key, now=self._desk.now)
        if found is None or self._desk.now - self._committed_at(key) < self._scale.directory_lag_seconds:
            return 0
        return found[0]

    def _committed_at(self, key: str) -> float:
        with self._desk.ledger() as ledger:
            found = ledger.find(now=self._desk.now, key=key)
        return (found.committed_at or 0.0) if isinstance(found, Payload) else 0.0

    def _ask_here(self, key: str, hold: float, *, wrong: bool) -> None:
        desk = self._desk
        with desk.ledger() as ledger:
            found = ledger.find(now=desk.now, key=key)
            verdict = self._decided(found, key, wrong=wrong, costs=Costs())
            if verdict.failure is not None:
                self.tally.events[f"text {verdict.failure.reason}"] += 1
                return
            if not isinstance(found, Payload):
                raise SimulationError(f"the gate lets {found} pass")
            grant = ledger.lease(now=desk.now, client_id="consumer", attached=True, payload_id=found.payload_id)
        self.tally.events["leased here"] += 1
        desk.later(desk.now + hold, self._release, "consumer", grant.token)

    def _decided(self, found: Payload | Tombstone | Foreign | None, key: str, *, wrong: bool, costs: Costs) -> Verdict:
        model: ModelTag = OTHER_MODEL if wrong else MODEL
        terms = AcquireTerms(reference=PayloadReference(key=key, generation=0), model=model, tokens=tokens())
        candidate = candidate_of(found, quarantine=None, node_draining=False)
        conditions = self._conditions if costs == Costs() else Conditions(policy=self._policy, costs=costs)
        return decide(Question(terms=terms, candidate=candidate, conditions=conditions))

    def _release(self, client: str, token: str) -> None:
        with self._desk.ledger() as ledger:
            if ledger.release(now=self._desk.now, client_id=client, tokens=[token]):
                raise SimulationError(f"the lease {token} ended before its time")

    # Being asked by another node

    def _ask_from(
        self,
        consumer: int,
        reference: PayloadReference,
        hold: float,
        wrong: bool,  # noqa: FBT001 - a column
    ) -> tuple[float, int]:
        """Return when a node has an answer, and which."""
        now, place = self._desk.now, (reference.key, reference.generation, consumer)
        ready, until = self._replicas.get(place, (0.0, 0.0))
        if now < until:  # It has a replica, or one is coming: this node hears nothing, but a ping.
            self.tally.calls["Ping before a replica is used"] += now >= ready
            if not wrong:
                self._replicas[place] = ready, max(until, max(now, ready) + hold + self._scale.replica_linger_seconds)
            return max(now, ready), HERE if now >= ready else COMING
        client = Client(client_id=f"kvbridge-node {node_id(consumer)}", tenant=TENANT, attached=False)
        self.tally.calls["OpenPayload"] += 1
        answer = lend(
            self._desk,
            client,
            reference,
            clock=self._desk.clock,
            quarantine=lambda *_: None,
            node_draining=False,
        )
        if isinstance(answer, Refused):
            return now, REASONS.index(answer.reason) + 1
        failure = self._gate_of_consumer(reference, answer, wrong=wrong)
        if failure is not None:
            self._give_back(client.client_id, answer.grant.token)
            return now, REASONS.index(failure) + 1
        ready, outcome = self._send(client.client_id, answer)
        if outcome == PULLED:
            self._replicas[place] = ready, ready + hold + self._scale.replica_linger_seconds
        return ready, outcome

    def _gate_of_consumer(self, reference: PayloadReference, lent: Lent, *, wrong: bool) -> Reason | None:
        """Return why the gate of the node that asks does not have the bytes brought over, or None."""
        name = HandoffReference(node_id=node_id(self._node), payload=reference)
        answer = Opened(
            lease_token=lent.grant.token,
            ttl_seconds=lent.grant.ttl_seconds,
            descriptor=lent.descriptor,
            fallback=lent.fallback,
            epoch=1,
        )
        foreign, _ = opened(name, answer)
        assert foreign.descriptor is not None, foreign
        costs = self._costs.costs(
            (TENANT, 0),
            foreign.descriptor,
            consumer=MODEL,
            attached=True,
            policy=self._policy,
            verification=Verification.NONE,
            deadline_seconds=self._scale.deadline_seconds,
            owner=node_id(self._node),
        )
        failure = self._decided(foreign, str(name), wrong=wrong, costs=costs).failure
        return None if failure is None else failure.reason

    def _send(self, client: str, lent: Lent) -> tuple[float, int]:
        """Send the bytes behind those that are being sent already, and return when the answer is there, and which."""
        scale, now = self._scale, self._desk.now
        begins_at = max(now, self._uplink_free_at)
        in_time = begins_at + payload_bytes() / scale.uplink_bytes_per_second <= now + scale.deadline_seconds
        ends_at = begins_at + payload_bytes() / scale.uplink_bytes_per_second
        ends_at = ends_at if in_time else max(now + scale.deadline_seconds, begins_at)
        sent = (ends_at - begins_at) * scale.uplink_bytes_per_second
        self._uplink_free_at = ends_at
        self._uplink_busy += ends_at - begins_at
        self.tally.tensor_bytes += sent
        self.tally.uplink_wait_seconds_max = max(self.tally.uplink_wait_seconds_max, begins_at - now)
        self.tally.calls["Download"] += 1
        answered_at = ends_at if in_time else now + scale.deadline_seconds
        self._desk.later(answered_at, self._sent, client, lent.grant.token, int(sent), answered_at - now)
        every = lent.grant.ttl_seconds / _RENEWALS_PER_TTL
        for number in range(1, int((answered_at - now) / every) + 1):
            self._desk.later(now + number * every, self._renew, client, lent.grant.token)
        return answered_at, PULLED if in_time else REASONS.index(Reason.TRANSFER_TIMEOUT) + 1

    def _sent(self, client: str, token: str, nbytes: int, seconds: float) -> None:
        if nbytes:
            self._costs.record_pull(node_id(self._node), nbytes, seconds)
        self._give_back(client, token)

    def _give_back(self, client: str, token: str) -> None:
        self.tally.calls["Release"] += 1
        self._release(client, token)

    def _renew(self, client: str, token: str) -> None:
        self.tally.calls["Renew"] += 1
        with self._desk.ledger() as ledger:
            if None in ledger.renew(now=self._desk.now, client_id=client, tokens=[token]):
                raise SimulationError(f"the lease {token} ended while its bytes were sent")


def play_owners(scale: Scale, nodes: range) -> tuple[Tally, NDArray[Any]]:
    """Return what some owners did, and what others were answered by them."""
    tally, answers = Tally(), []
    for node in nodes:
        owner = Owner(scale, node)
        answers.append(owner.play())
        tally.add(owner.tally)
    return tally, np.concatenate([*chain(answers), np.zeros(0, ANSWER)])
