"""Every input that fuzzing has ever kept, and every one that was once a finding, is decoded or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.engine import OwnEngine
from tests.fuzz.targets import TARGETS

CORPUS_BYTES_MAX = 512 << 10


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_of_a_target_holds(name: str) -> None:
    """No input of the corpus, and no seed, raises anything but its decoder's own errors."""
    contents = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    for content in [*TARGETS[name].seeds(), *contents]:
        TARGETS[name].run(content)


def test_the_corpus_is_small_and_of_known_targets() -> None:
    """The repository carries no more than it needs."""
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) <= CORPUS_BYTES_MAX


def test_the_simple_engine_finds_a_planted_bug(tmp_path: Path) -> None:
    """Where atheris is not packaged, inputs still find their way step by step, because each step reaches a new line."""
    planted = tmp_path / "planted.py"
    planted.write_text(
        "def run(content):\n"
        "    if content[:1] == b'K':\n"
        "        if content[1:2] == b'V':\n"
        "            raise OverflowError\n",
        encoding="utf-8",
    )
    scope: dict[str, object] = {}
    exec(compile(planted.read_text(encoding="utf-8"), "kvbridge/planted.py", "exec"), scope)
    run = scope["run"]
    assert callable(run)
    fuzzer = OwnEngine(run, [b"KA"], seed=1, project="kvbridge/")
    with pytest.raises(OverflowError):
        fuzzer.run_for(30.0)
    assert fuzzer.last.startswith(b"KV")
