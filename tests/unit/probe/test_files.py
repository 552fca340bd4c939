"""Fingerprints on disk: what is written comes back, and whatever else lies there is refused."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbridge.probe import (
    Fingerprint,
    FingerprintFileError,
    FingerprintMismatchError,
    files,
    load_fingerprint,
    save_fingerprint,
)
from tests import builders
from tests.unit.probe.synthetic import Synthetic

FINGERPRINT = Synthetic().fingerprint()


def arrays(fingerprint: Fingerprint) -> list[Any]:
    """Return all arrays."""
    roles = (fingerprint.keys, fingerprint.values)
    return [getattr(role, name) for role in roles for name in ("projection", "table", "first", "means")]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where a fingerprint lies."""
    saved = tmp_path / "model.kvprobe"
    save_fingerprint(FINGERPRINT, saved)
    return saved


def rewrite(path: Path, *, change: dict[str, Any] | bytes, body: bytes | None = None) -> None:
    """Write the file again with another header, or another body, under a right digest."""
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[8:12])
    header, rest = content[12 : 12 + length], content[12 + length : -16]
    header = json.dumps({**json.loads(header), **change}).encode() if isinstance(change, dict) else change
    whole = content[:8] + struct.pack("<I", len(header)) + header + (rest if body is None else body)
    path.write_bytes(whole + xxhash.xxh3_128_digest(whole))


def test_what_is_written_comes_back(path: Path) -> None:
    """Every field and array, and nothing beside the file is left."""
    loaded = load_fingerprint(path, model=builders.model_tag())
    assert loaded.snapshot() == FINGERPRINT.snapshot()
    for mine, theirs in zip(arrays(FINGERPRINT), arrays(loaded), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert not theirs.flags.writeable
    assert list(path.parent.iterdir()) == [path]
    assert "tiny" in repr(loaded)


@given(builders.model_tags, builders.position_encodings)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_tag_and_encoding_comes_back(tmp_path: Path, model: Any, encoding: Any) -> None:
    """Names in any script and numbers of any size survive."""
    save_fingerprint(replace(FINGERPRINT, model=model, position_encoding=encoding), tmp_path / "f")
    loaded = load_fingerprint(tmp_path / "f")
    assert (loaded.model, loaded.position_encoding) == (model, encoding)


def test_another_model_version_is_refused(path: Path) -> None:
    """The error names what differs."""
    with pytest.raises(FingerprintMismatchError, match="revision is 'xxh3:00', not 'xxh3:01'"):
        load_fingerprint(path, model=builders.model_tag(revision="xxh3:01"))


def test_a_damaged_or_shortened_file_is_refused(path: Path) -> None:
    """A flipped bit and a cut anywhere are noticed."""
    whole = path.read_bytes()
    for position in (0, 9, 20, 600, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(FingerprintFileError):
            load_fingerprint(path)
        path.write_bytes(whole[:position])
        with pytest.raises(FingerprintFileError):
            load_fingerprint(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(FingerprintFileError):
        load_fingerprint(path)


@given(st.binary(max_size=400), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_break_the_reader(tmp_path: Path, content: bytes, begins_well: bool) -> None:
    """Anything that is no fingerprint gives the one typed error."""
    target = tmp_path / "any"
    target.write_bytes((b"KVBPROBE" if begins_well else b"") + content)
    with pytest.raises(FingerprintFileError):
        load_fingerprint(target)


ROLE = {"head_dim": 16, "dims": 8, "chance": 1.0}
HEADERS: dict[str, Any] = {
    "another format": {"format": 2},
    "huge vocabulary": {"vocabulary": 1 << 40},
    "boolean for a number": {"layers": True},
    "no layers": {"layers": 0},
    "text for a number": {"heads": "4"},
    "model without fields": {"model": {}},
    "model with another field": {"model": {"colour": "red"}},
    "model as a list": {"model": []},
    "empty name": {"model": {**asdict(builders.model_tag()), "name": ""}},
    "unknown kind": {"position_encoding": {"kind": "SPIRAL", "rope": None}},
    "rope missing": {"position_encoding": {"kind": "ROPE", "rope": None}},
    "rope of words": {"position_encoding": {"kind": "ROPE", "rope": {"theta": "x"}}},
    "unknown dtype": {"dtype": "float8"},
    "first token outside": {"first_tokens": [300, 1]},
    "first token twice": {"first_tokens": [1, 1]},
    "first tokens as words": {"first_tokens": ["1", "7"]},
    "too many first tokens": {"first_tokens": list(range(65))},
    "role missing": {"keys": None},
    "role too wide": {"keys": {**ROLE, "dims": 17}},
    "chance that is no number": {"keys": {**ROLE, "chance": float("nan")}},
    "infinite margin": {"layer_margin": float("inf")},
    "other sizes": {"layers": 4},
    "no JSON": b"{",
    "a list": b"[]",
    "a number": b"1",
    "not UTF-8": b"\xff\xfe{}",
    "nested deeply": b"[" * 200_000,
    "a number of many digits": b'{"format": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_describe_nothing_are_refused(path: Path, what: str) -> None:
    """Every field is checked, even under a right digest."""
    rewrite(path, change=HEADERS[what])
    with pytest.raises(FingerprintFileError):
        load_fingerprint(path)


def test_a_header_over_the_limit_is_not_read(path: Path) -> None:
    """Its stated length is looked at first."""
    rewrite(path, change=b" " * (files.HEADER_BYTES_MAX + 1))
    with pytest.raises(FingerprintFileError, match="has a header of"):
        load_fingerprint(path)


def test_numbers_that_are_not_finite_are_refused(path: Path) -> None:
    """Against them every comparison would fail."""
    size_bytes = sum(array.nbytes for array in arrays(FINGERPRINT))
    rewrite(path, change={}, body=b"\xff" * size_bytes)
    with pytest.raises(FingerprintFileError, match="not finite"):
        load_fingerprint(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing there, a folder, and a pipe that nobody writes to, on which reading would wait."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (tmp_path / "nothing", tmp_path, pipe):
        with pytest.raises(FingerprintFileError):
            load_fingerprint(target)


def test_a_file_over_the_limit_is_not_read(path: Path) -> None:
    """A sparse file of any size costs nothing."""
    os.truncate(path, 1 << 40)
    with pytest.raises(FingerprintFileError, match="bytes, which no fingerprint"):
        load_fingerprint(path)


def test_nothing_is_left_where_nothing_can_be_written(tmp_path: Path) -> None:
    """An error of the file system is told by the same type, and leaves no piece behind."""
    target = tmp_path / "taken"
    target.mkdir()
    with pytest.raises(FingerprintFileError, match="cannot be written"):
        save_fingerprint(FINGERPRINT, target)
    with pytest.raises(FingerprintFileError, match="cannot be written"):
        save_fingerprint(FINGERPRINT, tmp_path / "missing" / "f")
    assert list(tmp_path.iterdir()) == [target]
