"""How much memory the host could give at most, and which huge pages it has."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

HUGE_PAGE_BYTES = 2 * 1024 * 1024
"""The huge page of x86-64, and of arm64 with 4-KiB pages."""

_CGROUP_LIMITS = (("", "memory.max"), ("memory", "memory.limit_in_bytes"))
"""Controller name and file of the limit, for version 2 and version 1."""


def obtainable_bytes(root: Path = Path("/")) -> int:
    """Return the least of what is available on the host and what the process' control groups allow.

    This is an upper bound to refuse what clearly cannot work, not a promise: others allocate at the same time.
    """
    return min([available_bytes(root), *_cgroup_limits(root)])


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the kernel believes it could give without swapping."""
    return _meminfo(root)["MemAvailable"]


def free_huge_page_bytes(root: Path = Path("/")) -> int:
    """Return the bytes in reserved 2-MiB pages that nobody uses or has a claim on; 0 if the default size is another."""
    meminfo = _meminfo(root)
    if meminfo.get("Hugepagesize") != HUGE_PAGE_BYTES:
        return 0
    return (meminfo["HugePages_Free"] - meminfo["HugePages_Rsvd"]) * HUGE_PAGE_BYTES


def shared_huge_pages_allowed(root: Path = Path("/")) -> bool:
    """Tell whether the kernel gives transparent huge pages to a shared mapping that asks for them."""
    setting = root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    try:
        text = setting.read_text()
    except OSError:
        return False
    return any(f"[{choice}]" in text for choice in ("advise", "within_size", "always", "force"))


def _meminfo(root: Path) -> dict[str, int]:
    """Read the figures, in bytes where the kernel gives kB and as they are where it gives counts."""
    figures: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        value, _, unit = rest.strip().partition(" ")
        figures[name] = int(value) * (1024 if unit == "kB" else 1)
    return figures


def _cgroup_limits(root: Path) -> list[int]:
    """Return the limits of the process' memory control groups and of all groups above them."""
    limits = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, file in _CGROUP_LIMITS:
            if controller in controllers.split(","):
                limits += _limits_upwards(root / "sys/fs/cgroup" / controller, PurePosixPath(path), file)
    return limits


def _limits_upwards(mount: Path, group: PurePosixPath, file: str) -> list[int]:
    """Read the limit of `group` and of each group around it; a group that is not visible here has none to read."""
    limits = []
    for part in (group, *group.parents):
        try:
            text = (mount / part.relative_to("/") / file).read_text().strip()
        except OSError:
            continue
        if text != "max":
            limits.append(int(text))
    return limits
