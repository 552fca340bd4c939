"""Fingerprints as files: a magic number, a JSON header, the arrays, and a digest over all of it.

A file may come from anywhere. It is plain numbers, its size follows from its header, and both are checked before any
memory is taken for them; whatever else is wrong with it is told by one type of error.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
import xxhash

from kvbridge.core.errors import InvalidFieldError
from kvbridge.core.geometry import (
    HEAD_DIM_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    Dtype,
    PositionEncoding,
    PositionKind,
    RopePairing,
    RopeParameters,
)
from kvbridge.core.tags import ModelTag
from kvbridge.probe.errors import FingerprintFileError, FingerprintMismatchError
from kvbridge.probe.fingerprint import (
    DIMS_MAX,
    FINGERPRINT_BYTES_MAX,
    FIRST_TOKENS_MAX,
    VOCABULARY_MAX,
    Fingerprint,
    RoleFingerprint,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
"""Version of the file format that this release writes and reads."""
HEADER_BYTES_MAX = 256 << 10
"""Longest header (256 KiB)."""
_MAGIC = b"KVBPROBE"
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 16
_ROLES = ("keys", "values")
_ARRAYS = ("projection", "first", "means", "table")
"""In the order of the file: the table has the narrowest elements, and the arrays before it stay aligned."""


def save_fingerprint(fingerprint: Fingerprint, path: str | os.PathLike[str]) -> None:
    """Write a fingerprint, whole or not at all.

    Raises:
        FingerprintFileError: it cannot be written there, or is larger than any file may be.
    """
    target = Path(path)
    if fingerprint.nbytes > FINGERPRINT_BYTES_MAX:
        raise FingerprintFileError(str(target), f"{fingerprint.nbytes} bytes are over {FINGERPRINT_BYTES_MAX}")
    header = json.dumps(_header(fingerprint)).encode()
    pieces = [_MAGIC, _LENGTH.pack(len(header)), header, *(array.tobytes() for array in _arrays(fingerprint))]
    work = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with work.open("xb") as file:
            _write(file, pieces)
        work.replace(target)
    except OSError as error:
        raise FingerprintFileError(str(target), f"cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            work.unlink()


def load_fingerprint(path: str | os.PathLike[str], *, model: ModelTag | None = None) -> Fingerprint:
    """Read a fingerprint into memory.

    Args:
        path: The file.
        model: The version that it must belong to; any if absent.

    Raises:
        FingerprintFileError: there is no such file, or it is damaged or not a fingerprint of this format.
        FingerprintMismatchError: it belongs to another model version.
    """
    name = os.fspath(path)
    try:
        with _open(name) as file:
            fingerprint = _read(file, name)
    except OSError as error:
        raise FingerprintFileError(name, f"cannot be read: {error.strerror}") from error
    if model is not None and fingerprint.model != model:
        raise FingerprintMismatchError(name, model.differences(fingerprint.model))
    return fingerprint


def _write(file: BinaryIO, pieces: Iterable[bytes]) -> None:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
        file.write(piece)
    file.write(hasher.digest())


def _open(name: str) -> BinaryIO:
    # Opening a named pipe would wait for its writer.
    file = os.fdopen(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FingerprintFileError(name, "is not a regular file")
    return file


def _read(file: BinaryIO, name: str) -> Fingerprint:
    size_bytes = os.fstat(file.fileno()).st_size
    start = file.read(len(_MAGIC) + _LENGTH.size)
    if len(start) != len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
        raise FingerprintFileError(name, "is not a fingerprint")
    (header_bytes,) = _LENGTH.unpack(start[len(_MAGIC) :])
    if header_bytes > HEADER_BYTES_MAX:
        raise FingerprintFileError(name, f"has a header of {header_bytes} bytes; at most {HEADER_BYTES_MAX} is allowed")
    header = file.read(header_bytes)
    body_bytes = size_bytes - len(start) - header_bytes - _DIGEST_BYTES
    if not 0 <= body_bytes <= FINGERPRINT_BYTES_MAX:
        raise FingerprintFileError(name, f"has {size_bytes} bytes, which no fingerprint with such a header has")
    try:
        description = _Description(json.loads(header))
    except (ArithmeticError, AttributeError, InvalidFieldError, LookupError, TypeError, ValueError) as error:
        raise FingerprintFileError(name, f"has a header that does not describe one: {error}") from error
    except RecursionError:
        _refuse_nesting(name)
    if description.body_bytes != body_bytes:
        raise FingerprintFileError(name, f"holds {body_bytes} bytes of arrays, and describes {description.body_bytes}")
    body, digest = file.read(body_bytes), file.read()
    if xxhash.xxh3_128_digest(b"".join((start, header, body))) != digest:
        raise FingerprintFileError(name, "is damaged: its digest differs")
    fingerprint = description.fingerprint(body)
    if not all(bool(np.isfinite(array).all()) for array in _arrays(fingerprint)):
        raise FingerprintFileError(name, "holds numbers that are not finite")
    return fingerprint


def _refuse_nesting(name: str) -> NoReturn:
    raise FingerprintFileError(name, "has a header that does not describe one: it is nested too deeply")


class _Description:
    """A header whose every field has been checked, and the arrays that follow from it."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        _require("format", header["format"] == FORMAT, f"is {header['format']!r}; this release reads {FORMAT}")
        self.model = ModelTag(**header["model"])
        self.position_encoding = _encoding(header["position_encoding"])
        self.dtype = Dtype(header["dtype"])
        self.vocabulary = _integer(header, "vocabulary", VOCABULARY_MAX)
        self.layers = _integer(header, "layers", LAYERS_MAX)
        self.heads = _integer(header, "heads", HEADS_MAX)
        self.first_tokens = tuple(header["first_tokens"])
        _require("first_tokens", len(self.first_tokens) <= FIRST_TOKENS_MAX, f"are over {FIRST_TOKENS_MAX}")
        known = all(type(token) is int and 0 <= token < self.vocabulary for token in self.first_tokens)
        _require("first_tokens", known and len(set(self.first_tokens)) == len(self.first_tokens), "are not distinct")
        self.layer_margin = _number(header, "layer_margin")
        self.roles = {role: _Sizes(header[role]) for role in _ROLES}

    def _layout(self) -> list[tuple[str, str, str, tuple[int, ...]]]:
        """Return role, name, element type and shape of each array, in the order of the file."""
        layout = []
        for name in _ARRAYS:
            for role, sizes in self.roles.items():
                shapes = {
                    "projection": (self.heads, sizes.head_dim, sizes.dims),
                    "first": (len(self.first_tokens), self.layers, self.heads, sizes.head_dim),
                    "means": (self.layers, self.heads, sizes.head_dim),
                    "table": (self.vocabulary, self.heads, sizes.dims),
                }
                layout.append((role, name, "<f2" if name == "table" else "<f4", shapes[name]))
        return layout

    @property
    def body_bytes(self) -> int:
        """Return the bytes of all arrays; Python's integers do not overflow."""
        return sum(math.prod(shape) * np.dtype(element).itemsize for _, _, element, shape in self._layout())

    def fingerprint(self, body: bytes) -> Fingerprint:
        """Return the fingerprint over views of `body`."""
        arrays: dict[str, dict[str, NDArray[Any]]] = {role: {} for role in _ROLES}
        offset = 0
        for role, name, element, shape in self._layout():
            count = math.prod(shape)
            arrays[role][name] = np.frombuffer(body, element, count, offset).reshape(shape)
            offset += count * np.dtype(element).itemsize
        roles = {role: RoleFingerprint(**arrays[role], chance=sizes.chance) for role, sizes in self.roles.items()}
        return Fingerprint(
            model=self.model,
            position_encoding=self.position_encoding,
            dtype=self.dtype,
            first_tokens=self.first_tokens,
            layer_margin=self.layer_margin,
            **roles,
        )


