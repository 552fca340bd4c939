"""`kvbridge access`, and what other commands show to whom."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.cli import main
from kvbridge.core.access import Role
from tests import builders
from tests.access import OTHER_TENANT, TENANT, AccessFolder
from tests.api import random_content, upload_messages
from tests.harness import BridgeProcess, running_bridge


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> AccessFolder:
    """Name an engine, one that reads metrics, and an admin of another tenant."""
    return AccessFolder(
        tmp_path_factory.mktemp("access"),
        engine=(Role.PRODUCER, Role.CONSUMER),
        gauge=(Role.METRICS,),
        admin_elsewhere=(Role.ADMIN,),
    )


@pytest.fixture(scope="module")
def bridge(folder: AccessFolder) -> Iterator[BridgeProcess]:
    """Run a bridge of two tenants."""
    with running_bridge(*folder.flags) as process:
        yield process


def flags(folder: AccessFolder, bridge: BridgeProcess, principal: str) -> list[str]:
    """Return how a command is told whom to ask as whom."""
    return ["--target", bridge.tcp_target, "--token-file", str(folder.directory / f"{principal}.token"), "--json"]


def test_whoami(folder: AccessFolder, bridge: BridgeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """By a token over TCP, and by the kernel's word over the unix socket."""
    assert main(["access", "whoami", *flags(folder, bridge, "engine")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["principal"], told["tenant"], told["roles"]) == ("engine", TENANT, ["producer", "consumer"])
    assert main(["access", "whoami", "--target", bridge.target]) == 0
    assert capsys.readouterr().out.startswith(f"owner of tenant {TENANT}")


def test_whoami_of_nobody(folder: AccessFolder, bridge: BridgeProcess, capsys: pytest.CaptureFixture[str]) -> None:
    """It fails, and says why without repeating the token."""
    wrong = folder.directory / "wrong.token"
    wrong.write_text("w" * 43, encoding="utf-8")
    assert main(["access", "whoami", "--target", bridge.tcp_target, "--token-file", str(wrong)]) == 1
    told = capsys.readouterr().err
    assert "token" in told
    assert "w" * 43 not in told


def test_whoever_is_shown_the_node_alone_is_told_what_is_missing(
    folder: AccessFolder, bridge: BridgeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """A principal that only reads metrics may not see what is refused."""
    assert main(["node", *flags(folder, bridge, "gauge")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kill_switch"], told["quarantines"]) == (None, None)
    assert "may not make this call" in told["bans_problem"]


def test_only_an_admin_names_a_tenant(
    folder: AccessFolder, bridge: BridgeProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands that show something show that tenant's."""
    spec = builders.spec(key="shown/1")
    with folder.client(bridge, "engine") as engine:
        engine.upload(upload_messages(spec, random_content(spec)))
    keys = []
    for tenant in (TENANT, OTHER_TENANT):
        assert main(["payloads", *flags(folder, bridge, "admin_elsewhere"), "--tenant", tenant]) == 0
        keys.append([listed["reference"]["key"] for listed in json.loads(capsys.readouterr().out)])
    assert keys == [["shown/1"], []]
    assert main(["payloads", *flags(folder, bridge, "engine"), "--tenant", OTHER_TENANT]) == 1
    assert "another tenant" in capsys.readouterr().err


def test_check_tells_who_may_do_what(folder: AccessFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and as JSON, without tokens."""
    assert main(["access", "check", str(folder.path)]) == 0
    told = capsys.readouterr().out
    assert f"tenant {TENANT}" in told
    assert "engine: consumer, producer; known by 1 token" in told
    assert main(["access", "check", str(folder.path), "--json"]) == 0
    declared = json.loads(capsys.readouterr().out)
    assert [principal["name"] for principal in declared["principals"]] == [
        "engine",
        "gauge",
        "admin_elsewhere",
    ]
    assert not any(token in told for token in folder.tokens.values())


def test_check_tells_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By line and field."""
    path = tmp_path / "access.yaml"
    path.write_text("tenants:\n  - name: a\nprincipals:\n  - name: p\n    tenant: b\n    rolls: []\n", encoding="utf-8")
    assert main(["access", "check", str(path)]) == 1
    told = capsys.readouterr().out
    assert f"{path}:5: principals[0].tenant" in told
    assert f"{path}:6: principals[0].rolls: there is no such field; did you mean roles?" in told
