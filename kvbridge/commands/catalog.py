"""`kvbridge catalog check`, `kvbridge catalog show` and `kvbridge kill-switch`."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from kvbridge.catalog_file import CatalogFileError, load_catalog_file
from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.catalog import Catalog, ModelPattern, RouteMode, RoutePolicy
from kvbridge.wire.catalog import encode_catalog

if TYPE_CHECKING:
    from kvbridge.client.admin import AlignerInspection, CatalogInspection, RouteInspection


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    catalog = commands.add_parser(
        "catalog", help="check a catalog file, or show the catalog of a running bridge"
    ).add_subparsers(required=True, metavar="COMMAND")
    check = _add(catalog, "check", "say whether a catalog file would run, and what it declares", _check)
    check.add_argument("file", metavar="FILE", help="YAML file, as for `kvbridge serve --catalog`")
    add_target(_add(catalog, "show", "show the catalog of a running bridge, and how its breakers stand", _show))
    text = "turn every handoff into text, or end that"
    switch = add_target(_add(commands, "kill-switch", text, lambda options: _switch(options, switch)))
    switch.add_argument("engaged", choices=["on", "off"])
    switch.add_argument("--why", help="for those who find the switch later; required with on")


def _add(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Any:
    command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command


def _check(options: argparse.Namespace) -> int:
    try:
        catalog = load_catalog_file(options.file)
    except CatalogFileError as error:
        problems = [asdict(problem) for problem in error.problems]
        found = {"file": error.path, "ok": False, "problems": problems, "problems_total": error.problems_total}
        _print(options, found, error.lines)
        return 1
    declared = {"file": options.file, "ok": True, **_summary(catalog)}
    _print(options, declared, [f"{options.file}: would run", *_summary_lines(_summary(catalog))])
    return 0


def _show(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        running, aligners, routes = bridge.admin.catalog(), bridge.admin.aligners(), bridge.admin.routes()
    fields = {
        "version": running.version,
        "file": running.file,
        "changed_at": running.changed_at.isoformat(),
        "file_problem": running.file_problem,
        "kill_switch_reason": running.kill_switch_reason,
        "catalog": MessageToDict(encode_catalog(running.catalog), preserving_proto_field_name=True),
        "unusable_aligners": [_unusable(listed) for listed in aligners if listed.problem],
        "breakers": {
            listed.route.name: {"state": listed.breaker_state, "detail": listed.breaker_detail} for listed in routes
        },
    }
    _print(options, fields, _running_lines(running, aligners, routes))
    return 0


def _switch(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if options.engaged == "on" and options.why is None:
        parser.error("on needs --why: for those who find the switch later")
    with connected(options) as bridge:
        engaged = bridge.admin.set_kill_switch(engaged=options.engaged == "on", why=options.why or "")
    lines = ["handoffs go by their routes again"]
    if engaged:
        lines = ["every handoff is text, until this is ended (or the node stops, unless its kill_switch_file keeps it)"]
    if engaged and options.engaged == "off":
        lines = ["every handoff is still text: the catalog itself declares the kill switch"]
    _print(options, {"engaged": engaged}, lines)
    return 0


def _print(options: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    sys.stdout.write((json.dumps(value) if options.json else "\n".join(lines)) + "\n")


def _summary(catalog: Catalog) -> dict[str, Any]:
    modes = Counter(catalog.policy_of(route).mode for route in catalog.routes)
    problems = ((entry.tag, catalog.aligner_problem(entry.tag)) for entry in catalog.aligners)
    return {
        "kill_switch": catalog.kill_switch,
        "models": len(catalog.models),
        "aligners": len(catalog.aligners),
        "routes": len(catalog.routes),
        "default_mode": catalog.defaults.mode.value,
        "routes_by_mode": {mode.value: modes[mode] for mode in RouteMode},
        "unusable_aligners": [
            {"name": tag.name, "version": tag.version, "problem": problem} for tag, problem in problems if problem
        ],
        "strays": [
            {"route": route.name, "field": side, "fits_no_model": _pattern(pattern)}
            for route, side, pattern in catalog.strays()
        ],
    }


def _summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    if summary["kill_switch"]:
        yield "the kill switch is on: every handoff is text"
    yield f"models: {summary['models']}, aligners: {summary['aligners']}, routes: {summary['routes']}"
    by_mode = ", ".join(f"{count} {mode.lower()}" for mode, count in summary["routes_by_mode"].items())
    yield f"routes by mode: {by_mode}; where none fits: {summary['default_mode'].lower()}"
    for unusable in summary["unusable_aligners"]:
        yield f"aligner {unusable['name']} {unusable['version']} cannot be used: {unusable['problem']}"
    for stray in summary["strays"]:
        yield f"route {stray['route']}: its {stray['field']} fits no model of this file: {stray['fits_no_model']}"


def _pattern(pattern: ModelPattern) -> str:
    named = {"name": pattern.name, "revision": pattern.revision, "adapter": pattern.adapter}
    said = [f"{name} {value!r}" for name, value in named.items() if value is not None and (value or name == "adapter")]
    return ", ".join(said) or "any"


def _unusable(listed: AlignerInspection) -> dict[str, str]:
    tag = listed.aligner.tag
    return {"name": tag.name, "version": tag.version, "problem": listed.problem}


def _running_lines(
    running: CatalogInspection, aligners: Iterable[AlignerInspection], routes: Iterable[RouteInspection]
) -> Iterator[str]:
    catalog = running.catalog
    whence = f"from {running.file}" if running.file else "changed by calls"
    yield f"version {running.version}, {whence}, since {running.changed_at:%Y-%m-%d %H:%M:%S} UTC"
    if running.file_problem:
        yield "the file's newest content is refused, and the one before it runs:"
        yield from (f"  {line}" for line in running.file_problem.splitlines())
    if catalog.kill_switch:
        why = f" ({running.kill_switch_reason})" if running.kill_switch_reason else ""
        yield f"the kill switch is on{why}: every handoff is text"
    yield f"defaults: {_policy(catalog.defaults)}"
    for model in catalog.models:
        adapter = f", adapter {model.tag.adapter}" if model.tag.adapter else ""
        family = f", family {model.family}" if model.family else ""
        yield f"model {model.tag.name} {model.tag.revision}{adapter}{family}"
    for listed in aligners:
        entry = listed.aligner
        state = f"cannot be used: {listed.problem}" if listed.problem else f"error {entry.alignment_error:g}"
        way = f"{entry.tag.source.name} to {entry.tag.target.name}"
        yield f"aligner {entry.tag.name} {entry.tag.version}: {way}, {state}"
    for found in routes:
        route = found.route
        way = f"{_pattern(route.source)} to {_pattern(route.target)}, edge {route.edge or 'any'}"
        breaker = f"breaker {found.breaker_state}{f' ({found.breaker_detail})' if found.breaker_detail else ''}"
        yield f"route {route.name}: {way}: {_policy(found.effective)}; {breaker}"


def _policy(policy: RoutePolicy) -> str:
    share = f" {policy.canary_percent:g} %" if policy.mode is RouteMode.CANARY else ""
    return f"{policy.mode.value.lower()}{share}, at least {policy.tokens_min} tokens, gain {policy.gain_min:g}"
