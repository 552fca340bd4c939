"""An access policy from a YAML file: the schema of `kvbridge.v1.AccessFile`, by its fields' names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvbridge.access_file.errors import AccessFileError
from kvbridge.access_file.tokens import read_token_digests
from kvbridge.core.access import NAME_CHARACTERS_MAX, OWNER_NAME, AccessPolicy, Grant, Principal, Role, is_name
from kvbridge.core.access.quota import TenantQuota
from kvbridge.v1 import access_file_pb2 as pb
from kvbridge.yaml_file import Fields, FileProblem, Filler, UnreadableError, document, read_file
from kvbridge.yaml_file.places import line_of

FILE_BYTES_MAX = 4 << 20
"""Largest access file."""
TENANTS_MAX = 256
"""Most tenants: each has an arena of its own."""
PRINCIPALS_MAX = 10_000
"""Most principals."""
TOKEN_FILES_MAX = 1000
"""Most files of tokens."""
UID_MAX = (1 << 32) - 2
"""Greatest user; the next number stands for none."""
_OVERFLOW_UID = 65_534
_SUBJECT_CHARACTERS_MAX = 2048
_ROLE_PREFIX = "ACCESS_ROLE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAccess:
    """What was read."""

    policy: AccessPolicy
    """Who may call."""
    token_files: tuple[str, ...]
    """Paths of the files of tokens that were read with it."""


def load_access_file(path: str) -> LoadedAccess:
    """Read the file at `path`, and every file of tokens that it names.

    Raises:
        AccessFileError: one of them cannot be opened, or holds something that is not allowed; all problems that can be
            seen at once are told.
    """
    try:
        content = read_file(path, FILE_BYTES_MAX)
        if len(content) > FILE_BYTES_MAX:
            raise UnreadableError(0, f"the file is larger than {FILE_BYTES_MAX} bytes")  # noqa: TRY301
        tree = document(content)
    except UnreadableError as error:
        raise AccessFileError(path, [error.problem]) from error
    reading = _Reading(tree, Path(path).absolute().parent)
    policy = reading.policy()
    if reading.problems:
        raise AccessFileError(path, reading.problems)
    return LoadedAccess(policy=policy, token_files=tuple(reading.token_files))


class _Reading:
    """Goes through a file once and notes everything that is wrong with it."""

    def __init__(self, tree: Fields, directory: Path) -> None:
        self._tree = tree
        self._directory = directory
        self._message = pb.AccessFile()
        filler = Filler()
        filler.fill(self._message, tree, "")
        self.problems: list[FileProblem] = filler.problems
        self._proofs: dict[object, str] = {}
        self.token_files: list[str] = []

    def policy(self) -> AccessPolicy:
        """Return what the file says; nothing that may be used if there are problems."""
        message = self._message
        self._check(bool(message.tenants), "tenants", "must hold at least one")
        self._check(len(message.tenants) <= TENANTS_MAX, "tenants", f"are more than {TENANTS_MAX}")
        self._check(len(message.principals) <= PRINCIPALS_MAX, "principals", f"are more than {PRINCIPALS_MAX}")
        self._check_names("tenants", [tenant.name for tenant in message.tenants])
        self._check_names("principals", [principal.name for principal in message.principals])
        tenants = {t.name: self._quota(t, f"tenants[{i}]") for i, t in enumerate(message.tenants[:TENANTS_MAX])}
        entries = enumerate(message.principals[:PRINCIPALS_MAX])
        grants = tuple(self._grant(entry, f"principals[{i}]", tenants) for i, entry in entries)
        return AccessPolicy(tenants=tenants, grants=grants)

    def _check_names(self, kind: str, names: list[str]) -> None:
        seen: dict[str, int] = {}
        for position, name in enumerate(names):
            field = f"{kind}[{position}].name"
            first = seen.setdefault(name, position)
            self._check(
                is_name(name),
                field,
                f"is required: 1 to {NAME_CHARACTERS_MAX} letters, digits, dots, underscores and hyphens, "
                "beginning and ending with a letter or a digit",
            )
            self._check(first == position, field, f"is there twice; first as {kind}[{first}]")

    def _quota(self, tenant: pb.AccessTenant, path: str) -> TenantQuota:
        given = {field.name: value for field, value in tenant.ListFields() if field.name != "name"}
        quota = TenantQuota(**given)
        for name, problem in quota.problems():
            self._check(False, f"{path}.{name}", problem)  # noqa: FBT003 - it takes no name
        return quota

    def _grant(self, entry: pb.AccessPrincipal, path: str, tenants: Iterable[str]) -> Grant:
        self._check(entry.name != OWNER_NAME, f"{path}.name", "is the name of whoever owns the node")
        self._check(entry.tenant in tenants, f"{path}.tenant", "is required, and must be one of the tenants above")
        self._check(bool(entry.roles), f"{path}.roles", "is required")
        proved = entry.uids or entry.subjects or entry.token_files
        self._check(bool(proved), path, "has nothing that proves who it is: uids, subjects or token_files")
        for i, uid in enumerate(entry.uids):
            self._check(uid <= UID_MAX, f"{path}.uids[{i}]", f"must be at most {UID_MAX}")
            self._check(uid != _OVERFLOW_UID, f"{path}.uids[{i}]", "is what the kernel calls every user it cannot name")
            self._claim(("uid", uid), f"{path}.uids[{i}]")
        for i, subject in enumerate(entry.subjects):
            self._check_subject(subject, f"{path}.subjects[{i}]")
            self._claim(("subject", subject), f"{path}.subjects[{i}]")
        digests = [self._digests(name, f"{path}.token_files[{i}]") for i, name in enumerate(entry.token_files)]
        roles = frozenset(Role[pb.AccessRole.Name(role).removeprefix(_ROLE_PREFIX)] for role in entry.roles)
        return Grant(
            principal=Principal(name=entry.name, tenant=entry.tenant, roles=roles),
            uids=frozenset(entry.uids),
            subjects=frozenset(entry.subjects),
            token_digests=frozenset().union(*digests),
        )

    def _check_subject(self, subject: str, path: str) -> None:
        fits = subject.isprintable() and not any(c.isspace() for c in subject) and "*" not in subject
        self._check(
            bool(subject) and fits and len(subject) <= _SUBJECT_CHARACTERS_MAX,
            path,
            "must be a URI or a DNS name as it stands in certificates, without spaces or wildcards",
        )

    def _digests(self, name: str, path: str) -> frozenset[bytes]:
        self.token_files.append(str(self._directory / name))
        if len(self.token_files) > TOKEN_FILES_MAX:
            self._check(False, path, f"is one of more than {TOKEN_FILES_MAX} files of tokens")  # noqa: FBT003
            return frozenset()
        try:
            digests = read_token_digests(self.token_files[-1])
        except UnreadableError as error:
            # A name that leads to no file may be a token that somebody put in the wrong place.
            where = f"line {error.problem.line} of {name}: " if error.problem.line else ""
            self._check(False, path, f"{where}{error.problem.problem}")  # noqa: FBT003
            return frozenset()
        for digest in digests:
            self._claim(digest, path)
        return digests

    def _claim(self, proof: object, path: str) -> None:
        """Note what proves a principal; two principals with one proof would be whoever comes first."""
        first = self._proofs.setdefault(proof, path)
        mine = path.partition("]")[0]
        self._check(first.partition("]")[0] == mine, path, f"proves another principal already, at {first}")

    def _check(self, holds: bool, path: str, problem: str) -> None:  # noqa: FBT001
        if not holds and not any(path == told.field for told in self.problems):
            self.problems.append(FileProblem(line=line_of(self._tree, path), field=path, problem=problem))
