"""The `kvbridge` command: serve, look into a running bridge, and show the main job."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from kvbridge.commands import access, calibrate, catalog, explain, inspection, probe, quarantine
from kvbridge.config import BridgeConfig, ConfigurationError, load_config, setting_meanings, unknown_variables
from kvbridge.core.errors import BridgeError
from kvbridge.version import VERSION

_log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 done, 1 failed, 2 used wrongly."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except ConfigurationError as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BridgeError as error:
        print(f"kvbridge: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_FAILURE
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvbridge", description="Hands KV-caches from one inference server to another."
    )
    parser.add_argument("--version", action="version", version=f"kvbridge {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    inspection.add_commands(commands)
    catalog.add_commands(commands)
    access.add_commands(commands)
    quarantine.add_commands(commands)
    explain.add_commands(commands)
    probe.add_commands(commands)
    calibrate.add_commands(commands)
    _add_demo(commands)
    return parser


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve", help="run a bridge until SIGTERM", description="Run a bridge until SIGTERM or SIGINT."
    )
    serve.add_argument(
        "--config", metavar="FILE", help="TOML file with settings; KVBRIDGE_* variables and flags win over it"
    )
    serve.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    defaults, meanings = BridgeConfig(), setting_meanings()
    for setting in fields(BridgeConfig):
        flag = "--" + setting.name.replace("_", "-")
        default = getattr(defaults, setting.name)
        meaning = f"{meanings[setting.name]} (default: {default})".replace("%", "%%")
        if setting.type == "bool":
            serve.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=meaning)
        else:
            kind = {"int": int, "float": float, "str": str}[str(setting.type)]
            serve.add_argument(flag, type=kind, default=None, metavar=kind.__name__.upper(), help=meaning)
    serve.set_defaults(run=_serve)


def _serve(options: argparse.Namespace) -> int:
    # gRPC would write a line of its own for every handshake that fails, and anybody can make handshakes fail.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Imported here because the other commands need not wait for what a bridge loads.
    from kvbridge.server.logs import configure_logs  # noqa: PLC0415
    from kvbridge.server.process import serve  # noqa: PLC0415

    given = {setting.name: getattr(options, setting.name) for setting in fields(BridgeConfig)}
    config = load_config(options.config, overrides={name: value for name, value in given.items() if value is not None})
    configure_logs(options.log_level)
    unknown = unknown_variables(os.environ)
    if unknown:
        _log.warning("variables that are no setting are passed over", extra={"variables": unknown})
    asyncio.run(serve(config))
    return EXIT_OK


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo", help="hand a real model's cache over between two processes and show what it saves"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    demo.set_defaults(run=_demo)


def _demo(options: argparse.Namespace) -> int:
    from kvbridge.demo.run import run_demo  # noqa: PLC0415

    return run_demo(as_json=options.json)
