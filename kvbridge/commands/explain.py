"""`kvbridge explain`: every check of one past handoff, of a running bridge or out of the journal of a dead one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.reasons import SDK_ONLY_REASONS, Reason

if TYPE_CHECKING:
    from kvbridge.v1.inspect_service_pb2 import HandoffRecord

_ASCII = str.maketrans({"✓": "+", "✗": "x", "µ": "u", "\N{REPLACEMENT CHARACTER}": "?"})


def add_commands(commands: Any) -> None:
    """Add this module's command to the parser."""
    text = "tell why a handoff was a cache or text, check by check"
    command = commands.add_parser("explain", help=text, description=text.capitalize() + ".")
    command.add_argument("id", nargs="?", metavar="ID", help="the handoff, as the answer to its acquire names it")
    command.add_argument("--last", action="store_true", help="the newest handoff")
    command.add_argument(
        "--reason",
        type=_reason,
        metavar="REASON",
        help="the newest handoff with a part that fell back for this reason, such as TOKENS_MISMATCH",
    )
    source = command.add_mutually_exclusive_group()
    add_target(command, among=source)
    source.add_argument("--file", metavar="FILE", help="read this journal and its older files instead")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_explain, refuse=command.error)


def _reason(text: str) -> Reason:
    known = [reason for reason in Reason if reason not in SDK_ONLY_REASONS]
    found = next((reason for reason in known if reason == text.upper()), None)
    if found is None:
        raise argparse.ArgumentTypeError(f"there is no reason {text!r}; there are {', '.join(known)}")
    return found


def _explain(options: argparse.Namespace) -> int:
    if (options.id is not None) == (options.last or options.reason is not None):
        options.refuse("name one handoff: its ID, or --last, or --reason")
    from kvbridge.observe.explanation import explanation  # noqa: PLC0415 - the other commands need not wait for it

    record = _from_bridge(options) if options.file is None else _from_file(options)
    if record is None:
        sys.stderr.write("kvbridge: no such handoff is remembered\n")
        return 1
    if options.json:
        # With what is zero, too: who reads it as a table expects its columns.
        fields = MessageToDict(record, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        sys.stdout.write(json.dumps(fields) + "\n")
    else:
        _write("\n".join(explanation(record)) + "\n")
    return 0


def _from_bridge(options: argparse.Namespace) -> HandoffRecord | None:
    with connected(options) as bridge:
        return bridge.explain(options.id, reason=options.reason)


def _from_file(options: argparse.Namespace) -> HandoffRecord | None:
    from kvbridge.observe.journal_reader import find_by_id, find_newest  # noqa: PLC0415 - as above

    if options.id is not None:
        return find_by_id(options.file, options.id)
    return find_newest(options.file, options.reason)


def _write(text: str) -> None:
    """Write to a terminal of whatever encoding."""
    encoding = sys.stdout.encoding or "ascii"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "replace").decode(encoding)
    sys.stdout.write(text)
