"""The catalog of a real bridge: changed by calls, or read from a file that is reloaded while it serves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

import kvbridge
from kvbridge import (
    ArgumentTypeError,
    ArgumentValueError,
    BreakerOverrides,
    ChangeRefusedError,
    ModelEntry,
    ModelPattern,
    PolicyOverrides,
    Route,
    RouteMode,
)
from kvbridge.v1 import catalog_service_pb2 as pb
from kvbridge.v1.catalog_service_pb2_grpc import CatalogServiceStub
from tests import builders, catalogs
from tests.api import CALL_SECONDS, ApiClient, field_of, request_id
from tests.harness import BridgeProcess, running_bridge, wait_for

OLD = ModelEntry(tag=builders.model_tag(name="m", revision="1"), family="f", geometry=builders.geometry())
NEW = ModelEntry(tag=builders.model_tag(name="m", revision="2"))
ALIGNER = catalogs.aligner(catalogs.aligner_tag(OLD.tag))
ROUTE = Route(
    name="r",
    source=ModelPattern(name="m", adapter=""),
    edge="planner",
    overrides=PolicyOverrides(mode=RouteMode.SHADOW, breaker=BreakerOverrides(window_seconds=1.406)),
)


@pytest.fixture(scope="module")
def bridge_process() -> Iterator[BridgeProcess]:
    """Run one bridge, whose catalog calls change, for those tests that do not mind what is in it."""
    with running_bridge("--catalog=") as process:
        yield process


@pytest.fixture
def bridge() -> Iterator[kvbridge.Bridge]:
    """Connect to a bridge of this test's own, whose catalog calls change."""
    with running_bridge("--catalog=") as process, kvbridge.connect(process.target) as connected:
        yield connected


def _put(text: str, file: Path) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def _declaring(*names: str, mode: str = "on") -> str:
    return "routes: [" + ", ".join(f"{{name: {name}, edge: {name}, policy: {{mode: {mode}}}}}" for name in names) + "]"


