"""Shows and changes the catalog of a bridge, and sets its kill switch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypeVar

import grpc

from kvbridge.client.connector import Connector
from kvbridge.client.deadlines import Deadline
from kvbridge.client.errors import (
    ArgumentTypeError,
    BridgeUnreachableError,
    ChangeRefusedError,
    arguments_checked,
)
from kvbridge.client.failures import CallFailedError
from kvbridge.client.rpc import Method
from kvbridge.core.catalog import AlignerEntry, Catalog, ModelEntry, Route, RoutePolicy
from kvbridge.core.errors import BridgeError
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.wire import decode_aligner_tag, encode_aligner_tag, encode_model_tag
from kvbridge.wire.catalog import (
    decode_aligner,
    decode_catalog,
    decode_model,
    decode_policy,
    decode_route,
    encode_aligner,
    encode_model,
    encode_route,
)

ADMIN_SECONDS_DEFAULT = 5.0
"""How long a call may take unless its caller says otherwise."""
PAGE_SIZE = 1000
"""Entries asked for at once."""
_REFUSALS = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
"""Statuses by which a bridge that works says no."""
_NOT_PERSISTED = "NOT_PERSISTED"
"""The `google.rpc.ErrorInfo` reason of a change that is in force and not in the bridge's file."""

_Answer = TypeVar("_Answer")
_ListRequest: TypeAlias = pb.ListModelsRequest | pb.ListAlignersRequest | pb.ListRoutesRequest


class KillSwitchNotPersistedError(BridgeError, RuntimeError):
    """The kill switch is set, but the bridge could not write it to its file, so that a restart will undo it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogInspection:
    """The running catalog of a bridge at one moment."""

    catalog: Catalog
    """What is declared; its kill switch is on whoever set it."""
    version: int
    """Counts the changes since the bridge started."""
    file: str
    """The file that it is read from; empty if it is changed by calls."""
    changed_at: datetime
    """When it was last changed, by the bridge's clock."""
    file_problem: str
    """Why the file's newest content was refused; empty if it runs."""
    kill_switch_reason: str
    """Why every handoff is text; empty if the kill switch is off, or the bridge too old to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignerInspection:
    """An aligner version and whether it can be used."""

    aligner: AlignerEntry
    """What is declared."""
    problem: str
    """Why it cannot be used; empty if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInspection:
    """A route, what holds on it, and how its breaker stands."""

    route: Route
    """What is declared."""
    effective: RoutePolicy
    """What holds, with the defaults filled in."""
    breaker_state: str
    """CLOSED, OPEN or HALF_OPEN."""
    breaker_detail: str
    """What the breaker counted, for people."""


