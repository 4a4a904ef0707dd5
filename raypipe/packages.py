"""Versions of installed packages, and the extras of raypipe."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata

import raypipe

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


def to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe, for errors."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


@functools.cache  # each stream that is opened asks for ten, and the files of one are parsed in 0.3 ms
def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def differences(driver: Mapping[str, str | None]) -> str:
    """Say which packages have other versions here than in the driver; builds of one version are alike."""
    here = versions()
    different = (
        name
        for name in here
        if str(here[name]).split("+")[0] != str(driver.get(name)).split("+")[0]
    )
    return ", ".join(
        f"{name} {here[name]} instead of {driver.get(name)}" for name in different
    )


def versions() -> dict[str, str | None]:
    """Return the versions of all packages that pixels may depend on; None = not installed."""
    # raypipe's version comes from the running sources, since Ray may put a folder of them before an installed one.
    of_raypipe: dict[str, str | None] = {"raypipe": raypipe.__version__}
    return (
        of_raypipe
        | {name: installed_version(name) for name in _PACKAGES}
        | {"python": platform.python_version()}
    )
