"""`kvbridge probe build` and `kvbridge probe show`: fingerprints of models, by which a bridge tells foreign caches."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbridge.probe import Fingerprint

_MIB = 1 << 20


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    text = "make or show the fingerprint of a model, which tells caches that are not its own"
    actions = commands.add_parser("probe", help=text, description=text.capitalize() + ".").add_subparsers(
        required=True, metavar="ACTION"
    )
    build = actions.add_parser("build", help="make the fingerprint of a model", description=_build.__doc__)
    build.add_argument("--model", required=True, metavar="FOLDER", help="a checkpoint as transformers saves it")
    build.add_argument("--output", required=True, metavar="FILE", help="where to write the fingerprint")
    build.add_argument(
        "--name", help="the model's name in its tag; give what producers give (default: the model's class)"
    )
    build.add_argument(
        "--dtype", default="auto", help="element type to compute in, as producers do (default: the checkpoint's)"
    )
    build.add_argument(
        "--first-token",
        metavar="ID",
        type=int,
        action="append",
        default=[],
        help="a token that prompts begin with, besides those found; may be given several times",
    )
    build.set_defaults(run=_build)
    show = actions.add_parser("show", help="show what a fingerprint holds", description=_show.__doc__)
    show.add_argument("file", metavar="FILE")
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=_show)


def _build(options: argparse.Namespace) -> int:
    """Load a model, compute its fingerprint and try it on the model's own caches."""
    # Imported here because they load torch, and the other commands need not wait for it.
    from kvbridge.integrations.transformers import model_tag  # noqa: PLC0415
    from kvbridge.integrations.transformers.checkpoints import load_local  # noqa: PLC0415
    from kvbridge.integrations.transformers.probe import build_fingerprint, likely_first_tokens  # noqa: PLC0415
    from kvbridge.probe import save_fingerprint  # noqa: PLC0415

    model, tokenizer = load_local(options.model, dtype=options.dtype)
    tag = model_tag(model, tokenizer, name=options.name)
    first_tokens = dict.fromkeys((*likely_first_tokens(model, tokenizer), *options.first_token))
    fingerprint = build_fingerprint(model, tag, first_tokens=tuple(first_tokens))
    save_fingerprint(fingerprint, options.output)
    _print(fingerprint, options.output)
    return 0


def _show(options: argparse.Namespace) -> int:
    """Show which model version a fingerprint belongs to and what it can tell."""
    from kvbridge.probe import load_fingerprint  # noqa: PLC0415 - numpy is not needed by the other commands

    fingerprint = load_fingerprint(options.file)
    if options.json:
        sys.stdout.write(json.dumps(fingerprint.snapshot(), default=_plain) + "\n")
    else:
        _print(fingerprint, options.file)
    return 0


def _print(fingerprint: Fingerprint, path: str) -> None:
    sys.stdout.write(f"{path}: {Path(path).stat().st_size / _MIB:.1f} MiB\n")
    for name, value in fingerprint.snapshot().items():
        fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else {"": value}
        for field, held in fields.items():
            sys.stdout.write(f"  {f'{name} {field}'.strip():<28}{_text(held)}\n")


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {held}" for name, held in value.items() if held != ())
    return str(value) if value not in {"", None} else "-"


def _plain(value: Any) -> Any:
    return asdict(value)
