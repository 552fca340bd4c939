"""Access files for tests, and clients that prove who they are by a token."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import grpc
import yaml
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvbridge.core.access import Role
from tests.api import ApiClient
from tests.harness import BridgeProcess

TENANT, OTHER_TENANT = "team-a", "team-b"
POLL_SECONDS = 0.05


class AccessFolder:
    """An access file with a file of tokens for each principal; tenants are `TENANT` and `OTHER_TENANT`."""

    def __init__(self, directory: Path, **roles: Iterable[Role]) -> None:
        """Write principals of `TENANT`, each with its roles; names that end in `_elsewhere` are of `OTHER_TENANT`."""
        self.directory = directory
        self.path = directory / "access.yaml"
        self.tokens: dict[str, str] = {}
        self.principals: dict[str, dict[str, Any]] = {}
        self.tenants: list[dict[str, Any]] = [{"name": TENANT}, {"name": OTHER_TENANT}]
        for name, given in roles.items():
            self.add(name, given)
        self.write()

    @property
    def flags(self) -> tuple[str, ...]:
        """Return how a bridge is told of it."""
        return ("--access", str(self.path), "--access-poll-seconds", str(POLL_SECONDS))

    def add(self, name: str, roles: Iterable[Role], **proofs: Any) -> None:
        """Name a principal, with a new token besides its other `proofs`."""
        self.tokens[name] = secrets.token_urlsafe(32)
        (self.directory / f"{name}.token").write_text(self.tokens[name] + "\n", encoding="utf-8")
        self.principals[name] = {
            "name": name,
            "tenant": OTHER_TENANT if name.endswith("_elsewhere") else TENANT,
            "roles": [role.value for role in roles],
            "token_files": [f"{name}.token"],
            **proofs,
        }

    def write(self, text: str | None = None) -> None:
        """Replace the file in one step, by what is named or by another `text`."""
        whole = {"tenants": self.tenants, "principals": list(self.principals.values())}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(whole) if text is None else text, encoding="utf-8")
        fresh.replace(self.path)

    def proof(self, name: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata by which a principal proves who it is."""
        return bearer(self.tokens[name])

    def client(self, bridge: BridgeProcess, principal: str, *, tenant: str = "", name: str | None = None) -> ApiClient:
        """Return a client by value over TCP."""
        metadata = (*self.proof(principal), *((("kvbridge-tenant", tenant),) if tenant else ()))
        return ApiClient(bridge, attached=False, target=bridge.tcp_target, name=name, metadata=metadata)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries a token."""
    return (("authorization", f"Bearer {token}"),)


def reason_of(error: grpc.RpcError) -> str:
    """Return the machine-readable reason of a refusal; empty without one."""
    status = rpc_status.from_call(cast("grpc.Call", error))
    info = error_details_pb2.ErrorInfo()
    for detail in () if status is None else status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return str(info.reason)


def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Make a call that must be refused, and return code and reason."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error.code(), reason_of(error)
    raise AssertionError(f"was answered: {answer}")


UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
NOT_PERMITTED = (grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED")
PLAIN: Mapping[str, tuple[Role, ...]] = {role.value: (role,) for role in Role}
"""One principal of each role, called like it."""
