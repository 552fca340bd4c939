"""The methods of `CatalogService` that impose, lift and list quarantines."""

from __future__ import annotations

from typing import Any, TypeAlias

from grpc import aio

from kvbridge.core.catalog.texts import require_text
from kvbridge.core.quarantine import WHY_CHARACTERS_MAX
from kvbridge.node.identity import Sessions
from kvbridge.node.quarantines import QuarantineKeeper, QuarantineReport
from kvbridge.server.answers import Answers
from kvbridge.server.calls import caller
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire import encode_reference
from kvbridge.wire.payloads import require
from kvbridge.wire.quarantines import decode_target, encode_quarantine

PAYLOADS_MAX = 1000
"""Most payloads that one answer names."""

_Context: TypeAlias = aio.ServicerContext[Any, Any]


class QuarantineMethods:
    """A part of `CatalogService`."""

    _quarantines: QuarantineKeeper
    _sessions: Sessions
    _answers: Answers

    async def Quarantine(self, request: pb.QuarantineRequest, context: _Context) -> pb.QuarantineResponse:  # noqa: N802
        """Refuse a model version, an aligner version or a payload, and everything that derives from it."""
        client = caller(self._sessions, context)

        async def work() -> pb.QuarantineResponse:
            require(request.HasField("target"), "target")
            require_text("why", request.why, characters_max=WHY_CHARACTERS_MAX)
            target = decode_target(request.target)
            report = await self._quarantines.quarantine(client, target, why=request.why, dry_run=request.dry_run)
            return _encode_report(report)

        return await self._answers.once(client, request.request_id, request, work)

    async def Unquarantine(self, request: pb.UnquarantineRequest, context: _Context) -> pb.UnquarantineResponse:  # noqa: N802
        """End a quarantine for payloads that are published from now on."""
        client = caller(self._sessions, context)

        async def work() -> pb.UnquarantineResponse:
            await self._quarantines.unquarantine(client, request.quarantine_id)
            return pb.UnquarantineResponse()

        return await self._answers.once(client, request.request_id, request, work)

    async def ListQuarantines(  # noqa: N802
        self, _: pb.ListQuarantinesRequest, context: _Context
    ) -> pb.ListQuarantinesResponse:
        """List quarantines."""
        in_force = self._quarantines.in_force(caller(self._sessions, context))
        return pb.ListQuarantinesResponse(quarantines=map(encode_quarantine, in_force))


def _encode_report(report: QuarantineReport) -> pb.QuarantineResponse:
    return pb.QuarantineResponse(
        quarantine_id=report.quarantine_id,
        payloads=[
            pb.QuarantinedPayload(
                reference=encode_reference(payload.reference),
                because=payload.because,
                leases=payload.leases,
                handoffs=payload.handoffs,
                alive=payload.alive,
            )
            for payload in report.payloads[:PAYLOADS_MAX]
        ],
        payloads_total=len(report.payloads),
        clients_total=report.clients,
    )
