"""Versions of packages and code, which decide pixels besides the settings; and the extras of raypipe.

The record of a run, the memory's keys, the digest's settings and the comparison of actors all use `versions`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import raypipe

DISTRIBUTION = "raypipe-data"
"""Name of raypipe on PyPI, where the package `raypipe` is another project."""

# Packages that read, decode, transform or draw random numbers.
_PACKAGES = (
    "ray",
    "numpy",
    "pyarrow",
    "simplejpeg",
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
    "pillow",
    "albumentations",
    "albumentationsx",
    "albucore",
    "torch",
    "torchvision",
    "kornia",
    "kornia-rs",
    "pillow-heif",
    "tifffile",
    "imagecodecs",
    "lmdb",
    "msgpack",
)
# Modules that users' settings name, and that extras of the same names install.
_OF_EXTRAS = ("albumentations", "kornia")
# Raypipe's code that decides what a model sees, and its compiled extensions.
_CODE = (
    "kernel",
    "plan",
    "transform",
    "stores",
    "device",
    "streaming/maker.py",
    "streaming/sample_makers.py",
)
_SUFFIXES = (".py", ".c", ".h")
_EXTENSIONS = ("_raypipe_kernel", "_raypipe_lmdb")


def to_install(extra: str) -> str:
    """Return the command that installs an extra of raypipe, for errors."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def how_to_get(module: str | None) -> str:
    """Return the command that installs a module that is missing, in parentheses; empty = no extra has it."""
    if module in _OF_EXTRAS:
        return f" ({to_install(module)}, on every node)"
    return ""


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
    """Return the versions of all packages and code that pixels may depend on; None = not installed."""
    # raypipe's version comes from the running sources, since Ray may put a folder of them before an installed one.
    of_raypipe: dict[str, str | None] = {
        "raypipe": raypipe.__version__,
        "raypipe's code": code_digest(),
    }
    return (
        of_raypipe
        | {name: installed_version(name) for name in _PACKAGES}
        | {"python": platform.python_version()}
    )


@functools.cache
def code_digest() -> str:
    """Return the hash of raypipe's own code that decides what a model sees: its sources and extensions."""
    root = Path(raypipe.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for name in _CODE:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in _SUFFIXES:
                title = f"{file.relative_to(root)}\0"
                digest.update(title.encode() + file.read_bytes())
    for name in _EXTENSIONS:
        found = importlib.util.find_spec(name)
        if found and found.origin:
            digest.update(f"{name}\0".encode() + Path(found.origin).read_bytes())
    return digest.hexdigest()
