"""One handoff for a person, within the width of a terminal: the decision first, then what it rests on.

What others wrote, such as keys and reports, is shown without what a terminal would obey.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from kvbridge.core.handoff_reference import is_handoff_reference
from kvbridge.v1 import handoff_service_pb2, types_pb2
from kvbridge.v1 import inspect_service_pb2 as pb

WIDTH = 80
"""Columns that are used."""
PASSED = "✓"
FAILED = "✗"
_INDENT = " " * 4
_NAME_COLUMNS = 28
_TIME_COLUMNS = 7
_FIGURES_COLUMN = 41
_STANDING_COLUMNS = 10
_PLACE_COLUMNS = 14
_NANOS_PER_MICRO = 1000
_MICROS_PER_MILLI = 1000
_MICROS_PER_SECOND = 1_000_000
_MIB = 1 << 20
_KIB = 1 << 10


def explanation(record: pb.HandoffRecord) -> Iterator[str]:
    """Yield the lines that explain a handoff."""
    yield from _wrapped(_decision(record), first="", rest="")
    yield ""
    yield from _circumstances(record)
    for number, part in enumerate(record.parts, 1):
        yield ""
        yield from _part(number, part)
    yield ""
    yield from _wrapped(_outcome(record), first="Reported: ", rest="  ")
    if record.suspicions:
        yield ""
        yield "Where a bad answer may come from, the most likely first:"
    for suspicion in record.suspicions:
        head = f"  {suspicion.standing:<{_STANDING_COLUMNS}}{suspicion.place:<{_PLACE_COLUMNS}}"
        yield from _wrapped(suspicion.evidence, first=_plain(head), rest=" " * len(head))


# The decision


def _decision(record: pb.HandoffRecord) -> str:
    count, leased = len(record.parts), sum(part.leased for part in record.parts)
    if not count:
        return f"Only the report of handoff {record.handoff_id} is left; its record is not here."
    if leased == count:
        return "The cache was handed over." if count == 1 else f"All {count} parts were handed over as caches."
    number, part = next((number, part) for number, part in enumerate(record.parts, 1) if not part.leased)
    why = f"{_reason(part.reason)}: {part.detail.rstrip('.')}."
    if count == 1:
        return f"The text was to be taken, because of {why}"
    share = f"A cache was handed over for {leased} of {count} parts" if leased else f"All {count} parts are text"
    return f"{share}; part {number} is text because of {why}"


def _circumstances(record: pb.HandoffRecord) -> Iterator[str]:
    if not record.parts:
        return
    at = record.time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S UTC")
    deadline = f", with {_time(record.deadline)} left" if record.HasField("deadline") else ", without a deadline"
    yield from _field("handoff", f"{record.handoff_id}, answered {at} by {record.node_id}")
    yield from _field("took", f"{_time(record.duration)}{deadline}")
    yield from _field("for", f"client {record.client} of {_whose(record)}, {_model(record.model)}")
    yield from _field("along", f"edge {record.edge or '(none)'}, at depth {record.depth}")


def _field(name: str, text: str) -> Iterator[str]:
    return _wrapped(text, first=f"{name:<9}", rest=" " * 9)


def _outcome(record: pb.HandoffRecord) -> str:
    if not record.HasField("outcome"):
        return "nothing yet"
    outcome = record.outcome
    use = handoff_service_pb2.HandoffUse.Name(outcome.use).removeprefix("HANDOFF_USE_").lower()
    quality = handoff_service_pb2.HandoffQuality.Name(outcome.quality).removeprefix("HANDOFF_QUALITY_").lower()
    words = [use, f"quality {quality.replace('unspecified', 'unknown')}", f"{outcome.tokens_saved} tokens saved"]
    return ", ".join([*words, *([outcome.detail] if outcome.detail else [])])


# Parts


def _part(number: int, part: pb.PartRecord) -> Iterator[str]:
    given = "cache" if part.leased else f"text, {_reason(part.reason)}"
    size = f", {part.valid_length:,} tokens, {_size(part.bytes)}" if part.valid_length else ""
    yield from _wrapped(f"{_named(part.reference)}: {given}{size}", first=f"Part {number}: ", rest=_INDENT)
    if part.HasField("source"):
        yield from _wrapped(f"computed by {_model(part.source)}", first=_INDENT, rest=_INDENT * 2)
    yield from _wrapped(_route(part), first=_INDENT, rest=_INDENT * 2)
    if part.HasField("pull"):
        yield from _wrapped(_pull(part.pull), first=_INDENT, rest=_INDENT * 2)
    for transform in part.transforms:
        yield from _wrapped(transform, first=_INDENT, rest=_INDENT * 2)
    yield from _checks(part.checks)


def _named(reference: types_pb2.PayloadReference) -> str:
    """Return a payload's name: the key alone if it names a generation itself, or none was asked for and none found."""
    is_whole = not reference.generation or is_handoff_reference(reference.key)
    return reference.key if is_whole else f"{reference.key}@{reference.generation}"


