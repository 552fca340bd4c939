"""`CatalogService`: shows and changes what is declared, and sets the kill switch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import aio

from kvbridge.core.catalog import Catalog, EntryKey, Route
from kvbridge.core.catalog.texts import require_text
from kvbridge.core.errors import InvalidFieldError, LimitExceededError
from kvbridge.node.catalog import CatalogKeeper
from kvbridge.node.identity import Client, Sessions
from kvbridge.node.quarantines import QuarantineKeeper
from kvbridge.server.answers import Answers
from kvbridge.server.calls import caller
from kvbridge.server.pages import decode_page_token, encode_page_token
from kvbridge.server.quarantine import QuarantineMethods
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceServicer
from kvbridge.wire import encode_aligner_tag, encode_duration
from kvbridge.wire.catalog import (
    decode_aligner,
    decode_aligner_tag_at,
    decode_model,
    decode_model_tag_at,
    decode_route,
    encode_aligner,
    encode_catalog,
    encode_model,
    encode_policy,
    encode_route,
)
from kvbridge.wire.payloads import require

PAGE_SIZE_DEFAULT = 100
"""Entries in a page unless the caller asks for another number."""
PAGE_SIZE_MAX = 1000
"""Most entries in a page."""
PAGE_BYTES_MAX = 4 << 20
"""Entries end a page early when they weigh more; one entry always fits."""
LEFT_BEHIND_MAX = 1000
"""Most aligners that the answer to a model names."""
WHY_CHARACTERS_MAX = 1024
"""Longest reason for the kill switch."""

BreakerOf: TypeAlias = Callable[[str, str], tuple[str, str]]
"""Tells state and figures of a route's breaker."""
_Context: TypeAlias = aio.ServicerContext[Any, Any]
_Entry = TypeVar("_Entry")
_Listed = TypeVar("_Listed", bound=Message)


