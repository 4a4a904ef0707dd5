"""Is this machine fit for raypipe? Each check says what it found and, where it is not well, what mends it."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]

_MIN_FILES = 4096  # Ray's processes open hundreds each; `ray start` itself warns below 1,024
_MIN_SPILL_BYTES = 5 << 30
_RAY_TIMEOUT_S = 120


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: of the check.
        status: "ok"; "warn": it works, but worse than it could; "fail": it does not work.
        found: as it is.
        mend: what to do; empty where all is well.
    """

    name: str
    status: Status
    found: str
    mend: str = ""


def doctor(start_ray: bool = True) -> dict[str, Any]:
    """Make all checks.

    Args:
        start_ray: start a cluster too, run a task in it, and end it; or ask the one at RAY_ADDRESS.

    Returns:
        `ok`, whether none has failed, and `checks`: of each its name, status, what was found, what mends it.
    """
    made = [_guarded(check) for check in (*_CHECKS, *([check_ray] if start_ray else []))]
    return {"ok": all(check.status != "fail" for check in made), "checks": [asdict(check) for check in made]}


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a broken installation may raise anything
        name = check.__name__.removeprefix("check_").replace("_", " ")
        return Check(name, "fail", f"{type(error).__name__}: {error}", "install raypipe anew: pip install raypipe")


def check_packages() -> Check:
    """The versions of what raypipe depends on."""
    from packaging.requirements import Requirement

    wrong, versions = [], {}
    for line in importlib.metadata.requires("raypipe") or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        versions[requirement.name] = version
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    shown = ", ".join(
        f"{name} {versions[name]}" for name in ("ray", "torch", "albumentations") if name in versions
    )
    found = f"Python {platform.python_version()}, {shown}"
    if wrong:
        return Check(
            "packages", "fail", "; ".join(wrong), "pip install --upgrade raypipe, in an environment of its own"
        )
    return Check("packages", "ok", found)


def check_decoding() -> Check:
    """JPEG and PNG, end to end."""
    import cv2
    import numpy as np

    from raypipe.transform.decode import decode

    image = np.full((32, 32, 3), 128, np.uint8)
    for kind in (".jpg", ".png", ".webp"):
        pixels = decode(cv2.imencode(kind, image)[1].tobytes())
        if np.abs(pixels.astype(int) - 128).max() > 2:
            return Check("decoding", "fail", f"{kind} gives wrong pixels", "install simplejpeg and opencv anew")
    return Check("decoding", "ok", "JPEG by libjpeg-turbo, PNG and WebP")


def check_extension() -> Check:
    """The compiled decoder of JPEGs."""
    from raypipe.transform.decode import why_no_extension

    why = why_no_extension()
    if why:
        mend = (
            "install a C compiler and libjpeg-turbo's headers (apt-get install gcc libjpeg-dev), then raypipe anew"
        )
        return Check("JPEG extension", "warn", f"JPEGs are decoded slower: {why}", mend)
    return Check("JPEG extension", "ok", "the extension is used")


def check_torch() -> Check:
    """torch, torchvision's own operators, and CUDA where there is a GPU."""
    import torch
    import torchvision

    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)  # fails where it was built for another torch
    if torch.cuda.is_available():
        device = torch.device("cuda")
        assert float((torch.ones(8, device=device) * 2).sum()) == 16
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Check("torch", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        mend = "install a torch that is built for this driver (see nvidia-smi), or a newer driver"
        return Check(
            "torch", "fail", f"there is an NVIDIA driver, but torch, built for {built}, cannot use it", mend
        )
    return Check("torch", "ok", "works on the CPU; there is no GPU")


def check_shared_memory() -> Check:
    """Where Ray keeps its object store."""
    path = Path("/dev/shm")
    if not path.exists():
        return Check("shared memory", "warn", "there is no /dev/shm: objects are kept in files", "use Linux")
    size, memory = shutil.disk_usage(path).total, _memory_bytes()
    found = f"/dev/shm has {_gib(size)} of {_gib(memory)} of memory"
    if size < 0.3 * memory:
        mend = "Ray wants 30 %, and is slow with less: start the container with --shm-size or --ipc=host"
        return Check("shared memory", "fail" if size < 256 << 20 else "warn", found, mend)
    return Check("shared memory", "ok", found)


def check_file_limit() -> Check:
    """Open files and sockets of a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _MIN_FILES:
        return Check(
            "open files", "warn", f"at most {soft}", f"ulimit -n {min(hard, 65536)}, before Ray is started"
        )
    return Check("open files", "ok", f"at most {soft}")


def check_disk() -> Check:
    """Room for Ray's session, and for objects that it spills."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < _MIN_SPILL_BYTES:
        return Check(
            "disk", "warn", f"{folder} has {_gib(free)} free", "free some, or set RAY_TMPDIR to another disk"
        )
    return Check("disk", "ok", f"{folder} has {_gib(free)} free")


def check_cpus() -> Check:
    """The CPUs that this process may use, which Ray may count otherwise in a container."""
    usable, all_of_them = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cgroup_cpus()
    found = f"{usable} of {all_of_them}" + (f", of which the container may use {quota:g}" if quota else "")
    if usable < 2:
        return Check("CPUs", "warn", found, "a trainer and one transform actor want a CPU each")
    return Check("CPUs", "ok", found)


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


def check_ray() -> Check:
    """A cluster, and a task in it."""
    address = os.environ.get("RAY_ADDRESS", "")
    where = f"the cluster at {address}" if address else "a cluster on this machine"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RAY_PROGRAM],
            capture_output=True,
            text=True,
            timeout=_RAY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("Ray", "fail", f"{where} ran no task within {_RAY_TIMEOUT_S} s", _ray_hint(address))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return Check("Ray", "fail", f"{where}: {last}", _ray_hint(address))
    return Check("Ray", "ok", f"{where}: {done.stdout.splitlines()[-1]}")


def _ray_hint(address: str) -> str:
    if address:
        return "is it up (ray status), of the same versions of Ray and Python, and is RAY_ADDRESS its address?"
    return "see the newest logs in /tmp/ray/session_latest/logs; `ray stop` ends clusters that were left over"


_CHECKS: tuple[Callable[[], Check], ...] = (
    check_packages,
    check_decoding,
    check_extension,
    check_torch,
    check_cpus,
    check_shared_memory,
    check_file_limit,
    check_disk,
)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_cpus() -> float:
    """The CPU quota of a container; 0 = none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 0.0
    return 0.0 if quota == "max" else int(quota) / int(period)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
