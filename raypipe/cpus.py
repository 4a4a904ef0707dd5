"""The number of CPUs that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_UNLIMITED = 1 << 20  # CPUs, more than any machine has


def num_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1; the machine's, if unknown, as on macOS.

    `taskset` and Slurm limit it by affinity; Docker, Kubernetes and systemd by the quota of a control group.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = _quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return max(1, min(allowed, int(quota)))


def _quota(root: Path, process: Path) -> float:
    """The CPUs of the smallest quota of this process's control group and those above it; a large number = none.

    Args:
        root: where the groups are mounted; those of version 1 in its folder `cpu`.
        process: the file that names the process's groups: `0::/PATH`, or in version 1 `NUMBER:cpu,…:/PATH`.
    """
    quotas = [float(_UNLIMITED)]
    with contextlib.suppress(OSError):
        for line in process.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = root / "cpu" if controllers else root
            group = top / name.strip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(top):
                    quotas += _quota_of(folder)
    return min(quotas)


def _quota_of(group: Path) -> list[float]:
    """The quota in the files of a control group of either version; empty = it has none."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):
            words = " ".join((group / name).read_text() for name in names).split()
            quota, period = map(int, words)  # "max" = none, a ValueError
            return [quota / period] if quota > 0 else []
    return []
