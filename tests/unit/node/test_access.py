"""Who may call: read from a file, watched, and swapped as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.access_file import AccessFileError
from kvbridge.core.access import AccessPolicy, ProofRules, Proofs, Role, TenantQuota, Transport
from kvbridge.core.errors import UnauthenticatedError
from kvbridge.node.access import AccessKeeper
from kvbridge.node.access_watch import WatchedAccess
from tests.access import TENANT, AccessFolder

RULES = ProofRules(own_uid=500)


@pytest.fixture
def folder(tmp_path: Path) -> AccessFolder:
    """Name one engine."""
    return AccessFolder(tmp_path, engine=(Role.PRODUCER,))


def keeper(folder: AccessFolder) -> AccessKeeper:
    """Load the file."""
    loaded = AccessKeeper(str(folder.path), rules=RULES)
    loaded.load()
    return loaded


def take(kept: AccessKeeper, folder: AccessFolder) -> None:
    """Let the keeper take what the file says now."""
    found = WatchedAccess(str(folder.path)).look()
    assert found is not None
    kept._take(found)


def knows(kept: AccessKeeper, token: str) -> bool:
    """Tell whether somebody has this token."""
    try:
        return bool(kept.identify(Proofs(transport=Transport.LOOPBACK, token=token)).name)
    except UnauthenticatedError:
        return False


def test_without_a_file_everybody_is_the_owner() -> None:
    """Whoever it is, and whatever it brings."""
    kept = AccessKeeper(rules=RULES)
    kept.load()
    assert not kept.is_configured
    assert kept.identify(Proofs(transport=Transport.LOOPBACK, token="anything")) == kept.owner
    assert kept.principal_of_user(12_345) == kept.owner
    assert list(kept.tenants) == ["default"]


def test_a_file_that_does_not_hold_is_an_error_at_start(folder: AccessFolder) -> None:
    """Nothing is served by half a file."""
    folder.write("tenants: [")
    with pytest.raises(AccessFileError):
        keeper(folder)


def test_listeners_hear_of_every_change(folder: AccessFolder) -> None:
    """After it is in force."""
    kept = keeper(folder)
    heard: list[bool] = []
    kept.add_listener(lambda: heard.append(knows(kept, folder.tokens["engine"])))
    del folder.principals["engine"]
    folder.write()
    take(kept, folder)
    assert heard == [False]


def test_one_listener_that_fails_keeps_the_change_from_no_other(
    folder: AccessFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor the next change from being seen."""
    kept = keeper(folder)
    heard: list[int] = []
    kept.add_listener(lambda: next(iter(())))
    kept.add_listener(lambda: heard.append(kept.version))
    for _ in range(2):
        folder.add("engine", (Role.PRODUCER,))
        folder.write()
        take(kept, folder)
    assert heard == [2, 3]
    assert [record.levelname for record in caplog.records if "everywhere" in record.message] == ["CRITICAL"] * 2


def test_what_needs_a_restart_waits_and_the_rest_does_not(folder: AccessFolder) -> None:
    """Memory stays as it is, rates change, who is gone is gone, and who is of a new tenant is nobody yet."""
    kept = keeper(folder)
    folder.tenants[0] |= {"arena_bytes": 1 << 20, "requests_per_second": 5}
    folder.tenants.append({"name": "new"})
    folder.add("newcomer", (Role.PRODUCER,), tenant="new")
    del folder.principals["engine"]
    folder.write()
    take(kept, folder)
    assert "restart" in kept.file_problem
    assert kept.tenants[TENANT] == TenantQuota(requests_per_second=5.0)
    assert "new" not in kept.tenants
    assert not knows(kept, folder.tokens["engine"])
    assert not knows(kept, folder.tokens["newcomer"])


def test_a_tenant_that_is_taken_out_stays_until_a_restart(folder: AccessFolder) -> None:
    """Its payloads are still in memory, and its principals cannot come."""
    kept = keeper(folder)
    folder.tenants = [{"name": "another"}]
    folder.principals = {}
    folder.write()
    take(kept, folder)
    assert TENANT in kept.tenants
    assert not knows(kept, folder.tokens["engine"])


def test_nothing_is_new_in_a_file_that_says_the_same(folder: AccessFolder) -> None:
    """However often it is written; a change of a file of tokens is one."""
    watched = WatchedAccess(str(folder.path))
    first = watched.look()
    assert isinstance(first, AccessPolicy)
    folder.write()
    assert watched.look() is None
    (folder.directory / "engine.token").write_text("n" * 40, encoding="utf-8")
    second = watched.look()
    assert isinstance(second, AccessPolicy)
    assert second != first


def test_a_fault_is_told_once_and_its_end_too(folder: AccessFolder) -> None:
    """The content from before the fault is news again behind it."""
    watched = WatchedAccess(str(folder.path))
    first = watched.look()
    token_file = folder.directory / "engine.token"
    token_file.rename(token_file.with_suffix(".away"))
    assert isinstance(watched.look(), AccessFileError)
    assert watched.look() is None
    token_file.with_suffix(".away").rename(token_file)
    assert watched.look() == first


@pytest.mark.parametrize(("mode", "told"), [(0o600, 0), (0o640, 0), (0o644, 1), (0o604, 1)])
def test_tokens_that_everybody_may_read_are_warned_of_once(
    folder: AccessFolder, caplog: pytest.LogCaptureFixture, mode: int, told: int
) -> None:
    """They still count: a container may have no other user. The warning names the file alone."""
    (folder.directory / "engine.token").chmod(mode)
    watched = WatchedAccess(str(folder.path))
    for name in ("one", "two"):
        folder.add(name, (Role.CONSUMER,))
        (folder.directory / f"{name}.token").chmod(0o600)
        folder.write()
        assert isinstance(watched.look(), AccessPolicy)
    warnings = [record for record in caplog.records if "file of tokens" in record.message]
    assert [vars(record)["file"] for record in warnings] == [str(folder.directory / "engine.token")] * told
