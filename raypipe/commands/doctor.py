"""Is this machine fit for raypipe? Each check says what it found and, where it is not well, what mends it.

A check returns both, with no remedy where all is well: what has one works, but worse than it could. What does not
work raises `UnfitError`, or any other error.
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

_MIN_FILES = 4096  # Ray's processes open hundreds each; `ray start` itself warns below 1,024
_MIN_SPILL_BYTES = 5 << 30
_RAY_TIMEOUT_S = 120
_GIB = 2**30


class UnfitError(Exception):
    """Something does not work: what was found, and what mends it."""


def doctor(*, no_ray: bool = False) -> dict[str, Any]:
    """Check this machine: packages, decoders, torch, CUDA, shared memory, limits, Ray. Exit code 1 if one fails.

    Example: raypipe doctor

    Args:
        no_ray: do not start a cluster, which takes ten seconds.
    """
    checks = []
    for name, check in CHECKS.items():
        if no_ray and check is check_ray:
            continue
        status, found, mend = examined(check)
        print(f"{status:4} {name:14} {printable(found)}" + (f"\n{'':20}→ {mend}" if mend else ""), flush=True)
        checks.append({"name": name, "status": status, "found": found, "mend": mend})
    return {"ok": all(check["status"] != "fail" for check in checks), "checks": checks}


def examined(check: Callable[[], tuple[str, str]]) -> tuple[str, str, str]:
    """The status ("ok", "warn", "fail"), what was found, and what mends it."""
    try:
        found, mend = check()
    except UnfitError as unfit:
        return "fail", *unfit.args
    except Exception as error:  # a broken installation may raise anything
        return "fail", f"{type(error).__name__}: {error}", "install raypipe anew: pip install raypipe"
    return "warn" if mend else "ok", found, mend


def check_packages() -> tuple[str, str]:
    """The versions of what raypipe depends on."""
    from packaging.requirements import Requirement

    wrong, versions = [], {}
    for requirement in map(Requirement, importlib.metadata.requires("raypipe") or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = versions[requirement.name] = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        raise UnfitError("; ".join(wrong), "pip install --upgrade raypipe, in an environment of its own")
    shown = [f"{name} {versions[name]}" for name in ("ray", "torch", "albumentations") if name in versions]
    return f"Python {platform.python_version()}, {', '.join(shown)}", ""


def check_decoding() -> tuple[str, str]:
    """JPEG, PNG and WebP, end to end."""
    import cv2
    import numpy as np

    from raypipe.transform.decode import decode

    image = np.full((32, 32, 3), 128, np.uint8)
    for kind in (".jpg", ".png", ".webp"):
        pixels = decode(cv2.imencode(kind, image)[1].tobytes())
        if np.abs(pixels.astype(int) - 128).max() > 2:
            raise UnfitError(f"{kind} gives wrong pixels", "install simplejpeg and opencv anew")
    return "JPEG by libjpeg-turbo, PNG and WebP", ""


def check_extension() -> tuple[str, str]:
    """The compiled decoder of JPEGs."""
    from raypipe.transform.decode import why_no_extension

    why = why_no_extension()
    mend = "install a C compiler and libjpeg-turbo's headers (apt-get install gcc libjpeg-dev), then raypipe anew"
    return (f"JPEGs are decoded slower: {why}", mend) if why else ("the extension is used", "")


def check_torch() -> tuple[str, str]:
    """torch, torchvision's own operators, and CUDA where there is a GPU."""
    import torch
    import torchvision

    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)  # fails where it was built for another torch
    if torch.cuda.is_available():
        device = torch.device("cuda")
        assert float((torch.ones(8, device=device) * 2).sum()) == 16
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}", ""
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise UnfitError(
            f"there is an NVIDIA driver, but torch, built for {built}, cannot use it",
            "install a torch that is built for this driver (see nvidia-smi), or a newer driver",
        )
    return "works on the CPU; there is no GPU", ""


def check_cpus() -> tuple[str, str]:
    """The CPUs that this process may use, which Ray may count otherwise in a container."""
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} of {os.cpu_count() or 1}"
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, period = limit.read_text().split() if limit.exists() else ("max", "")
    if quota != "max":
        found += f", of which the container may use {int(quota) / int(period):g}"
    return found, "a trainer and one transform actor want a CPU each" if usable < 2 else ""


def check_shared_memory() -> tuple[str, str]:
    """Where Ray keeps its object store."""
    path = Path("/dev/shm")
    if not path.exists():
        return "there is no /dev/shm: objects are kept in files", "use Linux"
    size, memory = shutil.disk_usage(path).total, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"/dev/shm has {size / _GIB:.1f} GiB of {memory / _GIB:.1f} GiB of memory"
    mend = "Ray wants 30 %, and is slow with less: start the container with --shm-size or --ipc=host"
    if size < 256 << 20 and size < 0.3 * memory:
        raise UnfitError(found, mend)
    return found, mend if size < 0.3 * memory else ""


def check_file_limit() -> tuple[str, str]:
    """Open files and sockets of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mend = f"ulimit -n {min(hard, 65536)}, before Ray is started"
    return f"at most {soft}", mend if soft < _MIN_FILES else ""


def check_disk() -> tuple[str, str]:
    """Room for Ray's session, and for objects that it spills."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    mend = "free some, or set RAY_TMPDIR to another disk" if free < _MIN_SPILL_BYTES else ""
    return f"{folder} has {free / _GIB:.1f} GiB free", mend


# In a process of its own: this one may be connected, or be left half-way by a start that hangs.
_RAY_PROGRAM = """
import raypipe, ray
from raypipe.rayext.cluster import cluster_resources, connect
connect()
add = ray.remote(num_cpus=0)(lambda: sum(range(4)))
assert ray.get(add.remote(), timeout=90) == 6
offer = cluster_resources()
print(f"{len(ray.nodes())} nodes, {offer.cpus:g} CPUs, {offer.gpus:g} GPUs")
ray.shutdown()
"""


def check_ray() -> tuple[str, str]:
    """A cluster, the one at RAY_ADDRESS or a new one, and a task in it."""
    address = os.environ.get("RAY_ADDRESS", "")
    where = f"the cluster at {address}" if address else "a cluster on this machine"
    mend = "see the newest logs in /tmp/ray/session_latest/logs; `ray stop` ends clusters that were left over"
    if address:
        mend = "is it up (ray status), of the same versions of Ray and Python, and is RAY_ADDRESS its address?"
    command = [sys.executable, "-c", _RAY_PROGRAM]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RAY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UnfitError(f"{where} ran no task within {_RAY_TIMEOUT_S} s", mend) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        raise UnfitError(f"{where}: {last}", mend)
    return f"{where}: {done.stdout.splitlines()[-1]}", ""


CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    "packages": check_packages,
    "decoding": check_decoding,
    "JPEG extension": check_extension,
    "torch": check_torch,
    "CPUs": check_cpus,
    "shared memory": check_shared_memory,
    "open files": check_file_limit,
    "disk": check_disk,
    "Ray": check_ray,
}