def _serving(file: Path) -> tuple[str, ...]:
    return ("--catalog", str(file), "--catalog-poll-seconds", "0.02")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a catalog file with one route."""
    path = tmp_path / "catalog.yaml"
    path.write_text(_declaring("a"))
    return path


def _route_names(bridge: kvbridge.Bridge) -> list[str]:
    return [route.name for route in bridge.admin.catalog().catalog.routes]


def test_what_is_put_is_shown_and_what_is_removed_is_gone(bridge: kvbridge.Bridge) -> None:
    """Models, aligners and routes go in, are listed as they were put, and go out again; each is a version."""
    admin = bridge.admin
    before = admin.catalog()
    assert (before.version, before.file, before.file_problem) == (0, "", "")
    admin.put_model(OLD)
    admin.put_aligner(ALIGNER)
    admin.put_route(ROUTE)
    shown = admin.catalog()
    assert (shown.catalog.models, shown.catalog.aligners, shown.catalog.routes) == ((OLD,), (ALIGNER,), (ROUTE,))
    assert shown.version == 3
    assert shown.changed_at >= before.changed_at
    assert admin.models() == [OLD]
    [listed] = admin.aligners()
    assert (listed.aligner, listed.problem) == (ALIGNER, "")
    [route] = admin.routes()
    assert (route.route, route.breaker_state) == (ROUTE, "CLOSED")
    assert route.effective == ROUTE.overrides.resolve(shown.catalog.defaults)
    admin.remove_route("r")
    admin.remove_aligner(ALIGNER.tag)
    admin.remove_model(OLD.tag)
    after = admin.catalog()
    assert after.catalog == before.catalog
    assert after.version == 6


def test_a_new_model_version_names_the_aligners_that_it_leaves_behind(bridge: kvbridge.Bridge) -> None:
    """They go on for the old version until that is removed."""
    admin = bridge.admin
    assert admin.put_model(OLD) == []
    admin.put_aligner(ALIGNER)
    assert admin.put_model(NEW) == [ALIGNER.tag]
    assert [listed.problem for listed in admin.aligners()] == [""]
    admin.remove_model(OLD.tag)
    [listed] = admin.aligners()
    assert "its source is m 1" in listed.problem


def test_a_refused_change_says_why_and_changes_nothing(bridge: kvbridge.Bridge) -> None:
    """Wrong types, values that cannot be, conflicts and names that are not there each raise their own error."""
    admin = bridge.admin
    admin.put_route(ROUTE)
    with pytest.raises(ArgumentTypeError, match="model"):
        admin.put_model("m")  # type: ignore[arg-type]
    for overrides, field in (
        (PolicyOverrides(canary_percent=101.0), "route.policy.canary_percent"),
        (PolicyOverrides(tokens_min=-1), "route.policy.tokens_min"),
        (PolicyOverrides(gain_min="high"), "route.policy.gain_min"),  # type: ignore[arg-type]
        (PolicyOverrides(breaker=BreakerOverrides(open_seconds=-1.0)), "route.policy.breaker.open"),
    ):
        with pytest.raises(ArgumentValueError) as caught:
            admin.put_route(replace(ROUTE, name="s", overrides=overrides))
        assert caught.value.field == field
    with pytest.raises(ArgumentValueError, match=r"model\.family"):
        admin.put_model(replace(OLD, family="\n"))
    with pytest.raises(ArgumentValueError, match="names the same edge"):
        admin.put_route(replace(ROUTE, name="s"))
    with pytest.raises(ChangeRefusedError, match="not in the catalog"):
        admin.remove_route("s")
    assert admin.catalog().version == 1


def test_pages_stay_good_while_the_catalog_changes(bridge_process: BridgeProcess) -> None:
    """A token goes on behind its last entry although that was removed; a made-up one is refused by field."""
    with kvbridge.connect(bridge_process.target) as bridge, ApiClient(bridge_process, attached=False) as client:
        for name in ("a", "b", "c", "d"):
            bridge.admin.put_route(Route(name=name, edge=name))
        stub = CatalogServiceStub(client.channel)
        first = stub.ListRoutes(pb.ListRoutesRequest(page_size=2), metadata=client.metadata, timeout=CALL_SECONDS)
        assert [listed.route.name for listed in first.routes] == ["a", "b"]
        bridge.admin.remove_route("b")
        request = pb.ListRoutesRequest(page_size=2, page_token=first.next_page_token)
        second = stub.ListRoutes(request, metadata=client.metadata, timeout=CALL_SECONDS)
        assert [listed.route.name for listed in second.routes] == ["c", "d"]
        assert second.next_page_token == ""
        for token in ("x", "W10=", "MQ==", "W1tdXQ==", "A" * 100_000):
            request = pb.ListRoutesRequest(page_token=token)
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListRoutes(request, metadata=client.metadata, timeout=CALL_SECONDS)
            assert field_of(caught.value) == "page_token"
        with pytest.raises(grpc.RpcError) as caught:
            stub.ListModels(pb.ListModelsRequest(page_size=1001), metadata=client.metadata, timeout=CALL_SECONDS)
        assert field_of(caught.value) == "page_size"


def test_a_repeated_request_changes_nothing_twice(bridge_process: BridgeProcess) -> None:
    """The same request id gives the same version; used for another request it is refused."""
    with ApiClient(bridge_process, attached=False) as client:
        stub = CatalogServiceStub(client.channel)
        request = pb.PutRouteRequest(request_id=request_id(), route=pb.Route(name="once", edge="once"))
        versions = {stub.PutRoute(request, metadata=client.metadata, timeout=CALL_SECONDS).version for _ in range(3)}
        assert len(versions) == 1
        request.route.edge = "another"
        with pytest.raises(grpc.RpcError) as caught:
            stub.PutRoute(request, metadata=client.metadata, timeout=CALL_SECONDS)
        assert field_of(caught.value) == "request_id"


def test_a_file_is_reloaded_while_the_bridge_serves(file: Path) -> None:
    """Good content runs, bad or missing content leaves what runs and is told once, and good content ends that."""
    with running_bridge(*_serving(file)) as process, kvbridge.connect(process.target) as bridge:
        admin = bridge.admin
        assert _route_names(bridge) == ["a"]
        _put(_declaring("a", mode="off"), file)
        wait_for(lambda: admin.catalog().catalog.routes[0].overrides.mode is RouteMode.OFF)
        version = admin.catalog().version
        _put("routes:\n- {name: b, edgy: b}\n", file)
        problem = wait_for(lambda: admin.catalog().file_problem)
        assert problem == f"{file}:2: routes[0].edgy: there is no such field; did you mean edge?"
        assert (admin.catalog().version, _route_names(bridge)) == (version, ["a"])
        file.unlink()
        wait_for(lambda: "No such file" in admin.catalog().file_problem)
        assert _route_names(bridge) == ["a"]
        _put(_declaring("b"), file)
        wait_for(lambda: _route_names(bridge) == ["b"])
        assert admin.catalog().file_problem == ""
        assert process.log.count("edgy") == 1


def test_a_swapped_link_is_a_reload(tmp_path: Path) -> None:
    """The way in which ConfigMaps are updated is seen."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "catalog.yaml").write_text(_declaring(name))
    link, new = tmp_path / "..data", tmp_path / "..new"
    link.symlink_to("a")
    (tmp_path / "catalog.yaml").symlink_to("..data/catalog.yaml")
    with (
        running_bridge(*_serving(tmp_path / "catalog.yaml")) as process,
        kvbridge.connect(process.target) as bridge,
    ):
        assert _route_names(bridge) == ["a"]
        new.symlink_to("b")
        new.replace(link)
        wait_for(lambda: _route_names(bridge) == ["b"])


