"""What the host could give, read from made-up `/proc` and `/sys` trees and from the real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbridge.memory import host_capacity

MEMINFO = """MemTotal:       1000 kB
MemAvailable:    800 kB
HugePages_Total:      10
HugePages_Free:        7
HugePages_Rsvd:        2
Hugepagesize:       2048 kB
"""


def tree(root: Path, files: dict[str, str]) -> Path:
    """Write files below `root`, with a memory report and no control group unless `files` say otherwise."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_available_memory_counts(tmp_path: Path) -> None:
    """Nothing but the kernel's own estimate bounds an arena."""
    assert host_capacity.obtainable_bytes(tree(tmp_path, {})) == 800 * 1024


def test_the_least_limit_of_all_groups_upwards_counts(tmp_path: Path) -> None:
    """In version 2 a group is bound by the groups around it, and `max` binds nothing."""
    files = {
        "proc/self/cgroup": "0::/pods/pod/container\n",
        "sys/fs/cgroup/pods/memory.max": "5000\n",
        "sys/fs/cgroup/pods/pod/memory.max": "4096\n",
        "sys/fs/cgroup/pods/pod/container/memory.max": "max\n",
    }
    assert host_capacity.obtainable_bytes(tree(tmp_path, files)) == 4096


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """With a cgroup namespace the path is `/` and the limit lies at the mount itself."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "8192\n"}
    assert host_capacity.obtainable_bytes(tree(tmp_path, files)) == 8192


def test_limits_of_version_one_count(tmp_path: Path) -> None:
    """In version 1 the memory controller has a tree of its own."""
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "12288\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert host_capacity.obtainable_bytes(tree(tmp_path, files)) == 12288


def test_claimed_huge_pages_are_not_free(tmp_path: Path) -> None:
    """A page that another mapping has a claim on cannot be had."""
    assert host_capacity.free_huge_page_bytes(tree(tmp_path, {})) == 5 * 2 * 1024 * 1024


def test_huge_pages_of_another_size_are_not_used(tmp_path: Path) -> None:
    """Only 2-MiB pages are asked for, so only those count."""
    files = {"proc/meminfo": MEMINFO.replace("2048 kB", "1048576 kB")}
    assert host_capacity.free_huge_page_bytes(tree(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise [never] deny force", False),
        ("always within_size advise never [deny] force", False),
        (None, False),
    ],
)
def test_the_kernel_setting_decides_on_transparent_huge_pages(
    tmp_path: Path, setting: str | None, *, allowed: bool
) -> None:
    """They are used where a mapping that asks gets them; a kernel without the setting has none."""
    files = {} if setting is None else {"sys/kernel/mm/transparent_hugepage/shmem_enabled": setting}
    assert host_capacity.shared_huge_pages_allowed(tree(tmp_path, files)) is allowed


def test_this_host_can_be_read() -> None:
    """The real files have the expected form."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < host_capacity.obtainable_bytes() <= installed
    assert 0 < host_capacity.available_bytes() <= installed  # Another moment's, which may be less or more.
    assert host_capacity.free_huge_page_bytes() >= 0
