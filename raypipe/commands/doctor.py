"""Is this machine fit for raypipe?

A check returns whether all is well, and its findings: False means that raypipe works, but worse than it could. A
check raises an error where something does not work. Its docstring names the remedy.
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
from pathlib import Path

from raypipe.packages import DISTRIBUTION
from raypipe.printing import Result

_RAY_TIMEOUT_S = 120
_GIB = 2**30
# In a separate process: this one may be connected, or be left half-way by a start that hangs.
_RAY_PROGRAM = """import ray; from raypipe.rayext import allocation, cluster; cluster.connect()
print(ray.get(ray.remote(num_cpus=0)(allocation.cluster_resources).remote(), timeout=90))"""


def doctor(*, ray: bool = True) -> Result:
    """Check this machine: packages, decoders, torch, CUDA, limits, Ray.

    Exit code 1 if a check fails.

    Examples:
        raypipe doctor
        raypipe doctor --no-ray

    Args:
        ray: start a cluster too, which takes ten seconds.
    """
    from rich.console import Console

    with Console(stderr=True).status("") as shown:
        checks = []
        for name in CHECKS:
            shown.update(f"checking {name}")
            checks += [examined(name)] if ray or name != "Ray" else []
    return {"ok": all(check["status"] != "fail" for check in checks), "checks": checks}


def print_checks(result: Result) -> None:
    """Print the result of `doctor`, a line for each check and one for each remedy."""
    for check in result["checks"]:
        print(f"{check['status']:4} {check['name']:10} {check['found']}")
        if check["fix"]:
            print(f"{'':16}→ {check['fix']}")


def examined(name: str) -> dict[str, str]:
    """Make a check: `name`, `status` (ok, warn, fail), `found`, and `fix`, "" if all is well."""
    check = CHECKS[name]
    fix = check.__doc__ or ""
    try:
        is_well, finding = check()
        status, fix = ("ok", "") if is_well else ("warn", fix)
    except Exception as error:  # a broken installation may raise anything
        status = "fail"
        finding = f"{type(error).__name__}: {error}"
    return {"name": name, "status": status, "found": finding, "fix": fix}


def _packages() -> tuple[bool, str]:
    """Install raypipe again, in a new environment."""
    from packaging.requirements import Requirement

    for requirement in map(
        Requirement, importlib.metadata.requires(DISTRIBUTION) or []
    ):
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            # an error if it is not there
            version = importlib.metadata.version(requirement.name)
            if not requirement.specifier.contains(version, prereleases=True):
                raise ImportError(
                    f"{requirement.name} is {version}, not {requirement.specifier}"
                )
    versions = (
        f"{name} {importlib.metadata.version(name)}" for name in ("ray", "torch")
    )
    return True, f"Python {platform.python_version()}, {', '.join(versions)}"


def _decoding() -> tuple[bool, str]:
    """Install gcc and libjpeg-turbo's headers (apt-get install gcc libjpeg-dev), then raypipe again."""
    from raypipe.kernel import why_no_kernel

    why = why_no_kernel()
    return (
        not why,
        f"JPEGs are decoded slower: {why}" if why else "JPEGs by the extension",
    )


def _lmdb() -> tuple[bool, str]:
    """Install gcc (apt-get install gcc), then raypipe again."""
    from raypipe.stores.lmdb_file import why_not_compiled

    why = why_not_compiled()
    return (
        not why,
        f"LMDB is read slower, and trusts its files: {why}"
        if why
        else "LMDB by the extension",
    )


def _torch() -> tuple[bool, str]:
    """Install a torch that is built for this driver (see nvidia-smi), or a newer driver."""
    import torch
    import torchvision

    # fails where it was built for another torch
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    if torch.cuda.is_available():
        torch.ones(8, device="cuda").sum().item()
        return True, f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    if shutil.which("nvidia-smi"):
        if torch.version.cuda:
            built = f"CUDA {torch.version.cuda}"
        else:
            built = "CPUs only"
        raise RuntimeError(
            f"there is an NVIDIA driver, but torch, built for {built}, cannot use it"
        )
    return True, "works on the CPU; there is no GPU"


def _limits() -> tuple[bool, str]:
    """Check limits that are set before Ray starts: ulimit -n 65536, --shm-size or --ipc=host, RAY_TMPDIR."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # macOS has none
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    limits = f"/dev/shm has {shared / _GIB:.1f} GiB (Ray wants {0.3 * memory / _GIB:.1f}, 30 % of memory)"
    limits += (
        f"; at most {max_files} open files; {folder} has {free / _GIB:.1f} GiB free"
    )
    return shared >= 0.3 * memory and max_files >= 4096 and free >= 5 * _GIB, limits


def _ray() -> tuple[bool, str]:
    """Is RAY_ADDRESS, if set, up (ray status), of this Ray? Else see /tmp/ray-UID/ray/session_latest/logs."""
    address = os.environ.get("RAY_ADDRESS")
    if address:
        where = f"the cluster at {address}"
    else:
        where = "a cluster on this machine"
    # -P: no modules of the current folder
    command = [
        sys.executable,
        "-P",
        "-c",
        _RAY_PROGRAM,
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_RAY_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"{where} has not answered within {_RAY_TIMEOUT_S} s"
        ) from None
    if done.returncode:
        raise RuntimeError(f"{where}: {(done.stderr.splitlines() or ['no word'])[-1]}")
    return True, f"{where}: {done.stdout.splitlines()[-1]}"


CHECKS = {
    "packages": _packages,
    "decoding": _decoding,
    "LMDB": _lmdb,
    "torch": _torch,
    "limits": _limits,
    "Ray": _ray,
}
