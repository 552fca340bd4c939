"""How commands find a bridge, and prove who calls it: the same flags for all of them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import kvbridge

if TYPE_CHECKING:
    from kvbridge.client.bridge import Bridge


def add_target(command: Any, *, among: Any = None) -> Any:
    """Add the flags to a command, `--target` to a group `among` whose flags exclude each other, if there is one."""
    (among or command).add_argument("--target", help="unix:/path or host:port; by default this host's bridge")
    secured = command.add_argument_group("TLS and identity", "for host:port; by default as KVBRIDGE_* variables say")
    secured.add_argument("--tls-ca", metavar="FILE", help="authorities that may have issued the bridge's certificate")
    secured.add_argument("--tls-certificate", metavar="FILE", help="certificate that is shown to the bridge")
    secured.add_argument("--tls-key", metavar="FILE", help="its private key")
    secured.add_argument("--tls-server-name", metavar="NAME", help="what the bridge's certificate must name")
    secured.add_argument("--token-file", metavar="FILE", help="file whose first line is a bearer token")
    command.add_argument("--tenant", metavar="NAME", help="the tenant to look at, for admins (default: one's own)")
    return command


def connected(options: argparse.Namespace) -> Bridge:
    """Return the bridge that a command's flags name; errors as for `kvbridge.connect`."""
    given = {
        "ca": options.tls_ca,
        "certificate": options.tls_certificate,
        "key": options.tls_key,
        "server_name": options.tls_server_name,
    }
    tls = kvbridge.Tls(**given) if any(given.values()) else None
    return kvbridge.connect(options.target, tls=tls, token_file=options.token_file, tenant=options.tenant)
