"""`kvbridge calibrate`: measures what a model's prefill takes on this machine, and tells a bridge."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.tags import ModelTag

if TYPE_CHECKING:
    from kvbridge.integrations.transformers.calibration import Calibrated

LENGTHS = (256, 512, 1000, 2000)
REPEATS = 3


def add_commands(commands: Any) -> None:
    """Add this module's command to the parser."""
    text = "measure what a model's prefill takes here and tell a bridge, which then knows what pays"
    calibrate = commands.add_parser("calibrate", help=text, description=text.capitalize() + ".")
    calibrate.add_argument("--model", required=True, metavar="FOLDER", help="a checkpoint as transformers saves it")
    add_target(calibrate)
    calibrate.add_argument(
        "--tokens",
        type=_lengths,
        default=LENGTHS,
        metavar="N,N,...",
        help=f"lengths to measure (default: {','.join(map(str, LENGTHS))})",
    )
    calibrate.add_argument(
        "--repeats", type=_repeats, default=REPEATS, metavar="N", help=f"prefills of each length (default: {REPEATS})"
    )
    calibrate.add_argument(
        "--name", help="the model's name in its tag; give what consumers give (default: the model's class)"
    )
    calibrate.add_argument(
        "--dtype", default="auto", help="element type to compute in, as consumers do (default: the checkpoint's)"
    )
    calibrate.add_argument("--json", action="store_true", help="print JSON")
    calibrate.set_defaults(run=_calibrate)


def _lengths(text: str) -> tuple[int, ...]:
    lengths = tuple(sorted({int(number) for number in text.split(",")}))
    if lengths[0] < 1:
        raise argparse.ArgumentTypeError("lengths must be positive")
    return lengths


def _repeats(text: str) -> int:
    if int(text) < REPEATS:
        raise argparse.ArgumentTypeError(f"a bridge believes no fewer than {REPEATS} reports of one length")
    return int(text)


def _calibrate(options: argparse.Namespace) -> int:
    # Imported here because they load torch, and the other commands need not wait for it.
    from kvbridge.integrations.transformers import ModelPort  # noqa: PLC0415
    from kvbridge.integrations.transformers.calibration import calibrate  # noqa: PLC0415
    from kvbridge.integrations.transformers.checkpoints import load_local  # noqa: PLC0415

    model, tokenizer = load_local(options.model, dtype=options.dtype)
    port = ModelPort(model, tokenizer, name=options.name)
    measured = []
    with connected(options) as bridge:
        for one in calibrate(model, port, bridge, options.tokens, repeats=options.repeats):
            measured.append(one)
            sys.stderr.write(f"{one.tokens} tokens: {one.prefill_seconds:.3f} s\n")
    sys.stdout.write((_json(port.tag, measured) if options.json else _table(port.tag, measured)) + "\n")
    return 0 if all(one.reported for one in measured) else 1


def _pays_from(measured: list[Calibrated]) -> int | None:
    """Return the least length from which on every one that was measured pays."""
    found = None
    for one in reversed(measured):
        if not one.pays:
            break
        found = one.tokens
    return found


def _json(tag: ModelTag, measured: list[Calibrated]) -> str:
    lengths = [{**asdict(one), "prefill_seconds": one.prefill_seconds, "pays": one.pays} for one in measured]
    return json.dumps({"model": asdict(tag), "lengths": lengths, "pays_from_tokens": _pays_from(measured)})


def _table(tag: ModelTag, measured: list[Calibrated]) -> str:
    lines = [f"{tag.name} {tag.revision}", f"{'tokens':>8}{'prefill s':>12}{'tokens/s':>12}{'handoff s':>12}"]
    for one in measured:
        speed = one.tokens / one.prefill_seconds
        handoff = one.refused if one.handoff_seconds is None else f"{one.handoff_seconds:>10.4f}"
        lines.append(f"{one.tokens:>8,}{one.prefill_seconds:>12.3f}{speed:>12,.0f}  {handoff}")
    pays_from = _pays_from(measured)
    lines.append(f"A handoff pays from {pays_from} tokens on." if pays_from else "No length that was measured pays.")
    if not all(one.reported for one in measured):
        lines.append("Not every report was taken: the bridge is away or refused them.")
    return "\n".join(lines)
