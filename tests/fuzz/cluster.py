"""What nodes leave for one another, and for themselves: orders, entries of the directory, texts, the access file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbridge.access_file import AccessFileError, load_access_file
from kvbridge.access_file.tokens import read_token_digests
from kvbridge.core.descriptor import FallbackText, PayloadReference
from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.kept_text import KeptText
from kvbridge.core.orders import KillSwitchOrder, Order, OrderContent, QuarantineOrder, RevocationOrder
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.core.reasons import Reason
from kvbridge.directory.port import Member
from kvbridge.directory.redis_schema import decode_location, decode_member, decode_node_id, encode_member
from kvbridge.node.kill_switch_file import KillSwitchFile, KillSwitchFileError
from kvbridge.wire.kept_texts import decode_kept_text, encode_kept_text
from kvbridge.wire.orders import encode_order, parse_order
from kvbridge.yaml_file import UnreadableError
from tests import builders
from tests.fuzz.files import scratch_file, written_file
from tests.fuzz.target import Target

_REFERENCE = PayloadReference(key="conversation/1", generation=2)
_ACCESS = """\
tenants:
  - name: team-a
    arena_bytes: 4294967296
    payloads_max: 1000
    requests_per_second: 200
principals:
  - name: engine-a
    tenant: team-a
    roles: [producer, consumer]
    uids: [1001]
    subjects: ['spiffe://cluster/ns/a/sa/vllm']
"""


def _run_order(content: bytes) -> None:
    """Take an order and pass it on, as every node does."""
    try:
        order = parse_order(content)
    except InvalidFieldError:
        return
    again = parse_order(encode_order(order).SerializeToString())
    assert (again.order_id, again.origin) == (order.order_id, order.origin)
    assert type(again.content) is type(order.content)


def _orders() -> Sequence[bytes]:
    imposed = Quarantine(
        quarantine_id="0123456789abcdef",
        target=AlignerPattern(name="bridge", version="1"),
        why="because",
        since=1_796_000_000.25,
    )
    revoked = RevocationOrder(
        tenant="default",
        reference=PayloadReference(key="kvb://node-a/k@3", generation=1),
        epoch=7,
        reason=Reason.PAYLOAD_CORRUPT,
        detail="bad",
    )
    contents: tuple[OrderContent, ...] = (
        QuarantineOrder(tenant="default", quarantine=imposed),
        KillSwitchOrder(why="because"),
        revoked,
    )
    orders = [
        Order(order_id="0123456789abcdef", origin="node-a", issued_at=1234.5, content=content) for content in contents
    ]
    return [encode_order(order).SerializeToString(deterministic=True) for order in orders]


def _run_kept_text(content: bytes) -> None:
    try:
        kept = decode_kept_text(content, _REFERENCE)
    except InvalidFieldError:
        return
    assert decode_kept_text(encode_kept_text(kept), _REFERENCE) == kept


def _kept_texts() -> Sequence[bytes]:
    kept = KeptText(
        reference=_REFERENCE,
        model=builders.model_tag(),
        fallback=FallbackText(text="the text", summary="short"),
        tokens=builders.tokens(),
    )
    return [encode_kept_text(kept)]


def _run_member(content: bytes) -> None:
    member = decode_member("node-1", content)
    if member is not None:
        assert decode_member("node-1", encode_member(member)) == member


def _members() -> Sequence[bytes]:
    return [encode_member(Member(node_id="node-1", target="host:7411", epoch=7))]


def _run_location(content: bytes) -> None:
    decode_node_id(content)
    location = decode_location(b"node-1", content)
    assert location is None or location.node_id == "node-1"


def _run_kill_switch(content: bytes) -> None:
    file = KillSwitchFile(scratch_file(content))
    try:
        why = file.read()
    except KillSwitchFileError:
        return
    file.write(why, file.order_id)
    assert file.read() == why


def _kill_switches() -> Sequence[bytes]:
    whys: tuple[str | None, ...] = (None, "because")
    return [written_file(_kill_switch_writer(why)) for why in whys]


def _kill_switch_writer(why: str | None) -> Callable[[str], Any]:
    return lambda path: KillSwitchFile(path).write(why, "" if why is None else "0123456789abcdef")


def _run_access(content: bytes) -> None:
    try:
        load_access_file(scratch_file(content))
    except AccessFileError:
        return


def _access_files() -> Sequence[bytes]:
    path = Path(scratch_file(_ACCESS.encode()))
    assert load_access_file(str(path)).policy.grants
    return [_ACCESS.encode()]


def _run_tokens(content: bytes) -> None:
    try:
        digests = read_token_digests(scratch_file(content))
    except UnreadableError:
        return
    assert all(len(digest) == 32 for digest in digests)


CLUSTER: dict[str, Target] = {
    "access_file": Target(run=_run_access, seeds=_access_files),
    "directory_location": Target(run=_run_location, seeds=lambda: [b"7 3 1796000000250"]),
    "directory_member": Target(run=_run_member, seeds=_members),
    "kept_text": Target(run=_run_kept_text, seeds=_kept_texts),
    "kill_switch_file": Target(run=_run_kill_switch, seeds=_kill_switches),
    "order": Target(run=_run_order, seeds=_orders),
    "token_file": Target(run=_run_tokens, seeds=lambda: [b"# a comment\n\n  " + b"t" * 40 + b"  \n"]),
}
