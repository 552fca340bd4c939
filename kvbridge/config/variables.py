"""Variables of the environment that look like settings and are none: somebody meant something by each of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields

from kvbridge.config.addresses import ENVIRONMENT_PREFIX
from kvbridge.config.settings import BridgeConfig

CLIENT_VARIABLES = ("TLS_CA", "TLS_SERVER_NAME", "TOKEN_FILE")
"""What clients on the same host may be told, beside what both sides read, without the prefix."""
UNKNOWN_MAX = 20
"""Most unknown variables that are told."""
_LIKENESS_MIN = 0.7
_OF_A_SERVICE = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")
"""What Kubernetes sets in every pod beside a service called kvbridge."""
_ADDRESS_OF_A_SERVICE = re.compile(r"(tcp|udp|sctp)://")
_HOW_TO_WRITE = f"{ENVIRONMENT_PREFIX}{{}} (is {ENVIRONMENT_PREFIX}{{}} meant?)"


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that no setting has, each with the one that it is nearest to; their values are not told."""
    return tuple(sorted(_unknown(environment))[:UNKNOWN_MAX])


def _unknown(environment: Mapping[str, str]) -> Iterator[str]:
    settings = [setting.name.upper() for setting in fields(BridgeConfig)]
    known = {*settings, *CLIENT_VARIABLES}
    for variable, value in environment.items():
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name == variable or name in known or _is_of_a_service(name, value):
            continue
        nearest = difflib.get_close_matches(name.upper(), settings, n=1, cutoff=_LIKENESS_MIN)
        yield _HOW_TO_WRITE.format(name, nearest[0]) if nearest else variable


def _is_of_a_service(name: str, value: str) -> bool:
    is_address = name.endswith("PORT") and _ADDRESS_OF_A_SERVICE.match(value)
    return bool(is_address or _OF_A_SERVICE.fullmatch(name))
