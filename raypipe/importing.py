"""Code by name, `module:name`: the one function that imports names from settings and files, and its limits.

    import_name("my_code:make", …)   a value by its address
    check_named_code(values, file, …)      refuses the code that a file names; called where the file is read

A user trusts the code that he names in Python, on the command line, or in a file given by --config. The record of
a run, the settings of a run that is resumed, and checkpoints may come from anybody, whoever owns their files.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache, reduce
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any

import raypipe
from raypipe.errors import ConfigError
from raypipe.packages import how_to_get

logger = logging.getLogger(__name__)

_OURS = str(Path(raypipe.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")
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


# Classes that files may name: module prefixes, and the class that those of them must have as a base. None of
# them reads a file, calls an address or runs code when it is made.
_STEPS = {
    "albumentations": "albumentations.core.serialization:Serializable",
    "kornia.augmentation": "torch.nn:Module",
    "timm.data.auto_augment": "builtins:object",
    "timm.data.random_erasing": "builtins:object",
    "timm.data.transforms": "builtins:object",
    "torch.optim": "torch.optim:Optimizer",
    "torchvision.transforms": "builtins:object",
}
# Settings and recorded arguments whose text is never imported: addresses, names of columns, expressions. The
# value of `train` may be code, which makes a Dataset.
_DATA = re.compile(
    r"store\.(?!train|val).*|.*_column|columns|exclude|filter|take|storage_path|name|resume"
)
# Imported names have no separators of paths, so that no module is found outside the search path.
_ADDRESS = re.compile(r"([^\s:./\\]+(?:\.[^\s:./\\]+)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def search_here() -> bool:
    """Append the current folder to the module search path; False if PYTHONSAFEPATH or `python -P` forbids it."""
    folder = str(Path.cwd())
    if sys.flags.safe_path or os.environ.get("PYTHONSAFEPATH"):
        return False
    if folder not in sys.path:
        sys.path.append(folder)
    return True


def loaded_module(name: str) -> Any:
    """Return a module that this process has imported; None while it has not, or another thread imports it."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


def is_of(value: Any, module: str, *names: str) -> bool:
    """True for an object of one of a module's classes; a process without the module has none."""
    kinds = (getattr(sys.modules.get(module), name, None) for name in names)
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)


def import_name(address: str, setting: str, *, trusted: bool) -> Any:
    """Import the value of `module:name`; the name may have dots.

    The search path of Python comes first. Then comes the current folder, see `search_here`: Python's path has the
    folder of the script or command, not the user's.

    Args:
        address: `module:name`.
        setting: the setting with the address, for the error.
        trusted: whether the user has named the code: in Python, on the command line, in a file of settings, or by
            the word of trust. Else only the steps of known libraries are imported. `check_named_code` looks at the
            settings of other files where they are read.

    Raises:
        ConfigError: it does not exist, or is not trusted.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        example = f"my_package.training:{address.partition(':')[2] or 'make'}"
        raise ConfigError(
            f"{setting} must be module:name, such as {example}, got {address!r}"
        )
    is_step = _is_step(address)
    if not trusted and not is_step:
        raise ConfigError(_untrusted(setting, address, "a file"))
    # Steps are not searched here, nor what their libraries import if it is installed.
    is_open = is_step or search_here()
    try:
        return _imported(*match.groups())
    except Exception as error:
        reason = with_origin(error)
        if isinstance(error, ModuleNotFoundError):
            reason += how_to_get(error.name)
        if not is_open and isinstance(error, ModuleNotFoundError):
            reason += (
                "; the current folder is not searched, since it contains the store or the run, or PYTHONSAFEPATH "
                "is set. Set PYTHONPATH to the folder of your code"
            )
        raise ConfigError(
            f"{setting} {address!r} cannot be imported: {reason}"
        ) from error


def check_named_code(values: Mapping[str, Any], file: str, trusted: bool) -> None:
    """Check the code that a file names, before anything of it is imported.

    Args:
        values: the file's settings by their whole names: plain values, as JSON or YAML has them.
        file: the file or the run, for messages.
        trusted: whether the user has given the word of trust. Then a warning says whose code will run.

    Raises:
        ConfigError: it names code other than the steps of known libraries, and is not trusted.
    """
    for setting, address in own_code(values):
        if not trusted:
            raise ConfigError(_untrusted(setting, address, file))
        place = _place_of(_package(address))
        logger.warning("%s names %r (%s): %s runs", file, address, setting, place)


def _untrusted(setting: str, address: str, file: str) -> str:
    """Return the error about code that a file names."""
    return (
        f"{file} names the code {address!r} ({setting}), which would run "
        f"{_place_of(_package(address))}: read that code, then add --trust-run-code (trust_run_code=True), or "
        "name it yourself"
    )


def own_code(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the code other than steps of known libraries that settings name, by the setting: its address."""
    for setting, value in values.items():
        if not _DATA.fullmatch(setting):
            for address in sorted(set(filter(_ADDRESS.fullmatch, texts_in(value)))):
                if not _is_step(address):
                    yield setting, address


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in JSON values."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)
    elif isinstance(value, str):
        yield value


