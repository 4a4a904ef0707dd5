"""Settings of libraries for a whole process that decide what code of the user's makes.

A program sets them at its top, and no actor runs that. So actors get those of the rank that starts their pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from raypipe.importing import loaded_module

_OPENERS = "PIL.Image.register_open"
_BACKEND = "torchvision.set_image_backend"
_DTYPE = "torch.set_default_dtype"
# Attributes of modules → the value in a new process.
_ATTRIBUTES = {
    "PIL.ImageFile.LOAD_TRUNCATED_IMAGES": False,
    "PIL.Image.MAX_IMAGE_PIXELS": (1 << 30) // 4 // 3,
}


def of_this_process() -> dict[str, Any]:
    """Return the settings of this process, by name; the libraries' defaults where they are not loaded."""
    image = loaded_module("PIL.Image")
    torchvision = loaded_module("torchvision")
    torch = loaded_module("torch")
    dtype = torch.get_default_dtype() if torch else "float32"
    found: dict[str, Any] = {_OPENERS: _openers(image) if image else {}}
    for name, default in _ATTRIBUTES.items():
        module, _, attribute = name.rpartition(".")
        found[name] = getattr(loaded_module(module), attribute, default)
    found[_BACKEND] = torchvision.get_image_backend() if torchvision else "PIL"
    found[_DTYPE] = str(dtype).removeprefix("torch.")
    return found


def _openers(image: Any) -> dict[str, list[str]]:
    """Return how to import what plugins, such as pillow_heif, have registered with Pillow, by format."""
    found = {}
    for name, (factory, accept) in image.OPEN.items():
        module = factory.__module__
        if module.partition(".")[0] not in ("PIL", "__main__") and accept is not None:
            found[name] = [module, factory.__qualname__, accept.__qualname__]
    return found


def as_text() -> dict[str, str]:
    """Return the settings of this process as a record has them."""
    return {name: str(value) for name, value in of_this_process().items()}


def apply(found: Mapping[str, Any]) -> None:
    """Give this process the settings of another one."""
    here = of_this_process()
    for name, value in found.items():
        if value == here[name]:
            continue
        path, _, last = name.rpartition(".")
        module = importlib.import_module(path)
        if name == _OPENERS:
            _register(module, value)
        elif name in _ATTRIBUTES:
            setattr(module, last, value)
        elif name == _DTYPE:
            module.set_default_dtype(getattr(module, value))
        else:
            module.set_image_backend(value)


def _register(image: Any, openers: Mapping[str, list[str]]) -> None:
    for name, (module, factory, accept) in openers.items():
        plugin = importlib.import_module(module)
        image.register_open(name, getattr(plugin, factory), getattr(plugin, accept))
