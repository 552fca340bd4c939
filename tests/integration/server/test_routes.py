"""Routes of a real bridge: how far each is rolled out, what its breaker does, and what does not pay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvbridge.core.catalog import BreakerOverrides, ModelEntry, PolicyOverrides, Route, RouteMode
from kvbridge.core.descriptor import FallbackText, PayloadReference, PayloadSpec
from kvbridge.core.reasons import Reason
from kvbridge.v1 import catalog_service_pb2 as catalog_pb
from kvbridge.v1 import handoff_service_pb2 as pb
from kvbridge.v1 import inspect_service_pb2, types_pb2
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from kvbridge.wire import encode_duration, encode_model_tag, encode_reason, encode_reference
from kvbridge.wire.catalog import encode_model, encode_route
from tests import builders
from tests.api import CALL_SECONDS, ApiClient, acquire_request, request_id
from tests.harness import BridgeProcess, running_bridge, wait_for
from tests.integration.server.refusals import refused

BAD_SHARE = BreakerOverrides(samples_min=4, bad_share_max=0.4, window_seconds=60.0, open_seconds=0.05, trials=2)
PATIENT = replace(BAD_SHARE, open_seconds=60.0)
"""The same for routes that stay text until the test goes on."""
FULL = types_pb2.VERIFICATION_FULL


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run one bridge, whose catalog calls change; every test here has an edge of its own."""
    with running_bridge("--catalog=", "--unmeasured-tokens-min", "1") as process:
        yield process


def call(client: ApiClient, method: str, request: Any) -> Any:
    """Call a method of the catalog's service."""
    stub = CatalogServiceStub(client.channel)
    return getattr(stub, method)(request, metadata=client.metadata, timeout=CALL_SECONDS)


def put(client: ApiClient, name: str, **policy: Any) -> None:
    """Declare what holds on the edge of this name."""
    route = Route(name=name, edge=name, overrides=PolicyOverrides(**policy))
    call(client, "PutRoute", catalog_pb.PutRouteRequest(request_id=request_id(), route=encode_route(route)))


def breaker_state(client: ApiClient, name: str) -> str:
    """Return the state of a route's breaker, as people are shown it."""
    listed = call(client, "ListRoutes", catalog_pb.ListRoutesRequest()).routes
    [state] = [route.breaker_state for route in listed if route.route.name == name]
    return str(state)


def explained(client: ApiClient) -> inspect_service_pb2.HandoffRecord:
    """Return the record of the newest handoff."""
    answer: inspect_service_pb2.ExplainHandoffResponse = client.call(
        "ExplainHandoff", inspect_service_pb2.ExplainHandoffRequest(last=True)
    )
    return answer.record


def figures(part: inspect_service_pb2.PartRecord, reason: Reason) -> dict[str, str]:
    """Return what the check of a reason looked at."""
    [found] = [check for check in part.checks if check.reason == encode_reason(reason)]
    return dict(found.figures)


def published(client: ApiClient, key: str, **changes: Any) -> PayloadSpec:
    """Publish a payload of ten tokens with some fields changed."""
    spec = builders.spec(key=key, **changes)
    client.publish(spec, verification=types_pb2.VERIFICATION_DIGEST)
    return spec


def asked(client: ApiClient, spec: PayloadSpec, **changes: Any) -> pb.AcquireResponse:
    """Acquire, and return the whole answer."""
    response: pb.AcquireResponse = client.call("Acquire", acquire_request(spec, **changes))
    return response


def report(client: ApiClient, handoff_id: str, quality: Any = pb.HANDOFF_QUALITY_BAD) -> None:
    """Say that a cache was used, and how good the result was."""
    request = pb.ReportRequest(
        request_id=request_id(), handoff_id=handoff_id, use=pb.HANDOFF_USE_USED, quality=quality, detail="nonsense"
    )
    client.call("Report", request)


def has_cache(part: pb.Part) -> bool:
    """Tell whether an answer is a lease."""
    return part.WhichOneof("directive") == "kv"


# How far a route is rolled out


def test_a_route_is_switched_on_and_off(client: ApiClient) -> None:
    """What is declared holds from the next handoff on, and leases that are out stay."""
    spec = published(client, "switch")
    put(client, "switch", mode=RouteMode.ON)
    lease = client.acquire(spec, edge="switch")
    assert has_cache(lease)
    put(client, "switch", mode=RouteMode.OFF)
    refused(client.acquire(spec, edge="switch"), Reason.ROUTE_OFF, "'switch'", "off")
    assert client.release(lease.kv.lease_token).expired_tokens == []
    assert has_cache(client.acquire(spec, edge="another"))


