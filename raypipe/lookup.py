"""Lookups of user code and its errors, of installed packages, by name, and of CPUs."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import sys
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any

import raypipe
from raypipe.errors import ConfigError

DISTRIBUTION = "raypipe-data"
"""Name of raypipe on PyPI, where the package `raypipe` is another project."""

# Packages that read, decode, transform or draw random numbers on the CPU.
_PACKAGES = (
    "ray",
    "numpy",
    "pyarrow",
    "simplejpeg",
    "opencv-python-headless",
    "pillow",
    "albumentations",
    "albucore",
    "torch",
    "torchvision",
)

_UNLIMITED = 1 << 20  # CPUs, more than any machine has

_OURS = str(Path(raypipe.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = ("site-packages", "dist-packages")
# Libraries of transforms: an error in one of these is reported at its caller.
_LIBRARIES = {
    "albumentations",
    "albucore",
    "torch",
    "torchvision",
    "numpy",
    "cv2",
    "PIL",
    "scipy",
    "skimage",
}


def search_here() -> bool:
    """Append the current folder to the module search path; False if PYTHONSAFEPATH or `python -P` forbids it."""
    folder = str(Path.cwd())
    if sys.flags.safe_path or os.environ.get("PYTHONSAFEPATH"):
        return False
    if folder not in sys.path:
        sys.path.append(folder)
    return True


def import_name(address: str, setting: str) -> Any:
    """Import the value of `module:name`; the name may have dots.

    The search path of Python comes first. Then comes the current folder, see `search_here`: Python's path has the
    folder of the script or command, not the user's.

    Args:
        address: `module:name`.
        setting: the setting with the address, for the error.

    Raises:
        ConfigError: it does not exist.
    """
    module_name, _, name = address.partition(":")
    if not (module_name and name):
        example = f"my_package.training:{name or 'make'}"
        raise ConfigError(
            f"{setting} must be module:name, such as {example}, got {address!r}"
        )
    is_open = search_here()
    try:
        value: Any = importlib.import_module(module_name)
        for part in name.split("."):
            value = getattr(value, part)
    except Exception as error:
        reason = explained(error)
        if not is_open and isinstance(error, ModuleNotFoundError):
            reason += (
                "; the current folder is not searched, since it contains the store or the run, or PYTHONSAFEPATH "
                "is set. Set PYTHONPATH to the folder of your code"
            )
        raise ConfigError(
            f"{setting} {address!r} cannot be imported: {reason}"
        ) from error
    return value


def explained(error: BaseException) -> str:
    """Return an error's type and message and, if it was raised in the user's code or in packages, where."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if any(_distance(frame) < 2 for frame in frames):
        text += f" (at {place_of(error)})"
    return text


def place_of(error: BaseException) -> str:
    """Where an error was raised, `file.py:12 in function`: the user's last frame, or the nearest to that code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    nearest = min(map(_distance, frames))
    frame = [frame for frame in frames if _distance(frame) == nearest][-1]
    here = f"{Path.cwd()}{os.sep}"
    return f"{frame.filename.removeprefix(here)}:{frame.lineno} in {frame.name}"


def _distance(frame: traceback.FrameSummary) -> int:
    """From the user's own code, 0, over packages of others to the libraries and raypipe."""
    name = frame.filename
    parts = Path(name).parts
    if name.startswith(_OURS):
        return 3
    package = next(
        (parts[at + 1] for at, part in enumerate(parts[:-1]) if part in _INSTALLED),
        None,
    )
    if package is None:
        if name.startswith((_STANDARD, "<frozen ")) or name.endswith(".pyx"):
            return 2
        return 0
    return 2 if package in _LIBRARIES else 1


def choices(name: str, known: Collection[str], those: str = "choose from") -> str:
    """Return the end of a message about an unknown name: similar names, and all known names.

    Args:
        known: names, or name → text in parentheses after it.
    """
    # makes label close to fine_label
    close = get_close_matches(name, known, cutoff=0.65)
    question = f"did you mean {' or '.join(close)}? " if close else ""
    listed = (
        [f"{entry} ({kind})" for entry, kind in known.items()]
        if isinstance(known, Mapping)
        else known
    )
    return f"; {question}{those} {', '.join(listed)}"


def to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe, for errors."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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


def _quota(root: Path, own: Path) -> float:
    """The CPUs of the smallest quota of this process's control group and those above it; a large number = none.

    Args:
        root: where the groups (version 2) are mounted.
        own: the file that names the process's group: `0::/PATH`.
    """
    try:
        name = next(
            line[3:] for line in own.read_text().splitlines() if line.startswith("0::")
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


def differences(driver: Mapping[str, str | None]) -> str:
    """Say which packages have other versions here than in the driver; builds of one version are alike."""
    here = versions()
    others = (
        name
        for name in here
        if str(here[name]).split("+")[0] != str(driver.get(name)).split("+")[0]
    )
    return ", ".join(
        f"{name} {here[name]} instead of {driver.get(name)}" for name in others
    )


def versions() -> dict[str, str | None]:
    """Return the versions of all packages that pixels may depend on; None = not installed."""
    # raypipe's version comes from the running sources, since Ray may put a folder of them before an installed one.
    own: dict[str, str | None] = {"raypipe": raypipe.__version__}
    return (
        own
        | {name: version_of(name) for name in _PACKAGES}
        | {"python": platform.python_version()}
    )
