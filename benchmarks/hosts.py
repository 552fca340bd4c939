"""Where the two nodes of a benchmark run: both on this machine's loopback, or at the two ends of a link."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_COMMAND_SECONDS_MAX = 30.0
_NEAR_ADDRESS, _FAR_ADDRESS = "10.213.78.1", "10.213.78.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Two hosts, of which the near one is where the benchmark runs."""

    near: str
    """Address of the near one."""
    far: str
    """Address of the far one."""
    at_far: tuple[str, ...]
    """Words before a command that is to run on the far one."""
    flags: tuple[str, ...]
    """Flags that a node needs to listen on these addresses."""


LOOPBACK = Hosts(near="127.0.0.1", far="127.0.0.1", at_far=(), flags=())
"""One host, and an interface that copies what it sends from one socket to the other."""


@contextmanager
def veth() -> Iterator[Hosts]:
    """Make a network namespace that a pair of virtual Ethernet devices joins to this one; takes root and iproute2.

    Raises:
        OSError: there is no `ip`.
        subprocess.CalledProcessError: this machine does not allow it.
    """
    namespace, near, far = f"kvb-bench-{os.getpid()}", f"kbn{os.getpid()}", f"kbf{os.getpid()}"
    inside = ("ip", "netns", "exec", namespace)
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", namespace)
        _run("ip", "address", "add", f"{_NEAR_ADDRESS}/30", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run(*inside, "ip", "address", "add", f"{_FAR_ADDRESS}/30", "dev", far)
        _run(*inside, "ip", "link", "set", far, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        yield Hosts(near=_NEAR_ADDRESS, far=_FAR_ADDRESS, at_far=inside, flags=("--insecure",))
    finally:
        _run("ip", "netns", "delete", namespace)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=_COMMAND_SECONDS_MAX)
