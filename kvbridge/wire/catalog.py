"""The catalog: models, aligners, routes and policies, with the schema's path in every refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from kvbridge.core.breaker import BreakerPolicy
from kvbridge.core.catalog import (
    AlignerEntry,
    BreakerOverrides,
    Catalog,
    InvalidCatalogError,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
    RoutePolicy,
)
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.tags import AlignerTag, ModelTag
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.v1 import types_pb2
from kvbridge.wire.durations import decode_duration, encode_duration
from kvbridge.wire.enums import EnumCodec
from kvbridge.wire.geometry import decode_geometry, encode_geometry
from kvbridge.wire.tags import decode_model_tag, encode_aligner_tag, encode_model_tag
from kvbridge.wire.transfers import decode_transfer_encoding, encode_transfer_encoding

_MODES = EnumCodec(RouteMode, dict(pb.RouteMode.items()), "ROUTE_MODE_")
_POLICY_NUMBERS = (
    "canary_percent",
    "same_family",
    "tokens_min",
    "tokens_min_unmeasured",
    "gain_min",
    "depth_min",
    "depth_max",
    "cached_segments_max",
    "alignment_error_max",
    "in_domain_share_min",
    "exact_layers_first",
)
"""Fields of a policy that have one name and one form in message and core."""
_BREAKER_NUMBERS = ("bad_share_max", "samples_min", "trials")
"""The same for a breaker."""
_BREAKER_DURATIONS = {"window": "window_seconds", "open": "open_seconds"}
"""Durations of a breaker by their names in message and core."""

_Decoded = TypeVar("_Decoded")
_Listed = TypeVar("_Listed", bound=Message)


def encode_catalog(catalog: Catalog) -> pb.Catalog:
    """Return `catalog` as a message, with every default written out."""
    return pb.Catalog(
        kill_switch=catalog.kill_switch,
        defaults=encode_policy(catalog.defaults),
        models=map(encode_model, catalog.models),
        aligners=map(encode_aligner, catalog.aligners),
        routes=map(encode_route, catalog.routes),
    )


def decode_catalog(message: pb.Catalog, built_in: RoutePolicy | None = None) -> Catalog:
    """Return the catalog in `message`, whose defaults hold as `built_in` where it leaves them out.

    Raises:
        InvalidCatalogError: entries cannot be, contradict one another, or are too many; it tells of all that can be
            seen at once.
    """
    faults: list[InvalidFieldError] = []
    defaults = built_in or RoutePolicy()
    try:
        defaults = decode_policy(message.defaults, "defaults", defaults)
    except InvalidFieldError as error:
        faults.append(error)

    def decode_checked_route(route: pb.Route, path: str) -> Route:
        decoded = decode_route(route, path)
        with _at(f"{path}.policy"):
            decoded.overrides.resolve(defaults)
        return decoded

    models = _decode_all(message.models, "models", decode_model, faults)
    aligners = _decode_all(message.aligners, "aligners", decode_aligner, faults)
    routes = _decode_all(message.routes, "routes", decode_checked_route, faults)
    if faults:  # The catalog could only add what follows from the entries that are left out.
        raise InvalidCatalogError(faults)
    return Catalog(kill_switch=message.kill_switch, defaults=defaults, models=models, aligners=aligners, routes=routes)


def encode_model(entry: ModelEntry) -> pb.CatalogModel:
    """Return a model version as a message."""
    return pb.CatalogModel(
        tag=encode_model_tag(entry.tag),
        family=entry.family,
        geometry=None if entry.geometry is None else encode_geometry(entry.geometry),
        fingerprint=entry.fingerprint,
    )


def decode_model(message: pb.CatalogModel, path: str = "model") -> ModelEntry:
    """Return the model version in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is missing or cannot be.
    """
    _require(message, "tag", path)
    tag = decode_model_tag_at(message.tag, f"{path}.tag")
    with _at(path):
        geometry = decode_geometry(message.geometry) if message.HasField("geometry") else None
        return ModelEntry(tag=tag, family=message.family, geometry=geometry, fingerprint=message.fingerprint)


def encode_aligner(entry: AlignerEntry) -> pb.CatalogAligner:
    """Return an aligner version as a message."""
    return pb.CatalogAligner(
        tag=encode_aligner_tag(entry.tag),
        alignment_error=entry.alignment_error,
        calibration=pb.CalibrationData(general_tokens=entry.general_tokens, in_domain_tokens=entry.in_domain_tokens),
        validated=entry.validated,
    )


def decode_aligner(message: pb.CatalogAligner, path: str = "aligner") -> AlignerEntry:
    """Return the aligner version in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is missing or cannot be.
    """
    for field in ("tag", "calibration"):
        _require(message, field, path)
    tag = decode_aligner_tag_at(message.tag, f"{path}.tag")
    with _at(path):
        return AlignerEntry(
            tag=tag,
            alignment_error=message.alignment_error,
            general_tokens=message.calibration.general_tokens,
            in_domain_tokens=message.calibration.in_domain_tokens,
            validated=message.validated,
        )


def encode_route(route: Route) -> pb.Route:
    """Return a route as a message, without what it inherits."""
    return pb.Route(
        name=route.name,
        source=encode_pattern(route.source),
        target=encode_pattern(route.target),
        edge=route.edge,
        policy=encode_overrides(route.overrides),
    )


def decode_route(message: pb.Route, path: str = "route") -> Route:
    """Return the route in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is missing or cannot be, whatever the route inherits.
    """
    source = decode_pattern(message.source, f"{path}.source")
    target = decode_pattern(message.target, f"{path}.target")
    overrides = decode_overrides(message.policy, f"{path}.policy")
    with _at(path):
        return Route(name=message.name, source=source, target=target, edge=message.edge, overrides=overrides)


def encode_pattern(pattern: ModelPattern) -> pb.ModelPattern:
    """Return a pattern as a message."""
    return pb.ModelPattern(name=pattern.name, revision=pattern.revision, adapter=pattern.adapter)


def decode_pattern(message: pb.ModelPattern, path: str) -> ModelPattern:
    """Return the pattern in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is too long or does not print.
    """
    adapter = message.adapter if message.HasField("adapter") else None
    with _at(path):
        return ModelPattern(name=message.name, revision=message.revision, adapter=adapter)


def encode_policy(policy: RoutePolicy) -> pb.RoutePolicy:
    """Return a policy as a message in which nothing is left out."""
    return _encode_fields(policy, policy.breaker)


def encode_overrides(overrides: PolicyOverrides) -> pb.RoutePolicy:
    """Return what a route says itself as a message in which everything else is left out."""
    return _encode_fields(overrides, overrides.breaker)


def decode_overrides(message: pb.RoutePolicy, path: str) -> PolicyOverrides:
    """Return what `message`, which stands at `path`, says itself.

    Raises:
        InvalidFieldError: mode or encoding is unknown or a duration negative; ranges are checked with what is
            inherited.
    """
    mode = None if not message.mode else _MODES.decode(message.mode, f"{path}.mode")
    encoding = decode_transfer_encoding(message.transfer_encoding, None, f"{path}.transfer_encoding")
    durations = {
        own: decode_duration(getattr(message.breaker, name), f"{path}.breaker.{name}")
        for name, own in _BREAKER_DURATIONS.items()
        if cast("Message", message.breaker).HasField(name)
    }
    breaker = BreakerOverrides(**_given(message.breaker, _BREAKER_NUMBERS), **cast("dict[str, Any]", durations))
    given = _given(message, _POLICY_NUMBERS)
    return PolicyOverrides(mode=mode, transfer_encoding=encoding, **given, breaker=breaker)


def decode_policy(message: pb.RoutePolicy, path: str, inherited: RoutePolicy) -> RoutePolicy:
    """Return the policy in `message`, which stands at `path`, and where it leaves something out, what is `inherited`.

    Raises:
        InvalidFieldError: a field is out of its range.
    """
    overrides = decode_overrides(message, path)
    with _at(path):
        return overrides.resolve(inherited)


def decode_model_tag_at(message: types_pb2.ModelTag, path: str) -> ModelTag:
    """Return the tag in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is empty, too long or does not print.
    """
    with _at(path, drops="model."):
        return decode_model_tag(message)


def decode_aligner_tag_at(message: types_pb2.AlignerTag, path: str) -> AlignerTag:
    """Return the tag in `message`, which stands at `path`.

    Raises:
        InvalidFieldError: a field is missing, empty, too long or does not print.
    """
    for side in ("source", "target"):
        _require(message, side, path)
    source = decode_model_tag_at(message.source, f"{path}.source")
    target = decode_model_tag_at(message.target, f"{path}.target")
    with _at(path, drops="aligner."):
        return AlignerTag(
            name=message.name, version=message.version, source=source, target=target, digest=message.digest
        )


def _decode_all(
    messages: Iterable[_Listed],
    path: str,
    decode: Callable[[_Listed, str], _Decoded],
    faults: list[InvalidFieldError],
) -> list[_Decoded]:
    decoded = []
    for position, message in enumerate(messages):
        try:
            decoded.append(decode(message, f"{path}[{position}]"))
        except InvalidFieldError as error:
            faults.append(error)
    return decoded


def _encode_fields(policy: RoutePolicy | PolicyOverrides, breaker: BreakerPolicy | BreakerOverrides) -> pb.RoutePolicy:
    """Return what is not None as a message."""
    message = pb.RoutePolicy(**{name: getattr(policy, name) for name in _POLICY_NUMBERS})
    if policy.mode is not None:
        message.mode = cast("pb.RouteMode.ValueType", _MODES.encode(policy.mode))
    if policy.transfer_encoding is not None:
        message.transfer_encoding = encode_transfer_encoding(policy.transfer_encoding)
    numbers: dict[str, Any] = {name: getattr(breaker, name) for name in _BREAKER_NUMBERS}
    seconds = {name: getattr(breaker, own) for name, own in _BREAKER_DURATIONS.items()}
    durations = {name: encode_duration(value) for name, value in seconds.items() if value is not None}
    encoded = pb.BreakerPolicy(**numbers, **cast("dict[str, Any]", durations))
    if encoded.ListFields():
        message.breaker.CopyFrom(encoded)
    return message


def _given(message: Message, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _require(message: Message, field: str, path: str) -> None:
    if not message.HasField(field):
        raise InvalidFieldError(f"{path}.{field}", "is required")


def _below(path: str, error: InvalidFieldError, drops: str = "") -> InvalidFieldError:
    return InvalidFieldError(f"{path}.{error.field.removeprefix(drops)}", error.problem)


@contextmanager
def _at(path: str, *, drops: str = "") -> Iterator[None]:
    """Name what the core refuses by its place in the schema."""
    try:
        yield
    except InvalidFieldError as error:
        raise _below(path, error, drops) from error
