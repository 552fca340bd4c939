"""The access file: read whole or not at all, with line and field in every refusal, and no secret in any."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbridge.access_file import AccessFileError, load_access_file
from kvbridge.access_file.tokens import TOKEN_CHARACTERS_MAX, TOKENS_PER_FILE_MAX
from kvbridge.core.access import AccessPolicy, Role, TenantQuota, token_digest

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
SECRET = "a-token-that-nobody-may-repeat-anywhere"
TENANT = "tenants: [{name: a}]\n"


def load(directory: Path, text: str) -> AccessPolicy:
    """Read what a file in `directory` says."""
    path = directory / "access.yaml"
    path.write_text(dedent(text), encoding="utf-8")
    return load_access_file(str(path)).policy


def problems(directory: Path, text: str) -> list[tuple[int, str]]:
    """Return line and field of everything that is wrong."""
    with pytest.raises(AccessFileError) as caught:
        load(directory, text)
    assert SECRET not in str(caught.value)
    return [(problem.line, problem.field) for problem in caught.value.problems]


def test_the_documents_example_is_read(tmp_path: Path) -> None:
    """Everything that it says arrives."""
    example, *_ = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "engine-a").write_text(f"# the engine\n\n  {SECRET}  \n", encoding="utf-8")
    policy = load(tmp_path, example)
    assert policy.tenants == {
        "default": TenantQuota(),
        "team-a": TenantQuota(
            arena_bytes=4 << 30,
            payloads_max=1000,
            references_max=4000,
            requests_per_second=200.0,
            requests_burst=400,
        ),
    }
    engine, node = policy.grants
    assert (engine.principal.name, engine.principal.tenant) == ("engine-a", "team-a")
    assert engine.principal.roles == {Role.PRODUCER, Role.CONSUMER}
    assert engine.uids == {1001}
    assert engine.subjects == {"spiffe://cluster/ns/a/sa/vllm", "engine-a.example"}
    assert engine.token_digests == {token_digest(SECRET)}
    assert node.principal.roles == {Role.PEER}
    assert not node.token_digests


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tenants: []", [(1, "tenants")]),
        ("{}", [(1, "tenants")]),
        ("tenants: [{name: a}, {name: a}]", [(1, "tenants[1].name")]),
        ("tenants: [{name: 'a b'}]", [(1, "tenants[0].name")]),
        ("tenants: [{name: a, arena_bytes: 0}]", [(1, "tenants[0].arena_bytes")]),
        ("tenants: [{name: a, requests_per_second: 0}]", [(1, "tenants[0].requests_per_second")]),
        ("tenants: [{name: a, requests_per_second: -1}]", [(1, "tenants[0].requests_per_second")]),
        ("tenants: [{name: a, arena_byte: 1}]", [(1, "tenants[0].arena_byte")]),
        (TENANT + "principals:\n  - {name: p, tenant: b, roles: [peer], uids: [1]}", [(3, "principals[0].tenant")]),
        (TENANT + "principals:\n  - {name: p, tenant: a, uids: [1]}", [(3, "principals[0].roles")]),
        (TENANT + "principals:\n  - {name: p, tenant: a, roles: [king], uids: [1]}", [(3, "principals[0].roles[0]")]),
        (TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer]}", [(3, "principals[0]")]),
        (TENANT + "principals:\n  - {name: owner, tenant: a, roles: [peer], uids: [1]}", [(3, "principals[0].name")]),
        (
            TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer], uids: [4294967295]}",
            [(3, "principals[0].uids[0]")],
        ),
        (
            TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer], uids: [1, 65534]}",
            [(3, "principals[0].uids[1]")],
        ),
        (
            TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer], subjects: ['*.x', 'a b']}",
            [(3, "principals[0].subjects[0]"), (3, "principals[0].subjects[1]")],
        ),
        (
            TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer], uids: [1]}"
            "\n  - {name: q, tenant: a, roles: [peer], uids: [1]}",
            [(4, "principals[1].uids[0]")],
        ),
    ],
)
def test_what_does_not_hold_is_told_by_line_and_field(tmp_path: Path, text: str, found: list[tuple[int, str]]) -> None:
    """Each fault alone."""
    told = problems(tmp_path, text)
    assert found[0] in told
    assert set(told) - set(found) <= {(line, field) for line, field in told if field.endswith("roles")}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"short\n", "line 1 of p.token: a token must have 32"),
        (b"x" * (TOKEN_CHARACTERS_MAX + 1), "line 1 of"),
        (f"{SECRET} {SECRET}".encode(), "line 1 of p.token: a token must be printable"),
        (f"\n{SECRET}\xe9".encode(), "line 2 of p.token: a token must be printable"),
        (b"\n".join(b"%040d" % i for i in range(TOKENS_PER_FILE_MAX + 1)), "more than 1000 tokens"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_tokens_that_does_not_hold(tmp_path: Path, content: bytes | None, says: str) -> None:
    """It is told by its line, without what stands there."""
    if content is not None:
        (tmp_path / "p.token").write_bytes(content)
    text = TENANT + "principals:\n  - {name: p, tenant: a, roles: [peer], token_files: [p.token]}\n"
    with pytest.raises(AccessFileError, match=re.escape(says)) as caught:
        load(tmp_path, text)
    assert SECRET not in str(caught.value)
    assert caught.value.field == "principals[0].token_files[0]"


@pytest.mark.parametrize("given", [SECRET, f"{SECRET}\\0", f"{SECRET}/x", "x" * 300 + SECRET])
def test_a_token_in_place_of_its_files_name_is_not_repeated(tmp_path: Path, given: str) -> None:
    """Somebody puts it there by mistake, and the fault stands in the log."""
    text = TENANT + f'principals:\n  - {{name: p, tenant: a, roles: [peer], token_files: ["{given}"]}}\n'
    with pytest.raises(AccessFileError, match="cannot be read") as caught:
        load(tmp_path, text)
    assert SECRET not in str(caught.value)


def test_one_token_of_two_principals_is_refused(tmp_path: Path) -> None:
    """It would be a matter of order who comes in."""
    for name in ("p", "q"):
        (tmp_path / f"{name}.token").write_text(SECRET, encoding="utf-8")
    entries = "".join(
        f"  - {{name: {name}, tenant: a, roles: [peer], token_files: [{name}.token]}}\n" for name in ("p", "q")
    )
    assert problems(tmp_path, TENANT + "principals:\n" + entries) == [(4, "principals[1].token_files[0]")]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Neither as the file itself nor as one of tokens."""
    os.mkfifo(tmp_path / "p.token")
    with pytest.raises(AccessFileError, match="not a regular file"):
        load(tmp_path, TENANT + "principals: [{name: p, tenant: a, roles: [peer], token_files: [p.token]}]")
    with pytest.raises(AccessFileError, match="not a regular file"):
        load_access_file(str(tmp_path / "p.token"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.text("tenancipl: -[]{}\n,'#*&0", max_size=120).map(str.encode)))
def test_anything_is_a_policy_or_the_one_error(tmp_path: Path, content: bytes) -> None:
    """Random bytes and random YAML raise nothing else."""
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    with suppress(AccessFileError):
        assert load_access_file(str(path)).policy.tenants
