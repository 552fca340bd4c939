"""`kvbridge access check` and `kvbridge access whoami`: who may do what, by a file and by a running bridge."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from kvbridge.access_file import AccessFileError, load_access_file
from kvbridge.commands.connecting import add_target, connected
from kvbridge.core.access import AccessPolicy, Grant, TenantQuota


def add_commands(commands: Any) -> None:
    """Add this module's commands to the parser."""
    access = commands.add_parser(
        "access", help="check an access file, or ask a bridge who one is to it"
    ).add_subparsers(required=True, metavar="COMMAND")
    text = "say whether an access file could be used, and who may do what by it"
    check = access.add_parser("check", help=text, description=text.capitalize() + ".")
    check.add_argument("file", metavar="FILE", help="YAML file, as for `kvbridge serve --access`")
    check.set_defaults(run=_check)
    text = "ask a running bridge who one is to it, and what one may do"
    whoami = add_target(access.add_parser("whoami", help=text, description=text.capitalize() + "."))
    whoami.set_defaults(run=_whoami)
    for command in (check, whoami):
        command.add_argument("--json", action="store_true", help="print JSON")


def _check(options: argparse.Namespace) -> int:
    try:
        policy = load_access_file(options.file).policy
    except AccessFileError as error:
        problems = [asdict(problem) for problem in error.problems]
        found = {"file": error.path, "ok": False, "problems": problems, "problems_total": error.problems_total}
        _print(options, found, error.lines)
        return 1
    _print(options, {"file": options.file, "ok": True, **_fields(policy)}, _lines(options.file, policy))
    return 0


def _whoami(options: argparse.Namespace) -> int:
    with connected(options) as bridge:
        node = bridge.node()
    fields = {"principal": node.principal, "tenant": node.tenant, "roles": node.roles, "node_id": node.node_id}
    roles = ", ".join(node.roles)
    _print(options, fields, [f"{node.principal} of tenant {node.tenant}, to node {node.node_id}: {roles}"])
    return 0


def _fields(policy: AccessPolicy) -> dict[str, Any]:
    principals = [
        {
            "name": grant.principal.name,
            "tenant": grant.principal.tenant,
            "roles": sorted(grant.principal.roles),
            "uids": sorted(grant.uids),
            "subjects": sorted(grant.subjects),
            "tokens": len(grant.token_digests),
        }
        for grant in policy.grants
    ]
    return {"tenants": {name: asdict(quota) for name, quota in policy.tenants.items()}, "principals": principals}


def _lines(file: str, policy: AccessPolicy) -> Iterator[str]:
    yield f"{file}: could be used"
    for name, quota in policy.tenants.items():
        yield f"tenant {name}: {_limits(quota)}"
        for grant in policy.grants:
            if grant.principal.tenant == name:
                yield f"  {grant.principal.name}: {', '.join(sorted(grant.principal.roles))}; known by {_proofs(grant)}"


def _limits(quota: TenantQuota) -> str:
    said = [f"{name} {value:,}" for name, value in asdict(quota).items() if value is not None]
    return ", ".join(said) or "as the node's configuration has it"


def _proofs(grant: Grant) -> str:
    kinds: tuple[tuple[str, Iterable[object]], ...] = (
        ("user", sorted(grant.uids)),
        ("subject", sorted(grant.subjects)),
    )
    said = [f"{kind} {proof}" for kind, proofs in kinds for proof in proofs]
    tokens = len(grant.token_digests)
    return ", ".join([*said, *([f"{tokens} token{'' if tokens == 1 else 's'}"] if tokens else [])]) or "nothing"


def _print(options: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    sys.stdout.write((json.dumps(value) if options.json else "\n".join(lines)) + "\n")