def _route(part: pb.PartRecord) -> str:
    route = f"route {part.route or '(none)'} ({part.route_mode})"
    spared = "; it would have been a cache if its route were on for all" if part.would_have_passed else ""
    if part.verified_at_commit == types_pb2.VERIFICATION_UNSPECIFIED:
        return route + spared
    committed, now = (_verification(level) for level in (part.verified_at_commit, part.verified_now))
    return f"{route}{spared}; bytes checked at commit: {committed}, for this handoff: {now}"


def _pull(pull: pb.PullRecord) -> str:
    whose = "a replica on node" if pull.from_replica else "node"
    return f"{_size(pull.bytes)} pulled from {whose} {pull.node_id} in {_time(pull.duration)} by {pull.by}"


def _checks(checks: Sequence[pb.CheckRecord]) -> Iterator[str]:
    """Yield failed checks, then those that looked at figures, and the others two in a line."""
    yield f"{_INDENT}{'check':<{_NAME_COLUMNS}}{'µs':>{_TIME_COLUMNS}}  figures"
    for check in (check for check in checks if not check.passed):
        yield from _row(check)
        yield from _wrapped(check.problem, first=_INDENT * 2, rest=_INDENT * 2)
    for check in (check for check in checks if check.passed and check.figures):
        yield from _row(check)
    plain = [_cell(check) for check in checks if check.passed and not check.figures]
    for index in range(0, len(plain), 2):
        yield "  " + "  ".join(plain[index : index + 2])


def _row(check: pb.CheckRecord) -> Iterator[str]:
    figures = ", ".join(f"{name} {value}" for name, value in sorted(check.figures.items()))
    return _wrapped(figures, first=f"  {_cell(check)}  ", rest=" " * _FIGURES_COLUMN)


def _cell(check: pb.CheckRecord) -> str:
    mark = PASSED if check.passed else FAILED
    return f"{mark} {_reason(check.reason):<{_NAME_COLUMNS}}{_micros(check.duration):>{_TIME_COLUMNS}.1f}"


# Words


def _reason(number: types_pb2.Reason.ValueType) -> str:
    known = number in types_pb2.Reason.values()
    return types_pb2.Reason.Name(number).removeprefix("REASON_") if known else f"reason {number}"


def _verification(number: types_pb2.Verification.ValueType) -> str:
    return types_pb2.Verification.Name(number).removeprefix("VERIFICATION_").lower()


def _whose(record: pb.HandoffRecord) -> str:
    # Records of older releases name none.
    return f"{record.principal} in tenant {record.tenant}" if record.principal else f"tenant {record.tenant}"


def _model(tag: types_pb2.ModelTag) -> str:
    adapter = f" with adapter {tag.adapter}" if tag.adapter else ""
    return f"model {tag.name} ({tag.revision}, {tag.weight_dtype}){adapter}"


def _micros(duration: Duration) -> float:
    return duration.ToNanoseconds() / _NANOS_PER_MICRO


def _time(duration: Duration) -> str:
    micros = _micros(duration)
    if micros < _MICROS_PER_MILLI:
        return f"{micros:.0f} µs"
    return (
        f"{micros / _MICROS_PER_MILLI:.1f} ms"
        if micros < _MICROS_PER_SECOND
        else f"{micros / _MICROS_PER_SECOND:,.1f} s"
    )


def _size(count: int) -> str:
    return f"{count / _KIB:,.1f} KiB" if count < _MIB else f"{count / _MIB:,.1f} MiB"


def _wrapped(text: str, *, first: str, rest: str) -> Iterator[str]:
    lines = textwrap.wrap(
        _plain(text), WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    ) or [first.rstrip()]
    yield from lines


def _plain(text: str) -> str:
    """Return a text without characters that a terminal would obey, or that would break a line."""
    return "".join(_printable(text))


def _printable(text: str) -> Iterable[str]:
    return (character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
