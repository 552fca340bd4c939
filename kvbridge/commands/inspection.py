"""`kvbridge node`, `kvbridge payloads` and `kvbridge payload`: what a running bridge holds, for a person or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.errors import BridgeError
from kvbridge.core.handoff_reference import owner_of
from kvbridge.core.provenance import shown
from kvbridge.core.transfer_encoding import unmarked_key
from kvbridge.wire import encode_descriptor

if TYPE_CHECKING:
    from kvbridge.client.bridge import Bridge
    from kvbridge.client.inspection import DirectoryInspection, NodeInspection, PayloadInspection

_MIB = 1 << 20
_BYTE_STATES = ("reserved", "committed", "draining", "quarantined", "free")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bans:
    """What is not handed over, whatever routes say."""

    kill_switch: bool | None = None
    """Whether every handoff is text; None if that is not shown."""
    kill_switch_reason: str | None = None
    """Why."""
    quarantines: int | None = None
    """How many quarantines of the tenant's payloads are in force."""
    bans_problem: str | None = None
    """Why these are not shown."""


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    _add(commands, "node", "show a running bridge: kill switch, memory, references, limits", _node)
    payloads = _add(commands, "payloads", "list what is published, newest first", _payloads)
    payloads.add_argument("--prefix", default="", help="only keys that start with this")
    payload = _add(commands, "payload", "show one payload in full", _payload)
    payload.add_argument("key", metavar="KEY[@GENERATION]", help="as `kvbridge payloads` shows it")
    payload.add_argument("--generation", type=int, default=0, help="0, the default, means the newest")


def _add(commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]) -> Any:
    command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    add_target(command)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command


def _node(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        node, bans = bridge.node(), _bans(bridge)
    _show(options, {**_node_fields(node), **asdict(bans)}, _node_lines(node, bans))
    return 0


def _payloads(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        found = bridge.payloads(options.prefix)
    _show(options, [_summary(payload) for payload in found], _payload_lines(found))
    return 0


def _payload(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        found = bridge.payload(options.key, options.generation)
        key, _, generation = options.key.rpartition("@")
        if found is None and not options.generation and key and generation.isdecimal():
            found = bridge.payload(key, int(generation))
        missing = [] if found is not None else list(_missing(bridge, options.key))
    if found is None:
        _show(options, None, missing)
        return 1
    fields = {**_summary(found), "descriptor": _described(found)}
    _show(options, fields, json.dumps(fields, indent=2, default=str).splitlines())
    return 0


def _missing(bridge: Bridge, key: str) -> Iterable[str]:
    """Yield why nothing may be found under a key that somebody has read or been sent."""
    owner = owner_of(key)
    yield f"no {'replica of this payload' if owner else 'payload'} occupies memory under this key and generation"
    if not owner:
        yield "a replica of another node's payload is named kvb://NODE/KEY@GENERATION, as `kvbridge payloads` lists it"
        return
    yield f"it is a payload of node {owner}: ask there for the key and generation behind kvb://{owner}/"
    for replica in bridge.payloads(f"{unmarked_key(key)}#"):
        yield f"there is a replica that lost bits: {shown(replica.reference)}"


def _summary(payload: PayloadInspection) -> dict[str, Any]:
    """Return a payload as plain values; its owner is another node if it is a replica."""
    return {**asdict(replace(payload, descriptor=None)), "replica_of_node": owner_of(payload.reference.key) or None}


def _described(payload: PayloadInspection) -> dict[str, Any] | None:
    """Return a descriptor in protobuf's JSON form, without its token ids, of which there may be very many."""
    if payload.descriptor is None:
        return None
    return MessageToDict(encode_descriptor(payload.descriptor), preserving_proto_field_name=True)


def _show(options: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    sys.stdout.write((json.dumps(value, default=str) if options.json else "\n".join(lines)) + "\n")


def _node_fields(node: NodeInspection) -> dict[str, Any]:
    """Return a node as plain values."""
    names = ("node_id", "version", "epoch", "uptime_seconds", "draining", "descriptor_socket_path", "sessions")
    plain = {name: getattr(node, name) for name in names}
    directory = None if node.directory is None else asdict(node.directory)
    return {**plain, "arena": asdict(node.arena), "directory": directory, "limits": dict(node.limits)}


def _bans(bridge: Bridge) -> _Bans:
    try:
        running, quarantines = bridge.admin.catalog(), bridge.quarantines.in_force()
    except BridgeError as error:  # Such as for callers who are shown the node alone.
        return _Bans(bans_problem=str(error))
    switched = running.catalog.kill_switch
    return _Bans(
        kill_switch=switched,
        kill_switch_reason=running.kill_switch_reason if switched else None,
        quarantines=len(quarantines),
    )


def _ban_lines(bans: _Bans) -> Iterable[str]:
    if bans.bans_problem is not None:
        yield f"kill switch and quarantines are not shown: {bans.bans_problem}"
        return
    switch = "off"
    if bans.kill_switch:
        switch = f"on, every handoff is text: {bans.kill_switch_reason}"
    yield f"kill switch: {switch}"
    yield f"quarantines in force: {bans.quarantines}" + (", see `kvbridge quarantine list`" if bans.quarantines else "")


def _node_lines(node: NodeInspection, bans: _Bans) -> Iterable[str]:
    arena = node.arena
    state = "draining" if node.draining else "serving"
    up = f"up {node.uptime_seconds:,.0f} s"
    yield f"{node.node_id}  kvbridge {node.version}  {state}  {up}  {node.sessions} local clients"
    yield from _ban_lines(bans)
    yield f"arena {arena.arena_id}: {arena.size_bytes / _MIB:,.0f} MiB of {arena.page_kind} pages"
    for name in _BYTE_STATES:
        count = getattr(arena, f"{name}_bytes")
        yield f"  {name:<12}{count / _MIB:>10,.1f} MiB  {count / arena.size_bytes:>6.1%}"
    yield f"  {arena.payloads} payloads, {arena.leases} leases, {arena.holds} holds, {arena.reservations} reservations"
    if node.directory is not None:
        yield from _directory_lines(node.directory)
    for name, value in sorted(node.limits.items()):
        yield f"  {name:<28}{value:>18,.12g}"


def _directory_lines(directory: DirectoryInspection) -> Iterable[str]:
    state = "up" if directory.up else f"down: {directory.problem}"
    yield f"directory {directory.kind}: {state}; {directory.orders} orders in force on all nodes"
    for neighbour in directory.neighbours:
        standing = "agrees" if neighbour.agrees else "behind"
        yield f"  {neighbour.node_id:<28}{neighbour.address:<24}{standing if neighbour.reachable else 'unreachable'}"


def _payload_lines(payloads: Iterable[PayloadInspection]) -> Iterable[str]:
    yield f"{'state':<12}{'tokens':>8}{'MiB':>10}{'leases':>8}{'holds':>7}{'age s':>9}{'ends in s':>11}  key@generation"
    for payload in payloads:
        ends = "-" if payload.ends_in_seconds is None else f"{payload.ends_in_seconds:,.0f}"
        numbers = f"{payload.valid_length:>8,}{payload.slot_bytes / _MIB:>10,.1f}{payload.leases:>8}{payload.holds:>7}"
        yield f"{payload.state:<12}{numbers}{payload.age_seconds:>9,.0f}{ends:>11}  {shown(payload.reference)}"