def _package(address: str) -> str:
    return re.split("[.:]", address)[0]


def _imported(module: str, name: str) -> Any:
    return reduce(getattr, name.split("."), importlib.import_module(module))


def _is_step(address: str) -> bool:
    """Return whether an address is a step that files may name; imports only installed libraries of these steps."""
    module, _, name = address.partition(":")

    def prefix_of(path: str) -> str:
        found = (step for step in _STEPS if f"{path}.".startswith(f"{step}."))
        return next(found, "")

    prefix = prefix_of(module)
    if not prefix:
        return False
    folder = Path(_place_of(_package(address))).parent
    if f"{folder}{os.sep}" != _OURS and folder.parent.name not in _INSTALLED:
        return False
    try:
        kind = _imported(module, name)
        base = _imported(*_STEPS[prefix].split(":"))
    except Exception:  # it is not there, or the library cannot be imported
        return False
    is_kind = isinstance(kind, type) and issubclass(kind, base)
    return is_kind and prefix_of(kind.__module__) == prefix


def _place_of(package: str) -> str:
    """Return the file that a package would be imported from, or the current folder has, without importing it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    found = found or PathFinder.find_spec(package, [str(Path.cwd())])
    if found is None:
        return f"a module {package}, which is not here{how_to_get(package)}"
    return found.origin or str([*(found.submodule_search_locations or ())])


def with_origin(error: BaseException) -> str:
    """Return an error's type and message and, if it was raised in the user's code or in packages, where."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if any(_distance(frame) < 2 for frame in frames):
        text += f" (at {raised_at(error)})"
    return text


def raised_at(error: BaseException) -> str:
    """Return where an error was raised, `file.py:12 in function`: the last frame nearest to the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    nearest = min(map(_distance, frames))
    frame = [frame for frame in frames if _distance(frame) == nearest][-1]
    here = f"{Path.cwd()}{os.sep}"
    return f"{frame.filename.removeprefix(here)}:{frame.lineno} in {frame.name}"


def _distance(frame: traceback.FrameSummary) -> int:
    """Return how far a frame is from the user's own code, 0: other packages 1, libraries 2, raypipe 3."""
    name = frame.filename
    if name.startswith(_OURS):
        return 3
    if is_own_code(name) and not name.endswith(".pyx"):
        return 0
    steps = pairwise(Path(name).parts)
    package = next((inner for outer, inner in steps if outer in _INSTALLED), None)
    return 1 if package and package not in _LIBRARIES else 2


@lru_cache(maxsize=1024)
def is_own_code(file: str) -> bool:
    """True for a file of the user's, which no library has installed."""
    if file.startswith((*_STANDARD, _OURS, "<frozen")):
        return False
    return bool(file) and not {*_INSTALLED} & set(Path(file).parts)


def user_code() -> dict[str, str]:
    """Return the hash of each imported module that is neither raypipe's, Python's nor an installed package's."""
    hashes = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_module = file.endswith(".py") and not name.startswith("__")
        if is_module and is_own_code(file) and Path(file).is_file():
            content = Path(file).read_bytes()
            hashes[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
    return hashes