def test_a_route_that_shadows_hands_out_text_and_keeps_nothing(client: ApiClient, other: ApiClient) -> None:
    """Everything is done, bytes included; the record says whether the cache would have been handed over."""
    put(client, "shadow", mode=RouteMode.SHADOW)
    spec = published(client, "shadow")
    leases = client.arena_usage().leases
    refused(other.acquire(spec, edge="shadow", verification=FULL), Reason.ROUTE_OFF, "shadows")
    [part] = explained(other).parts
    assert part.would_have_passed
    assert part.verified_now == FULL
    assert client.arena_usage().leases == leases
    refused(
        other.acquire(spec, edge="shadow", model=encode_model_tag(builders.model_tag(revision="b"))),
        Reason.MODEL_VERSION_MISMATCH,
    )
    assert not explained(other).parts[0].would_have_passed


def test_a_route_that_shadows_finds_bad_bytes(client: ApiClient) -> None:
    """A cache whose bytes changed would not have been handed over, and has ended for everybody."""
    put(client, "dark", mode=RouteMode.SHADOW)
    spec = _corrupted(client, "dark")
    refused(client.acquire(spec, edge="dark", verification=FULL), Reason.ROUTE_OFF)
    [part] = explained(client).parts
    assert not part.would_have_passed
    refused(client.acquire(spec), Reason.PAYLOAD_CORRUPT)


def _corrupted(client: ApiClient, key: str) -> PayloadSpec:
    """Publish a payload and change one of its bytes afterwards."""
    spec = builders.spec(key=key)
    reserved = client.reserve(spec)
    slot = client.slot(reserved.location)
    slot[4096:] = bytes(len(slot) - 4096)
    client.commit(reserved.reservation_token, verification=types_pb2.VERIFICATION_DIGEST)
    slot[4100] ^= 1
    return spec


def in_canary(client: ApiClient, spec: PayloadSpec, conversations: Sequence[str]) -> set[str]:
    """Return the conversations that are handed caches; the others are told why not."""
    inside = set()
    for conversation in conversations:
        part = client.acquire(spec, edge="canary", affinity=conversation)
        if has_cache(part):
            inside.add(conversation)
            client.release(part.kv.lease_token)
        else:
            refused(part, Reason.CANARY_HOLDOUT, "'canary'")
    return inside


def test_a_canary_grows_and_nobody_flips(client: ApiClient, other: ApiClient) -> None:
    """A conversation is in or out whoever asks and however often, and raising the share takes nobody out."""
    spec = published(client, "canary")
    conversations = [f"conversation-{number}" for number in range(100)]
    before: set[str] = set()
    for percent in (0.0, 30.0, 60.0, 100.0):
        put(client, "canary", mode=RouteMode.CANARY, canary_percent=percent)
        inside = in_canary(client, spec, conversations)
        assert inside == in_canary(other, spec, conversations)
        assert before <= inside
        assert abs(len(inside) - percent) <= 20
        before = inside
    assert len(before) == len(conversations)


def test_a_plan_is_in_the_canary_as_a_whole(client: ApiClient) -> None:
    """Without an affinity a plan sticks to its first key, so that its parts do not take different sides."""
    put(client, "plans", mode=RouteMode.CANARY, canary_percent=50.0)
    tokens = builders.tokens(30)
    for plan in range(20):
        keys = [f"plan-{plan}/{part}" for part in range(3)]
        specs = [published(client, key, **builders.piece(n)) for n, key in enumerate(keys)]
        references = [encode_reference(PayloadReference(key=key, generation=0)) for key in keys]
        answer = asked(client, replace(specs[0], tokens=tokens, capacity_tokens=30), payloads=references, edge="plans")
        assert len({has_cache(part) for part in answer.parts}) == 1


def test_the_kill_switch_turns_everything_into_text(client: ApiClient) -> None:
    """One call stops every handoff on every route, says why in each answer, and another one ends that."""
    spec = published(client, "killed")
    put(client, "killed", mode=RouteMode.ON)

    def switch(*, engaged: bool) -> None:
        request = catalog_pb.SetKillSwitchRequest(request_id=request_id(), engaged=engaged, why="incident 17")
        assert call(client, "SetKillSwitch", request).engaged is engaged

    switch(engaged=True)
    try:
        for edge in ("killed", "", "another"):
            refused(client.acquire(spec, edge=edge), Reason.ROUTE_OFF, "kill switch", "incident 17")
        assert not explained(client).parts[0].would_have_passed
    finally:
        switch(engaged=False)
    assert has_cache(client.acquire(spec, edge="killed"))


# Breakers


