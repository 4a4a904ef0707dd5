"""Is this machine fit for raypipe?

A check returns whether all is well, and what it found: what is not well works, but worse than it could. What does
not work raises an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raypipe.logs import printable
from raypipe.lookup import version_of

_RAY_TIMEOUT_S = 120
_GIB = 2**30
Check = Callable[[], tuple[bool, str]]
CHECKS: dict[str, tuple[Check, str]] = {}
"""Each with what mends it."""


def doctor(*, no_ray: bool = False) -> dict[str, Any]:
    """Check this machine: packages, decoders, torch, CUDA, shared memory, limits, Ray. Exit code 1 if one fails.

    Example: raypipe doctor

    Args:
        no_ray: do not start a cluster, which takes ten seconds.
    """
    checks = []
    for name in CHECKS:
        if not (no_ray and name == "Ray"):
            status, found, mend = examined(name)
            print(f"{status:4} {name:14} {printable(found)}" + (f"\n{'':20}→ {mend}" if mend else ""), flush=True)
            checks.append({"name": name, "status": status, "found": found, "mend": mend})
    return {"ok": all(check["status"] != "fail" for check in checks), "checks": checks}


def examined(name: str) -> tuple[str, str, str]:
    """The status of a check ("ok", "warn", "fail"), what was found, and what mends it: "" if all is well."""
    check, mend = CHECKS[name]
    try:
        is_well, found = check()
    except Exception as error:  # a broken installation may raise anything
        return "fail", f"{type(error).__name__}: {error}", mend
    return ("ok", found, "") if is_well else ("warn", found, mend)


def _check(name: str, mend: str) -> Callable[[Check], None]:
    return lambda check: CHECKS.update({name: (check, mend)})


@_check("packages", "pip install --upgrade raypipe, in an environment of its own")
def _() -> tuple[bool, str]:
    from packaging.requirements import Requirement

    for requirement in map(Requirement, importlib.metadata.requires("raypipe") or []):
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            version = importlib.metadata.version(requirement.name)  # an error if it is not there
            if not requirement.specifier.contains(version, prereleases=True):
                raise ImportError(f"{requirement.name} is {version}, not {requirement.specifier}")
    versions = (f"{name} {version_of(name)}" for name in ("ray", "torch", "albumentations"))
    return True, f"Python {platform.python_version()}, {', '.join(versions)}"


@_check("decoding", "install gcc and libjpeg-turbo's headers (apt-get install gcc libjpeg-dev), then raypipe anew")
def _() -> tuple[bool, str]:
    import cv2
    import numpy as np

    from raypipe.transform.decode import decode
    from raypipe.transform.jpeg import why_no_extension

    for kind in (".jpg", ".png", ".webp"):
        decode(cv2.imencode(kind, np.zeros((32, 32, 3), np.uint8))[1].tobytes())
    why = why_no_extension()
    return not why, f"JPEGs are decoded slower: {why}" if why else "JPEG by the extension, PNG and WebP"


@_check("torch", "install a torch that is built for this driver (see nvidia-smi), or a newer driver")
def _() -> tuple[bool, str]:
    import torch
    import torchvision

    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)  # fails where it was built for another torch
    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()
        return True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        raise RuntimeError(f"the NVIDIA driver is no use to torch, built for CUDA {torch.version.cuda or 'not'}")
    return True, "works on the CPU; there is no GPU"


@_check(
    "shared memory", "Ray wants 30 %, and is slow with less: start the container with --shm-size or --ipc=host"
)
def _() -> tuple[bool, str]:
    if not Path("/dev/shm").exists():
        return False, "there is no /dev/shm, as on macOS: Ray keeps objects in files"
    size, memory = shutil.disk_usage("/dev/shm").total, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return size >= 0.3 * memory, f"/dev/shm has {size / _GIB:.1f} GiB of {memory / _GIB:.1f} GiB of memory"


@_check("open files", "ulimit -n 65536, before Ray is started: its processes open hundreds each")
def _() -> tuple[bool, str]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most >= 4096, f"at most {most}"


@_check("disk", "Ray spills objects there: free some, or set RAY_TMPDIR to another disk")
def _() -> tuple[bool, str]:
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    return free >= 5 * _GIB, f"{folder} has {free / _GIB:.1f} GiB free"


# In a process of its own: this one may be connected, or be left half-way by a start that hangs.
_RAY_PROGRAM = """
import ray
from raypipe.rayext.cluster import cluster_resources, connect
connect()
print(ray.get(ray.remote(num_cpus=0)(cluster_resources).remote(), timeout=90))
"""


@_check("Ray", "is RAY_ADDRESS, if set, up (ray status), and of this Ray? Else see /tmp/ray/session_latest/logs")
def _() -> tuple[bool, str]:
    where = f"the cluster at {os.environ.get('RAY_ADDRESS') or 'this machine'}"
    command = [sys.executable, "-c", _RAY_PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{where}: {(done.stderr.splitlines() or ['no word'])[-1]}")
    return True, f"{where}: {done.stdout.splitlines()[-1]}"