def test_a_hangup_is_a_reload(file: Path) -> None:
    """SIGHUP ends no bridge: it looks at the file, however rarely it does otherwise."""
    flags = ("--catalog", str(file), "--catalog-poll-seconds", "3600")
    with running_bridge(*flags) as process, kvbridge.connect(process.target) as bridge:
        _put(_declaring("b"), file)
        process.signal(signal.SIGHUP)
        wait_for(lambda: _route_names(bridge) == ["b"])


def test_what_a_file_declares_is_changed_there(file: Path) -> None:
    """Changes by calls are refused by the file's name; the kill switch works all the same."""
    with running_bridge(*_serving(file)) as process, kvbridge.connect(process.target) as bridge:
        admin = bridge.admin
        for change in (
            lambda: admin.put_model(OLD),
            lambda: admin.remove_model(OLD.tag),
            lambda: admin.put_aligner(ALIGNER),
            lambda: admin.remove_aligner(ALIGNER.tag),
            lambda: admin.put_route(ROUTE),
            lambda: admin.remove_route("a"),
        ):
            with pytest.raises(ChangeRefusedError, match=re.escape(str(file))):
                change()
        assert admin.set_kill_switch(engaged=True, why="bad answers")
        assert admin.catalog().catalog.kill_switch
        assert "bad answers" in admin.catalog().kill_switch_reason
        assert not admin.set_kill_switch(engaged=False)
        assert not admin.catalog().catalog.kill_switch


def test_a_bad_file_stops_the_start(file: Path) -> None:
    """The process says line and field and ends instead of serving."""
    file.write_text("kill_switch: maybe")
    with (
        pytest.raises(RuntimeError, match=re.escape(f"{file}:1: kill_switch: must be true or false")),
        running_bridge(*_serving(file)),
    ):
        pytest.fail("it serves")


def test_a_thousand_entries_of_each_kind_are_served(tmp_path: Path) -> None:
    """A large file is read at the start, shown whole, and listed page by page."""
    file = tmp_path / "large.yaml"
    file.write_text(_large(1000))
    with running_bridge(*_serving(file)) as process, kvbridge.connect(process.target) as bridge:
        catalog = bridge.admin.catalog(timeout=30.0).catalog
        assert (len(catalog.models), len(catalog.aligners), len(catalog.routes)) == (1000, 1000, 1000)
        assert len(bridge.admin.aligners(timeout=30.0)) == 1000
        assert len(bridge.admin.routes(timeout=30.0)) == 1000
        assert bridge.admin.models(timeout=30.0) == list(catalog.models)


def test_a_catalog_that_fits_no_message_is_listed_in_pages(tmp_path: Path) -> None:
    """Showing it whole is refused by the limit's name; page by page everything is there."""
    file = tmp_path / "large.yaml"
    file.write_text(_large(300))
    flags = (*_serving(file), "--message-bytes-max", "30000")
    with running_bridge(*flags) as process, kvbridge.connect(process.target) as bridge:
        with pytest.raises(ChangeRefusedError, match="message_bytes_max"):
            bridge.admin.catalog()
        with ApiClient(process, attached=False) as client:
            stub, request = CatalogServiceStub(client.channel), pb.ListAlignersRequest(page_size=100)
            names: list[str] = []
            while not names or request.page_token:
                page = stub.ListAligners(request, metadata=client.metadata, timeout=CALL_SECONDS)
                names += [listed.aligner.tag.name for listed in page.aligners]
                request.page_token = page.next_page_token
        assert names == sorted(f"a{number}" for number in range(300))