def trip_by_reports(client: ApiClient, spec: PayloadSpec) -> None:
    """Use caches along the edge named as the payload, and report that the results were bad, until the route trips."""
    for _ in range(4):
        answer = asked(client, spec, edge=spec.key)
        assert has_cache(answer.parts[0])
        client.release(answer.parts[0].kv.lease_token)
        report(client, answer.handoff_id)
    assert breaker_state(client, spec.key) in {"OPEN", "HALF_OPEN"}


def trial(client: ApiClient, spec: PayloadSpec) -> pb.AcquireResponse:
    """Ask until a trial is let through."""

    def let_through() -> pb.AcquireResponse | None:
        answer = asked(client, spec, edge=spec.key)
        return answer if has_cache(answer.parts[0]) else None

    answer: pb.AcquireResponse = wait_for(let_through)
    return answer


def changes(bridge: BridgeProcess, route: str) -> list[tuple[str, str]]:
    """Return the changes of a route's breaker that the bridge has announced."""
    lines = (json.loads(line) for line in bridge.log.splitlines() if line.startswith("{"))
    told = [line for line in lines if line["event"] == "route breaker changed" and line["route"] == route]
    return [(line["before"], line["after"]) for line in told]


def test_bad_reports_trip_a_route_and_good_trials_close_it(client: ApiClient, bridge_process: BridgeProcess) -> None:
    """The route turns into text by itself, says so, tries again by itself, and recovers; other routes go on."""
    spec = published(client, "reported")
    put(client, "reported", breaker=PATIENT)
    trip_by_reports(client, spec)
    refused(client.acquire(spec, edge="reported"), Reason.ROUTE_OFF, "'reported'", "tripped", "of 4")
    assert has_cache(client.acquire(spec, edge="another"))
    put(client, "reported", breaker=replace(BAD_SHARE, open_seconds=1.0))

    def is_closed_by_a_good_trial() -> bool:
        answer = trial(client, spec)
        client.release(answer.parts[0].kv.lease_token)
        report(client, answer.handoff_id, pb.HANDOFF_QUALITY_GOOD)
        return breaker_state(client, "reported") == "CLOSED"

    assert not is_closed_by_a_good_trial()
    wait_for(is_closed_by_a_good_trial)  # A trial of which nothing is heard for as long as the route was text is none.
    assert has_cache(client.acquire(spec, edge="reported"))
    assert changes(bridge_process, "reported") == [
        ("CLOSED", "OPEN"),
        ("OPEN", "HALF_OPEN"),
        ("HALF_OPEN", "CLOSED"),
    ]


def test_a_bad_trial_opens_the_route_again(client: ApiClient, bridge_process: BridgeProcess) -> None:
    """One complaint about a trial is enough, although its lease came back first."""
    spec = published(client, "again")
    put(client, "again", breaker=BAD_SHARE)
    trip_by_reports(client, spec)
    answer = trial(client, spec)
    client.release(answer.parts[0].kv.lease_token)
    report(client, answer.handoff_id)
    assert changes(bridge_process, "again")[:3] == [("CLOSED", "OPEN"), ("OPEN", "HALF_OPEN"), ("HALF_OPEN", "OPEN")]


def test_corrupt_payloads_trip_a_route(client: ApiClient) -> None:
    """Bytes that changed count, each payload once; a good payload is text then, too."""
    good = published(client, "rotten")
    put(client, "rotten", breaker=PATIENT)
    for number in range(4):
        spec = _corrupted(client, f"rotten/{number}")
        refused(client.acquire(spec, edge="rotten", verification=FULL), Reason.PAYLOAD_CORRUPT)
        assert breaker_state(client, "rotten") == ("OPEN" if number == 3 else "CLOSED")
        refused(client.acquire(spec, edge="rotten"), Reason.PAYLOAD_CORRUPT)
    refused(client.acquire(good, edge="rotten"), Reason.ROUTE_OFF, "tripped")


# What pays


def model_of(name: str) -> Any:
    """Return a model of which this bridge has measured nothing yet."""
    return builders.model_tag(name=name)


def measure(client: ApiClient, name: str, *, seconds: float, scatter: tuple[int, float] | None = None) -> None:
    """Report often enough how long a prefill of ten tokens takes, and how long it takes to bring a cache over."""
    for _ in range(3):
        client.call(
            "Report",
            pb.ReportRequest(
                request_id=request_id(),
                model=encode_model_tag(model_of(name)),
                prefill=pb.MeasuredPrefill(tokens=10, duration=encode_duration(seconds)),
                scatter=None
                if scatter is None
                else pb.MeasuredTransfer(bytes=scatter[0], duration=encode_duration(scatter[1])),
            ),
        )