class CatalogServicer(QuarantineMethods, CatalogServiceServicer):
    """Shows and changes what is declared."""

    def __init__(
        self,
        keeper: CatalogKeeper,
        sessions: Sessions,
        answers: Answers,
        *,
        quarantines: QuarantineKeeper,
        message_bytes_max: int,
        breaker_of: BreakerOf = lambda *_: ("CLOSED", ""),
    ) -> None:
        """Serve what `keeper` keeps, in answers of at most `message_bytes_max` bytes."""
        self._keeper = keeper
        self._sessions = sessions
        self._answers = answers
        self._quarantines = quarantines
        self._message_bytes_max = message_bytes_max
        self._breaker_of = breaker_of

    async def GetCatalog(self, _: pb.GetCatalogRequest, context: _Context) -> pb.GetCatalogResponse:  # noqa: N802
        """Return the running catalog; its kill switch is on whoever set it."""
        caller(self._sessions, context)
        keeper = self._keeper
        response = pb.GetCatalogResponse(
            version=keeper.version,
            file=keeper.file,
            changed=_timestamp(keeper.changed_at),
            file_problem=keeper.file_problem,
        )
        reason = keeper.kill_switch_reason()
        # A full catalog takes a good part of a second, in which handoffs go on.
        response.catalog.CopyFrom(await asyncio.to_thread(encode_catalog, keeper.catalog))
        response.catalog.kill_switch, response.kill_switch_reason = reason is not None, reason or ""
        if response.ByteSize() > self._message_bytes_max:
            raise LimitExceededError("message_bytes_max", self._message_bytes_max)
        return response

    # Models

    async def PutModel(self, request: pb.PutModelRequest, context: _Context) -> pb.PutModelResponse:  # noqa: N802
        """Add a model version, or replace what is known of it."""

        async def work() -> pb.PutModelResponse:
            self._keeper.require_changeable()
            require(request.HasField("model"), "model")
            entry = decode_model(request.model)
            version = self._keeper.change(lambda catalog: catalog.with_model(entry))
            left_behind = self._keeper.catalog.aligners_left_behind(entry.tag)[:LEFT_BEHIND_MAX]
            return pb.PutModelResponse(version=version, unusable_aligners=map(encode_aligner_tag, left_behind))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def RemoveModel(self, request: pb.RemoveModelRequest, context: _Context) -> pb.RemoveModelResponse:  # noqa: N802
        """Remove a model version."""

        async def work() -> pb.RemoveModelResponse:
            self._keeper.require_changeable()
            require(request.HasField("tag"), "tag")
            tag = decode_model_tag_at(request.tag, "tag")
            return pb.RemoveModelResponse(version=self._keeper.change(lambda catalog: catalog.without_model(tag)))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def ListModels(self, request: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:  # noqa: N802
        """List model versions, by name, then revision."""
        caller(self._sessions, context)
        models, token = _page(request, Catalog.models_after, self._keeper.catalog, encode_model)
        return pb.ListModelsResponse(models=models, next_page_token=token)

    # Aligners

    async def PutAligner(self, request: pb.PutAlignerRequest, context: _Context) -> pb.PutAlignerResponse:  # noqa: N802
        """Add an aligner version, or replace what is known of it."""

        async def work() -> pb.PutAlignerResponse:
            self._keeper.require_changeable()
            require(request.HasField("aligner"), "aligner")
            entry = decode_aligner(request.aligner)
            return pb.PutAlignerResponse(version=self._keeper.change(lambda catalog: catalog.with_aligner(entry)))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def RemoveAligner(self, request: pb.RemoveAlignerRequest, context: _Context) -> pb.RemoveAlignerResponse:  # noqa: N802
        """Remove an aligner version."""

        async def work() -> pb.RemoveAlignerResponse:
            self._keeper.require_changeable()
            require(request.HasField("tag"), "tag")
            tag = decode_aligner_tag_at(request.tag, "tag")
            return pb.RemoveAlignerResponse(version=self._keeper.change(lambda catalog: catalog.without_aligner(tag)))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def ListAligners(self, request: pb.ListAlignersRequest, context: _Context) -> pb.ListAlignersResponse:  # noqa: N802
        """List aligner versions, by name, then version, with what is wrong with them."""
        caller(self._sessions, context)
        catalog = self._keeper.catalog
        aligners, token = _page(
            request,
            Catalog.aligners_after,
            catalog,
            lambda entry: pb.ListedAligner(
                aligner=encode_aligner(entry), problem=catalog.aligner_problem(entry.tag) or ""
            ),
        )
        return pb.ListAlignersResponse(aligners=aligners, next_page_token=token)

    # Routes

    async def PutRoute(self, request: pb.PutRouteRequest, context: _Context) -> pb.PutRouteResponse:  # noqa: N802
        """Add a route, or replace the one of its name."""

        async def work() -> pb.PutRouteResponse:
            self._keeper.require_changeable()
            require(request.HasField("route"), "route")
            route = decode_route(request.route)
            return pb.PutRouteResponse(version=self._keeper.change(lambda catalog: catalog.with_route(route)))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def RemoveRoute(self, request: pb.RemoveRouteRequest, context: _Context) -> pb.RemoveRouteResponse:  # noqa: N802
        """Remove a route."""

        async def work() -> pb.RemoveRouteResponse:
            name = request.name
            return pb.RemoveRouteResponse(version=self._keeper.change(lambda catalog: catalog.without_route(name)))

        return await self._answers.once(self._client(context), request.request_id, request, work)

    async def ListRoutes(self, request: pb.ListRoutesRequest, context: _Context) -> pb.ListRoutesResponse:  # noqa: N802
        """List routes, by name, with everything that they inherit and their breakers."""
        tenant = caller(self._sessions, context).tenant
        catalog = self._keeper.catalog

        def listed(route: Route) -> pb.ListedRoute:
            state, detail = self._breaker_of(route.name, tenant)
            return pb.ListedRoute(
                route=encode_route(route),
                effective=encode_policy(catalog.policy_of(route)),
                breaker_state=state,
                breaker_detail=detail,
            )

        routes, token = _page(request, Catalog.routes_after, catalog, listed)
        return pb.ListRoutesResponse(routes=routes, next_page_token=token)

    # The kill switch

    async def SetKillSwitch(self, request: pb.SetKillSwitchRequest, context: _Context) -> pb.SetKillSwitchResponse:  # noqa: N802
        """Turn every handoff into text, or end that."""

        async def work() -> pb.SetKillSwitchResponse:
            require_text("why", request.why, characters_max=WHY_CHARACTERS_MAX)
            engaged = self._keeper.set_kill_switch(engaged=request.engaged, why=request.why)
            await self._keeper.save_kill_switch()
            return pb.SetKillSwitchResponse(engaged=engaged)

        return await self._answers.once(self._client(context), request.request_id, request, work)

    def _client(self, context: _Context) -> Client:
        return caller(self._sessions, context)


def _page(
    request: pb.ListModelsRequest | pb.ListAlignersRequest | pb.ListRoutesRequest,
    after: Callable[[Catalog, EntryKey, int], list[tuple[EntryKey, _Entry]]],
    catalog: Catalog,
    encode: Callable[[_Entry], _Listed],
) -> tuple[list[_Listed], str]:
    """Return the entries of a page, and the token of the next one: the key of the last entry, so that it stays good."""
    if request.page_size > PAGE_SIZE_MAX:
        raise InvalidFieldError("page_size", f"must be at most {PAGE_SIZE_MAX}, got {request.page_size}")
    size = request.page_size or PAGE_SIZE_DEFAULT
    found = after(catalog, decode_page_token(request.page_token), size + 1)
    page: list[_Listed] = []
    page_bytes = 0
    for _, entry in found[:size]:
        page.append(encode(entry))
        page_bytes += page[-1].ByteSize()
        if page_bytes >= PAGE_BYTES_MAX:
            break
    return page, encode_page_token(found[len(page) - 1][0]) if len(page) < len(found) else ""


def _timestamp(unix_seconds: float) -> Timestamp:
    since = encode_duration(unix_seconds)
    return Timestamp(seconds=since.seconds, nanos=since.nanos)
