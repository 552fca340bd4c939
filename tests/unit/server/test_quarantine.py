"""What the answer to a quarantine holds."""

from __future__ import annotations

from kvbridge.core.descriptor import PayloadReference
from kvbridge.node.quarantines import QuarantineReport, TouchedPayload
from kvbridge.server.quarantine import PAYLOADS_MAX, _encode_report


def test_an_answer_names_so_many_payloads_at_most_and_counts_them_all() -> None:
    """The first ones, which are those that are touched most directly."""
    payloads = tuple(
        TouchedPayload(
            reference=PayloadReference(key="k", generation=number), because="b", leases=1, handoffs=2, alive=True
        )
        for number in range(1, PAYLOADS_MAX + 2)
    )
    answer = _encode_report(QuarantineReport(quarantine_id="q", payloads=payloads, clients=3))
    assert (answer.quarantine_id, answer.payloads_total, answer.clients_total) == ("q", PAYLOADS_MAX + 1, 3)
    assert [payload.reference.generation for payload in answer.payloads] == list(range(1, PAYLOADS_MAX + 1))
    first = answer.payloads[0]
    assert (first.because, first.leases, first.handoffs, first.alive) == ("b", 1, 2, True)