def test_the_floor_holds_until_something_is_measured(client: ApiClient) -> None:
    """Few tokens are text while nobody knows what their prefill takes, and a cache once that is known."""
    put(client, "floor", tokens_min_unmeasured=512)
    spec = published(client, "floor", model=model_of("floor"))
    refused(client.acquire(spec, edge="floor"), Reason.TOO_SHORT_TO_PAY, 10, 512)
    seen = figures(explained(client).parts[0], Reason.TOO_SHORT_TO_PAY)
    assert (seen["tokens_min_unmeasured"], seen["handoff_seconds"]) == ("512", "0")
    measure(client, "floor", seconds=0.05)
    assert has_cache(client.acquire(spec, edge="floor"))
    seen = figures(explained(client).parts[0], Reason.TOO_SHORT_TO_PAY)
    assert float(seen["prefill_seconds"]) == pytest.approx(0.05)


def test_a_handoff_that_takes_longer_than_the_prefill_does_not_pay(client: ApiClient) -> None:
    """Measured costs decide, and the answer names both."""
    spec = published(client, "dear", model=model_of("dear"))
    measure(client, "dear", seconds=0.05, scatter=(2560, 0.2))
    refused(client.acquire(spec, edge="dear"), Reason.TOO_SHORT_TO_PAY, "0.05", "0.2")
    cheap = published(client, "cheap", model=model_of("cheap"))
    measure(client, "cheap", seconds=0.05, scatter=(2560, 0.01))
    assert has_cache(client.acquire(cheap, edge="cheap"))
    put(client, "cheap", gain_min=6.0)
    refused(client.acquire(cheap, edge="cheap"), Reason.TOO_SHORT_TO_PAY, 6)


@pytest.mark.parametrize(
    ("policy", "depth", "reason"),
    [
        ({"depth_max": 2}, 3, Reason.DEPTH_EXCEEDED),
        ({"depth_max": 2}, 2, None),
        ({"depth_min": 2}, 1, Reason.TOO_SHORT_TO_PAY),
        ({"depth_min": 2}, 2, None),
        ({"tokens_min": 11}, 0, Reason.TOO_SHORT_TO_PAY),
        ({"tokens_min": 10}, 0, None),
    ],
)
def test_a_route_demands_depth_and_length(
    client: ApiClient, policy: dict[str, int], depth: int, reason: Reason | None
) -> None:
    """A chain must be neither too deep nor, where that is demanded, too short; nor may the cache be."""
    spec = published(client, "demands")
    put(client, "demands", **policy)
    part = client.acquire(spec, edge="demands", depth=depth)
    if reason is None:
        assert has_cache(part)
    else:
        refused(part, reason)


def test_at_most_three_segments_of_a_plan_are_caches(client: ApiClient) -> None:
    """Of four segments the oldest goes as text, unless its route allows more."""
    keys = [f"segments/{part}" for part in range(4)]
    for n, key in enumerate(keys):
        published(client, key, **builders.piece(n))
    references = [encode_reference(PayloadReference(key=key, generation=0)) for key in keys]
    whole = builders.spec(key="segments", tokens=builders.tokens(40), capacity_tokens=40)
    answer = asked(client, whole, payloads=references, edge="segments")
    assert [has_cache(part) for part in answer.parts] == [False, True, True, True]
    refused(answer.parts[0], Reason.DEPTH_EXCEEDED, 3)
    put(client, "segments", cached_segments_max=4)
    assert all(has_cache(part) for part in asked(client, whole, payloads=references, edge="segments").parts)


def test_a_route_may_want_one_family(client: ApiClient) -> None:
    """Versions of which the catalog does not say that they are alike are not, whatever else fits."""
    put(client, "family", same_family=True)
    spec = published(client, "family")
    assert has_cache(client.acquire(spec, edge="family"))
    stranger = builders.model_tag(name="stranger")
    for model in (spec.model, stranger):
        entry = ModelEntry(tag=model, family=f"family of {model.name}")
        call(client, "PutModel", catalog_pb.PutModelRequest(request_id=request_id(), model=encode_model(entry)))
    refused(client.acquire(spec, edge="family", model=encode_model_tag(stranger)), Reason.MODEL_VERSION_MISMATCH)
    [part] = explained(client).parts
    [off] = [check for check in part.checks if check.reason == encode_reason(Reason.ROUTE_OFF)]
    assert not off.passed
    assert "one family" in off.problem


def test_text_is_there_in_every_refusal(client: ApiClient) -> None:
    """Whatever a route refuses, its answer holds what to take instead."""
    put(client, "told", mode=RouteMode.OFF)
    spec = published(client, "told", fallback=FallbackText(text="the text", summary="in short"))
    part = client.acquire(spec, edge="told")
    refused(part, Reason.ROUTE_OFF)
    assert part.text.fallback.summary == "in short"