class _Sizes:
    """What a header says of one role."""

    def __init__(self, header: Mapping[str, Any]) -> None:
        self.head_dim = _integer(header, "head_dim", HEAD_DIM_MAX)
        self.dims = _integer(header, "dims", DIMS_MAX)
        self.chance = _number(header, "chance")


def _header(fingerprint: Fingerprint) -> dict[str, Any]:
    roles = {
        name: {"head_dim": role.head_dim, "dims": role.dims, "chance": role.chance}
        for name, role in (("keys", fingerprint.keys), ("values", fingerprint.values))
    }
    return {
        "format": FORMAT,
        "model": asdict(fingerprint.model),
        "position_encoding": asdict(fingerprint.position_encoding),
        "dtype": fingerprint.dtype,
        "vocabulary": fingerprint.vocabulary,
        "layers": fingerprint.layers,
        "heads": fingerprint.heads,
        "first_tokens": fingerprint.first_tokens,
        "layer_margin": fingerprint.layer_margin,
        **roles,
    }


def _arrays(fingerprint: Fingerprint) -> Iterator[NDArray[Any]]:
    for name in _ARRAYS:
        for role in (fingerprint.keys, fingerprint.values):
            array: NDArray[Any] = getattr(role, name)
            yield array.astype("<f2" if name == "table" else "<f4", copy=False)


def _encoding(header: Mapping[str, Any]) -> PositionEncoding:
    rope = header["rope"]
    return PositionEncoding(kind=PositionKind(header["kind"]), rope=None if rope is None else _rope(rope))


def _rope(header: Mapping[str, Any]) -> RopeParameters:
    _require("rope.rope_type", isinstance(header["rope_type"], str), "is not a string")
    return RopeParameters(
        rope_type=header["rope_type"],
        theta=_number(header, "theta"),
        partial_factor=_number(header, "partial_factor"),
        pairing=RopePairing(header["pairing"]),
        scaling=tuple((str(name), tuple(float(value) for value in values)) for name, values in header["scaling"]),
    )


def _integer(header: Mapping[str, Any], name: str, most: int) -> int:
    value = header[name]
    _require(name, type(value) is int and 1 <= value <= most, f"must be an integer in [1, {most}]")
    return int(value)


def _number(header: Mapping[str, Any], name: str) -> float:
    value = header[name]
    _require(name, type(value) in {int, float} and math.isfinite(value), "must be a finite number")
    return float(value)


def _require(name: str, condition: bool, problem: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not condition:
        raise InvalidFieldError(name, problem)
