"""Engines: what draws the inputs. A target does not know which one runs it.

- *atheris*, which is libFuzzer for Python, wherever it is packaged. It instruments the bytecode of this project, so
  that it sees which branches an input takes and which values it was compared with.
- A simple one of our own elsewhere: it keeps an input if it reaches a line of this project that none before it reached,
  and draws the next one by changing those that were kept. It is slower and blind for comparisons.
"""

from __future__ import annotations

import importlib.util
import io
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PROJECT = str(Path(__file__).parents[2] / "kvbridge")
INPUT_BYTES_MAX = 8192
"""Longest input that is drawn: what takes more bytes to provoke is for the tests of limits."""
_CHANGES_MAX = 4
_WORDS = (b"\0", b"\xff" * 8, b"\x80" * 9 + b"\x01", b"1e999", b"-1", b"null", b"[" * 64, b"\xed\xa0\x80")


def has_atheris() -> bool:
    """Tell whether atheris is installed."""
    return importlib.util.find_spec("atheris") is not None


@contextmanager
def instrumented() -> Iterator[None]:
    """Let atheris see into the modules of this project that are imported meanwhile."""
    import atheris  # noqa: PLC0415 - it may be absent

    # It tells every module that it looks into.
    with redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["kvbridge"]):
        yield


def run_atheris(run: Callable[[bytes], None], arguments: Sequence[str]) -> None:
    """Hand over to libFuzzer, which ends the process; `arguments` are its own."""
    import atheris  # noqa: PLC0415 - it may be absent

    atheris.Setup([sys.argv[0], *arguments], run)
    atheris.Fuzz()


class OwnEngine:
    """Draws inputs and keeps those that reach something new."""

    def __init__(
        self, run: Callable[[bytes], None], corpus: Sequence[bytes], *, seed: int, project: str = PROJECT
    ) -> None:
        """Start from a corpus; the same seed draws the same inputs. Lines of files below `project` count."""
        self.kept: list[bytes] = []
        self.runs = 0
        self.last = b""
        self._run = run
        self._project = project
        self._dice = random.Random(seed)
        self._reached: set[tuple[CodeType, int]] = set()
        for content in corpus:
            self._try(content)

    def run_for(self, seconds: float) -> None:
        """Draw inputs for so long; what the target raises is let through, and `last` is the input that did it."""
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            self._try(self._drawn())

    def additions(self, contents: Sequence[bytes]) -> list[bytes]:
        """Return those of `contents` that reach something that nothing before them reached."""
        before = len(self.kept)
        for content in contents:
            self._try(content)
        return self.kept[before:]

    def _try(self, content: bytes) -> None:
        self.last = content
        self.runs += 1
        before = len(self._reached)
        sys.settrace(self._trace)
        try:
            self._run(content)
        finally:
            sys.settrace(None)
        if len(self._reached) > before or not self.kept:
            self.kept.append(content)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._project):
            return None
        if event == "line":
            self._reached.add((frame.f_code, frame.f_lineno))
        return self._trace

    def _drawn(self) -> bytes:
        content = bytearray(self._dice.choice(self.kept))
        for _ in range(self._dice.randint(1, _CHANGES_MAX)):
            self._change(content)
        return bytes(content[:INPUT_BYTES_MAX])

    def _change(self, content: bytearray) -> None:
        dice = self._dice
        start = dice.randint(0, len(content))
        length = min(dice.randint(0, 8), len(content) - start)
        kind = dice.randrange(4)
        if kind == 0 and content:
            content[start % len(content)] ^= 1 << dice.randrange(8)
        elif kind == 1:
            content[start : start + length] = dice.choice(_WORDS)
        elif kind == 2:
            other = dice.choice(self.kept)
            cut = dice.randint(0, len(other))
            content[start : start + length] = other[cut : cut + dice.randint(0, 64)]
        else:
            content[start : start + length] = dice.randbytes(dice.randint(0, 8))
