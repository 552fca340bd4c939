"""The examples do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import BridgeProcess, running_bridge
from tests.ports import KeptPort

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str, bridge: BridgeProcess) -> str:
    """Run an example against a bridge and return what it prints."""
    environment = {**os.environ, "KVBRIDGE_SOCKET": bridge.socket}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_of_its_own_takes_the_text_before_and_the_cache_after() -> None:
    """Before anything is published the consumer takes the text; afterwards it gets the cache."""
    with running_bridge("--catalog=") as bridge:  # As it is by default.
        assert "text because of PAYLOAD_UNKNOWN" in run("own_engine.py", "consume", bridge=bridge)
        assert "published: True" in run("own_engine.py", "produce", bridge=bridge)
        assert "cache of 600 tokens" in run("own_engine.py", "consume", bridge=bridge)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the commands make certificates with openssl")
def test_two_tenants_as_the_documentation_has_them(short_path: Path) -> None:
    """Its commands, as they stand but for the ports: A publishes and gets the cache, B is told of an unknown key."""
    _, section = (ROOT / "docs/security.md").read_text(encoding="utf-8").split("### Two tenants, for a try\n")
    commands = (
        section.split("```bash\n")[1].split("```")[0].replace("kvbridge serve", "kvbridge serve --metrics-listen ''")
    )
    assert "7411" in commands
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with KeptPort() as port:
        done = subprocess.run(
            ["bash", "-euc", commands.replace("7411", str(port.number))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PATH": path, "TMPDIR": str(short_path)},
        )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"published: True|cache of 600 tokens|text because of \w+", done.stdout)
    assert said == ["published: True", "cache of 600 tokens", "text because of PAYLOAD_UNKNOWN"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        yield Path(folder)