def _large(count: int) -> str:
    def tag(number: int) -> str:
        return f"{{name: m{number % count}, revision: r, weight_dtype: bfloat16, tokenizer_digest: t}}"

    models = "\n".join(f"- tag: {tag(number)}" for number in range(count))
    aligners = "\n".join(
        f"- tag: {{name: a{number}, version: v, digest: d, source: {tag(number)}, target: {tag(number + 1)}}}\n"
        "  alignment_error: 0.1\n  calibration: {general_tokens: 1}\n  validated: true"
        for number in range(count)
    )
    routes = "\n".join(f"- {{name: r{number}, source: {{name: m{number}}}}}" for number in range(count))
    return f"models:\n{models}\naligners:\n{aligners}\nroutes:\n{routes}\n"


def _kvbridge(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvbridge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_checks_a_file(file: Path) -> None:
    """A good file is summed up; a bad one is told line by line, as text or as JSON, with status 1."""
    good = _kvbridge("catalog", "check", str(file))
    assert good.returncode == 0
    assert "models: 0, aligners: 0, routes: 1" in good.stdout
    file.write_text("kill_switch: maybe\nroutes: [{name: a}, {}]\n")
    bad = _kvbridge("catalog", "check", str(file))
    assert (bad.returncode, bad.stderr) == (1, "")
    assert bad.stdout.splitlines() == [
        f"{file}:1: kill_switch: must be true or false, got 'maybe'",
        f"{file}:2: routes[1].name: must not be empty",
    ]
    told = json.loads(_kvbridge("catalog", "check", str(file), "--json").stdout)
    assert (told["ok"], told["problems"][0]["line"], told["problems"][1]["field"]) == (False, 1, "routes[1].name")


def test_the_command_says_what_could_not_work(tmp_path: Path) -> None:
    """Aligners that cannot be used and routes that fit no model are named, though the file would run."""
    file = tmp_path / "catalog.yaml"
    file.write_text(
        _large(2).replace("validated: true", "validated: false", 1).replace("source: {name: m1}}", "source: {name: x}}")
    )
    summary = json.loads(_kvbridge("catalog", "check", str(file), "--json").stdout)
    assert summary["routes_by_mode"] == {"OFF": 0, "SHADOW": 0, "CANARY": 0, "ON": 2}
    [unusable] = summary["unusable_aligners"]
    assert (unusable["name"], "validated" in unusable["problem"]) == ("a0", True)
    assert summary["strays"] == [{"route": "r1", "field": "source", "fits_no_model": "name 'x'"}]


def test_the_commands_show_a_running_catalog_and_set_the_switch(file: Path) -> None:
    """What they print is what the bridge runs."""
    with running_bridge(*_serving(file)) as process:
        target = ("--target", process.target)
        switched = _kvbridge("kill-switch", "on", "--why", "a drill", *target)
        assert (switched.returncode, switched.stdout) == (
            0,
            "every handoff is text, until this is ended (or the node stops, unless its kill_switch_file keeps it)\n",
        )
        shown = json.loads(_kvbridge("catalog", "show", "--json", *target).stdout)
        assert shown["file"] == str(file)
        assert shown["catalog"]["kill_switch"] is True
        assert "a drill" in shown["kill_switch_reason"]
        assert shown["breakers"]["a"]["state"] == "CLOSED"
        text = _kvbridge("catalog", "show", *target).stdout
        assert f"the kill switch is on ({shown['kill_switch_reason']}): every handoff is text" in text
        assert "route a: any to any, edge a: on" in text
        for why in ((), ("--why", "over")):
            ended = _kvbridge("kill-switch", "off", *why, "--json", *target)
            assert (ended.returncode, json.loads(ended.stdout)) == (0, {"engaged": False})
        unexplained = _kvbridge("kill-switch", "on", *target)
        assert (unexplained.returncode, "--why" in unexplained.stderr.splitlines()[-1]) == (2, True)