class Admin:
    """Calls about the catalog, each with its own deadline.

    Every method raises `BridgeUnreachableError` if the bridge does not answer, `ArgumentTypeError` for an argument of
    the wrong type and `ArgumentValueError` for a value that cannot be. Those that change something raise
    `ChangeRefusedError` if the bridge refuses: a file rules its catalog, or there is nothing of that name.
    """

    def __init__(self, connector: Connector, check_usable: Callable[[], None]) -> None:
        """Ask the bridge that `connector` finds, if `check_usable` does not raise."""
        self._connector = connector
        self._check_usable = check_usable

    # Looking

    def catalog(self, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> CatalogInspection:
        """Return the running catalog and where it comes from."""
        answer = self._call(lambda rpc: rpc.catalog.GetCatalog, pb.GetCatalogRequest(), timeout)
        return CatalogInspection(
            catalog=decode_catalog(answer.catalog),
            version=answer.version,
            file=answer.file,
            changed_at=answer.changed.ToDatetime(tzinfo=UTC),
            file_problem=answer.file_problem,
            kill_switch_reason=answer.kill_switch_reason,
        )

    def models(self, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> list[ModelEntry]:
        """Return all model versions, by name, then revision."""
        pages = self._pages(lambda rpc: rpc.catalog.ListModels, pb.ListModelsRequest(), timeout)
        return [decode_model(model) for page in pages for model in page.models]

    def aligners(self, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> list[AlignerInspection]:
        """Return all aligner versions, by name, then version."""
        pages = self._pages(lambda rpc: rpc.catalog.ListAligners, pb.ListAlignersRequest(), timeout)
        return [
            AlignerInspection(aligner=decode_aligner(listed.aligner), problem=listed.problem)
            for page in pages
            for listed in page.aligners
        ]

    def routes(self, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> list[RouteInspection]:
        """Return all routes, by name."""
        pages = self._pages(lambda rpc: rpc.catalog.ListRoutes, pb.ListRoutesRequest(), timeout)
        return [
            RouteInspection(
                route=decode_route(listed.route),
                effective=decode_policy(listed.effective, "effective", RoutePolicy()),
                breaker_state=listed.breaker_state,
                breaker_detail=listed.breaker_detail,
            )
            for page in pages
            for listed in page.routes
        ]

    # Changing

    def put_model(self, model: ModelEntry, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> list[AlignerTag]:
        """Add a model version, or replace what is known of it.

        Returns:
            The aligners of another version of this model that have no validated successor for this one.
        """
        _require_type("model", model, ModelEntry)
        with arguments_checked():
            Catalog.empty().with_model(model)
        request = pb.PutModelRequest(request_id=_request_id(), model=encode_model(model))
        answer = self._call(lambda rpc: rpc.catalog.PutModel, request, timeout)
        return [decode_aligner_tag(tag) for tag in answer.unusable_aligners]

    def remove_model(self, tag: ModelTag, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> None:
        """Remove a model version."""
        _require_type("tag", tag, ModelTag)
        request = pb.RemoveModelRequest(request_id=_request_id(), tag=encode_model_tag(tag))
        self._call(lambda rpc: rpc.catalog.RemoveModel, request, timeout)

    def put_aligner(self, aligner: AlignerEntry, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> None:
        """Add an aligner version, or replace what is known of it."""
        _require_type("aligner", aligner, AlignerEntry)
        request = pb.PutAlignerRequest(request_id=_request_id(), aligner=encode_aligner(aligner))
        self._call(lambda rpc: rpc.catalog.PutAligner, request, timeout)

    def remove_aligner(self, tag: AlignerTag, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> None:
        """Remove an aligner version."""
        _require_type("tag", tag, AlignerTag)
        request = pb.RemoveAlignerRequest(request_id=_request_id(), tag=encode_aligner_tag(tag))
        self._call(lambda rpc: rpc.catalog.RemoveAligner, request, timeout)

    def put_route(self, route: Route, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> None:
        """Add a route, or replace the one of its name."""
        _require_type("route", route, Route)
        with arguments_checked():
            Catalog.empty().with_route(route)  # What the message could not even hold is refused by its field, too.
        request = pb.PutRouteRequest(request_id=_request_id(), route=encode_route(route))
        self._call(lambda rpc: rpc.catalog.PutRoute, request, timeout)

    def remove_route(self, name: str, *, timeout: float = ADMIN_SECONDS_DEFAULT) -> None:
        """Remove the route of this name."""
        _require_type("name", name, str)
        request = pb.RemoveRouteRequest(request_id=_request_id(), name=name)
        self._call(lambda rpc: rpc.catalog.RemoveRoute, request, timeout)

    def set_kill_switch(self, *, engaged: bool, why: str = "", timeout: float = ADMIN_SECONDS_DEFAULT) -> bool:
        """Turn every handoff into text, or end that; works whether or not a file rules the catalog.

        Returns:
            Whether every handoff is text now: the catalog may declare so as well.

        Raises:
            KillSwitchNotPersistedError: it is set, and a restart would undo it although the bridge has a file for it.
        """
        _require_type("engaged", engaged, bool)
        _require_type("why", why, str)
        request = pb.SetKillSwitchRequest(request_id=_request_id(), engaged=engaged, why=why)
        return self._call(lambda rpc: rpc.catalog.SetKillSwitch, request, timeout).engaged

    # Inside

    def _call(self, method: Method[_Answer], request: Any, timeout: float) -> _Answer:
        return self._answered(method, request, Deadline(timeout))

    def _pages(self, method: Method[_Answer], request: _ListRequest, timeout: float) -> Iterator[_Answer]:
        """Yield every page of a list, with one deadline for all."""
        deadline = Deadline(timeout)
        request.page_size = PAGE_SIZE
        while True:
            page: Any = self._answered(method, request, deadline)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _answered(self, method: Method[_Answer], request: Any, deadline: Deadline) -> _Answer:
        self._check_usable()
        try:
            return self._connector.call(method, request, deadline)[1]
        except CallFailedError as failure:
            failure.raise_if_misuse()
            if failure.about == _NOT_PERSISTED:
                raise KillSwitchNotPersistedError(failure.detail) from failure
            if failure.code in _REFUSALS and failure.about:
                raise ChangeRefusedError(failure.detail) from failure
            raise BridgeUnreachableError(str(failure)) from failure


def _require_type(name: str, value: object, wanted: type[Any]) -> None:
    if not isinstance(value, wanted):
        raise ArgumentTypeError(name, f"must be {wanted.__name__}, got {type(value).__name__}")


def _request_id() -> str:
    return str(uuid.uuid4())
