"""Tokens in files that change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbridge.files import signature_of
from kvbridge.tls import TOKEN_CHARACTERS_MIN, TokenFile, TokenFileError

TOKEN = "t0ken." * 8


def test_a_token_is_the_first_line_as_it_is_now(tmp_path: Path) -> None:
    """Even if the file keeps its size and its times."""
    path = tmp_path / "token"
    file = TokenFile(str(path))
    path.write_text(f"# the engine's\n\n{TOKEN}\nan older one that counts for nothing\n")
    assert file.token() == TOKEN
    times = path.stat()
    path.write_text(f"# the engine's\n\n{TOKEN.upper()}\nan older one that counts for nothing\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.token() == TOKEN.upper()


def test_a_file_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    """Once its last write is long enough ago to be told from the next one."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    file = TokenFile(str(path))
    file._known = (signature_of(str(path)), "what was read before")
    assert file.token() == "what was read before"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"# " + TOKEN.encode(),
        b"# a comment\nshort\n" + TOKEN.encode(),
        b"short",
        b"x" * (TOKEN_CHARACTERS_MIN - 1),
        b"x" * 5000,
        b"with blanks " * 8,
        b"\xc3\xa9" * 40,
    ],
)
def test_what_is_no_token_is_never_sent(tmp_path: Path, content: bytes) -> None:
    """The error names the file and repeats nothing."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(TokenFileError, match=str(path)) as refused:
        TokenFile(str(path)).token()
    assert not content or content.decode(errors="replace").strip() not in str(refused.value)


def test_a_missing_file_is_an_error_until_it_is_there(tmp_path: Path) -> None:
    """And a token never shows in what holds it."""
    path = tmp_path / "token"
    file = TokenFile(str(path))
    with pytest.raises(TokenFileError, match="No such file"):
        file.token()
    path.write_text(TOKEN)
    assert file.token() == TOKEN
    assert TOKEN not in repr(file)
