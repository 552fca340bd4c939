"""`kvbridge quarantine` and `kvbridge unquarantine`: refuse what is contaminated, and see what that touches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.handoff_reference import HandoffReference, is_handoff_reference
from kvbridge.core.provenance import shown
from kvbridge.core.quarantine import AlignerPattern, Quarantine, Target
from kvbridge.core.transfer_encoding import unmarked_key

if TYPE_CHECKING:
    from kvbridge.client.quarantining import QuarantinedPayload, QuarantineOutcome

_ELSEWHERE = (
    "nothing of this name is in memory or was handed over here; a payload of another node is named "
    "kvb://NODE/KEY@GENERATION"
)
_DERIVED = "it derives from "
"""How the reason of a payload begins that is touched through another one."""


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    text = "refuse a model version, an aligner version or a payload, and everything that derives from it"
    quarantine = commands.add_parser("quarantine", help=text, description=text.capitalize() + ".")
    quarantine.add_argument("action", nargs="?", choices=["list"], help="list what is quarantined instead")
    on = quarantine.add_mutually_exclusive_group()
    on.add_argument("--model", dest="on", type=_model, metavar="NAME[@REVISION[+ADAPTER]]", help="a model version")
    on.add_argument("--aligner", dest="on", type=_aligner, metavar="NAME[@VERSION]", help="an aligner version")
    on.add_argument(
        "--payload", dest="on", type=_payload, metavar="KEY@GENERATION", help="one payload, or its handoff reference"
    )
    quarantine.add_argument("--why", default="", help="the reason, for people; consumers are told, too")
    quarantine.add_argument("--dry-run", action="store_true", help="only show what would be touched")
    _add_common(quarantine)
    quarantine.set_defaults(run=lambda options: _quarantine(options, quarantine))
    text = "end a quarantine for payloads that are published from now on"
    unquarantine = commands.add_parser("unquarantine", help=text, description=text.capitalize() + ".")
    unquarantine.add_argument("quarantine_id", metavar="ID", help="as `kvbridge quarantine list` shows it")
    _add_common(unquarantine)
    unquarantine.set_defaults(run=_unquarantine)


def _add_common(command: Any) -> None:
    add_target(command)
    command.add_argument("--json", action="store_true", help="print JSON")


def _quarantine(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if (options.action is None) is (options.on is None):
        parser.error("say what to quarantine: one of --model, --aligner and --payload; or list")
    with connected(options) as bridge:
        if options.action == "list":
            found = bridge.quarantines.in_force()
            _show(options, [_fields(quarantine) for quarantine in found], _list_lines(found))
            return 0
        outcome = bridge.quarantines.impose(options.on, why=options.why, dry_run=options.dry_run)
    _show(options, asdict(outcome), _outcome_lines(options.on, outcome))
    return 0


def _unquarantine(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        bridge.quarantines.lift(options.quarantine_id)
    words = f"{options.quarantine_id} has ended for payloads that are published from now on"
    _show(options, {"quarantine_id": options.quarantine_id, "ended": True}, [words])
    return 0


def _show(options: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    sys.stdout.write((json.dumps(value) if options.json else "\n".join(lines)) + "\n")


# What people name


def _model(text: str) -> ModelPattern:
    name, _, rest = text.partition("@")
    revision, plus, adapter = rest.partition("+")
    with _checked():
        return ModelPattern(name=name, revision=revision, adapter=adapter if plus else None)


def _aligner(text: str) -> AlignerPattern:
    name, _, version = text.partition("@")
    with _checked():
        return AlignerPattern(name=name, version=version)


def _payload(text: str) -> PayloadReference:
    if is_handoff_reference(text):
        with _checked():  # A replica that lost bits is listed with a mark, and is the same payload.
            return PayloadReference(key=str(HandoffReference.parse(unmarked_key(text))), generation=1)
    key, _, generation = text.rpartition("@")
    if not key or not generation.isdecimal() or not int(generation):
        raise argparse.ArgumentTypeError("must be KEY@GENERATION, such as conversation/7@2")
    return PayloadReference(key=key, generation=int(generation))


@contextmanager
def _checked() -> Iterator[None]:
    try:
        yield
    except InvalidFieldError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# What people see


def _named(target: Target) -> str:
    if isinstance(target, PayloadReference):
        return f"payload {shown(target)}"
    if isinstance(target, AlignerPattern):
        return f"aligner {target.name}" + (f"@{target.version}" if target.version else "")
    revision = f"@{target.revision}" if target.revision else "@" if target.adapter is not None else ""
    return f"model {target.name}{revision}" + (f"+{target.adapter}" if target.adapter is not None else "")


def _fields(quarantine: Quarantine) -> dict[str, Any]:
    return {
        "quarantine_id": quarantine.quarantine_id,
        "on": _named(quarantine.target),
        "why": quarantine.why,
        "since": _time(quarantine.since),
    }


def _list_lines(quarantines: Iterable[Quarantine]) -> Iterable[str]:
    yield f"{'id':<18}{'since':<22}on"
    for quarantine in quarantines:
        why = f": {quarantine.why}" if quarantine.why else ""
        yield f"{quarantine.quarantine_id:<18}{_time(quarantine.since):<22}{_named(quarantine.target)}{why}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _outcome_lines(target: Target, outcome: QuarantineOutcome) -> Iterable[str]:
    real = bool(outcome.quarantine_id)
    yield f"{_named(target)}: {'quarantined as ' + outcome.quarantine_id if real else 'nothing is changed (dry run)'}"
    received = "received by " + _count(outcome.clients_total, "client")
    yield f"{'refused' if real else 'would be refused'}: {_count(outcome.payloads_total, 'payload')}, {received}"
    for payload in outcome.payloads:
        yield _payload_line(payload)
    more = outcome.payloads_total - len(outcome.payloads)
    if more:
        yield f"... and {more} more"
    if _may_be_elsewhere(target, outcome):
        yield _ELSEWHERE


def _may_be_elsewhere(target: Target, outcome: QuarantineOutcome) -> bool:
    """Tell whether a payload was named by a key under which this node has nothing and handed nothing over."""
    if not isinstance(target, PayloadReference) or is_handoff_reference(target.key):
        return False
    return not any(payload.alive or payload.handoffs for payload in outcome.payloads if payload.reference == target)


def _payload_line(payload: QuarantinedPayload) -> str:
    branch = "  └ " if payload.because.startswith(_DERIVED) else "  "
    where = "in memory" if payload.alive else "gone"
    counts = f"{where}, {_count(payload.leases, 'lease')}, {_count(payload.handoffs, 'handoff')}"
    return f"{branch}{shown(payload.reference)}  ({counts})  {payload.because}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
