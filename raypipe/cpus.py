"""The number of CPUs that this process may use, and the time for which a thread waits for one."""

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
    return max(
        1, min(allowed, int(_quota(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))))
    )


def queued_s() -> float:
    """Return the seconds for which the calling thread was ready to run and had no CPU; 0 where nobody tells."""
    try:
        _, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(queued_ns) / 1e9


def _quota(root: Path, process: Path) -> float:
    """The CPUs of the smallest quota of this process's control group and those above it; a large number = none.

    Args:
        root: where the groups (version 2) are mounted.
        process: the file that names the process's group: `0::/PATH`.
    """
    try:
        name = next(
            line[3:]
            for line in process.read_text().splitlines()
            if line.startswith("0::")
        ).strip("/")
    except (OSError, StopIteration):
        return _UNLIMITED
    quotas = [float(_UNLIMITED)]
    for group in (root / name, *(root / name).parents):
        if not group.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            quotas.append(int(quota) / int(period))  # "max" = none, a ValueError
    return min(quotas)
