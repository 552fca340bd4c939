"""Files: what people, other programs and an earlier start of the node leave behind."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import xxhash
import yaml

from kvbridge.catalog_file import CatalogFileError, read_catalog
from kvbridge.config import ConfigurationError, load_config
from kvbridge.core import quarantine
from kvbridge.core.catalog.route import ModelPattern
from kvbridge.core.descriptor import PayloadReference
from kvbridge.core.layout import HEADER_BYTES
from kvbridge.core.quarantine import AlignerPattern, Quarantine
from kvbridge.core.reasons import Reason
from kvbridge.memory.errors import SlotHeaderError
from kvbridge.memory.slot_header import SlotState, check, read_header, write_header
from kvbridge.node.quarantine_file import QuarantineFile, QuarantineFileError
from kvbridge.observe.journal_reader import JournalUnreadableError, find_by_id, find_newest
from kvbridge.probe.errors import FingerprintFileError
from kvbridge.probe.files import load_fingerprint, save_fingerprint
from kvbridge.wire.journal import RecordEncoder
from tests import records
from tests.fuzz.target import Target
from tests.unit.probe.synthetic import Synthetic

_CATALOG = """\
kill_switch: false
defaults:
  mode: CANARY
  canary_percent: 12.5
  breaker: {window: 60s, bad_share_max: 0.5}
models:
  - tag: {name: tiny, revision: '1', weight_dtype: bfloat16, tokenizer_digest: t0}
    family: tiny
routes:
  - name: one
    source: {name: tiny}
    target: {name: tiny, adapter: ''}
    edge: plan
    policy: {mode: OFF, tokens_min: 100}
"""
_TOML = """\
node_id = "node-1"
arena_bytes = 1048576
linger_seconds = 2.5
reflection = false
peers = "other=host:7411"
"""


@cache
def _folder() -> Path:
    """Return a folder of this process, in memory where there is one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="kvb-fuzz-", dir=memory if memory.is_dir() else None))


def scratch_file(content: bytes) -> str:
    path = _folder() / "file"
    path.write_bytes(content)
    return str(path)


def written_file(write: Callable[[str], object]) -> bytes:
    path = _folder() / "written"
    write(str(path))
    return path.read_bytes()


def _run_catalog(content: bytes) -> None:
    try:
        read_catalog(content, "catalog.yaml")
    except CatalogFileError:
        return


def _catalog_files() -> Sequence[bytes]:
    assert read_catalog(_CATALOG.encode(), "seed").routes
    return [_CATALOG.encode(), yaml.safe_dump(yaml.safe_load(_CATALOG)).encode(), b"{}"]


def _run_quarantines(content: bytes) -> None:
    file = QuarantineFile(scratch_file(content))
    try:
        quarantines = file.read()
    except QuarantineFileError:
        return
    file.write(quarantines)
    assert file.read() == quarantines


def _quarantine_files() -> Sequence[bytes]:
    targets: tuple[quarantine.Target, ...] = (
        ModelPattern(name="tiny", revision="1", adapter=None),
        AlignerPattern(name="bridge", version="1"),
        PayloadReference(key="conversation/1", generation=2),
    )
    quarantines = [
        ("default", Quarantine(quarantine_id=f"q{number}", target=target, why="because", since=1_796_000_000.25))
        for number, target in enumerate(targets)
    ]
    return [written_file(lambda path: QuarantineFile(path).write(quarantines))]


def _run_journal(content: bytes) -> None:
    path = scratch_file(content)
    for selected in (None, Reason.PAYLOAD_EXPIRED, "handoff-1"):
        try:
            if isinstance(selected, Reason) or selected is None:
                find_newest(path, selected)
            else:
                find_by_id(path, selected)
        except JournalUnreadableError:
            continue


def _journals() -> Sequence[bytes]:
    encoder = RecordEncoder("node", client_key=b"k")
    lines = [encoder.record(records.record()), encoder.record(records.record(records.refused()))]
    return [b"".join(json.dumps(line).encode() + b"\n" for line in lines)]


def _run_fingerprint(content: bytes) -> None:
    """Read a fingerprint with the right digest below it, which no search would find."""
    try:
        load_fingerprint(scratch_file(content + xxhash.xxh3_128_digest(content)))
    except FingerprintFileError:
        return


def _fingerprints() -> Sequence[bytes]:
    whole = written_file(lambda path: save_fingerprint(Synthetic().fingerprint(), path))
    return [whole[:-16]]


def _run_configuration(content: bytes) -> None:
    try:
        load_config(scratch_file(content), environment={})
    except ConfigurationError:
        return


def _run_environment(content: bytes) -> None:
    """Read NAME=VALUE, separated by zero bytes, as a process is given them."""
    entries = [entry.decode("utf-8", "surrogateescape").partition("=") for entry in content.split(b"\0")]
    try:
        load_config(environment={name: value for name, _, value in entries})
    except ConfigurationError:
        return


def _environments() -> Sequence[bytes]:
    return [b"KVBRIDGE_ARENA_BYTES=4096\0KVBRIDGE_REFLECTION=no\0KVBRIDGE_LINGER_SECONDS=1e3\0KVBRIDGE_NODE_ID=a"]


def _run_slot_header(content: bytes) -> None:
    page = bytearray(content[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    try:
        header = read_header(page)
    except SlotHeaderError:
        return
    assert check(page, header.epoch, header.generation, header.state)
    written = bytearray(HEADER_BYTES)
    write_header(written, epoch=header.epoch, generation=header.generation, state=header.state)
    assert read_header(written) == header


def _slot_headers() -> Sequence[bytes]:
    pages = []
    for state in SlotState:
        page = bytearray(HEADER_BYTES)
        write_header(page, epoch=0xFEDCBA9876543210, generation=7, state=state)
        pages.append(bytes(page[: 4 * struct.calcsize("Q")]))
    return pages


FILES: dict[str, Target] = {
    "catalog_file": Target(run=_run_catalog, seeds=_catalog_files),
    "configuration_environment": Target(run=_run_environment, seeds=_environments),
    "configuration_file": Target(run=_run_configuration, seeds=lambda: [_TOML.encode()]),
    "fingerprint_file": Target(run=_run_fingerprint, seeds=_fingerprints),
    "journal_file": Target(run=_run_journal, seeds=_journals),
    "quarantine_file": Target(run=_run_quarantines, seeds=_quarantine_files),
    "slot_header": Target(run=_run_slot_header, seeds=_slot_headers),
}
