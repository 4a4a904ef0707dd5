"""Settings of libraries for a whole process that decide what code of the user's makes.

A program sets them at its top, and no actor runs that. So actors get those of the rank that starts their pool.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raypipe.importing import loaded_module


@dataclass(frozen=True)
class _Setting:
    """A setting of a library.

    Attributes:
        module: the module that has it.
        read, write: functions of the module, and of a plain value.
        default: the value in a new process.
    """

    module: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    default: Any


def _attribute(module: str, name: str, default: Any) -> _Setting:
    return _Setting(
        module,
        lambda of: getattr(of, name),
        lambda of, value: setattr(of, name, value),
        default,
    )


def _openers(image: Any) -> dict[str, list[str]]:
    """Return how to import what plugins, such as pillow_heif, have registered with Pillow, by format."""
    found = {}
    for name, (factory, accept) in image.OPEN.items():
        module = factory.__module__
        if module.partition(".")[0] not in ("PIL", "__main__") and accept is not None:
            found[name] = [module, factory.__qualname__, accept.__qualname__]
    return found


def _register(image: Any, openers: Mapping[str, list[str]]) -> None:
    for name, (module, factory, accept) in openers.items():
        plugin = importlib.import_module(module)
        image.register_open(name, getattr(plugin, factory), getattr(plugin, accept))


_SETTINGS = {
    "PIL.Image.register_open": _Setting("PIL.Image", _openers, _register, {}),
    "PIL.ImageFile.LOAD_TRUNCATED_IMAGES": _attribute(
        "PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False
    ),
    "PIL.Image.MAX_IMAGE_PIXELS": _attribute(
        "PIL.Image", "MAX_IMAGE_PIXELS", (1 << 30) // 4 // 3
    ),
    "torchvision.set_image_backend": _Setting(
        "torchvision",
        lambda torchvision: torchvision.get_image_backend(),
        lambda torchvision, name: torchvision.set_image_backend(name),
        "PIL",
    ),
    "torch.set_default_dtype": _Setting(
        "torch",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, name: torch.set_default_dtype(getattr(torch, name)),
        "float32",
    ),
}


def of_this_process() -> dict[str, Any]:
    """Return the settings of this process, by name."""
    found = {name: setting.default for name, setting in _SETTINGS.items()}
    for name, setting in _SETTINGS.items():
        module = loaded_module(setting.module)
        with contextlib.suppress(AttributeError):  # none is loaded, or one without it
            found[name] = setting.read(module)
    return found


def as_text() -> dict[str, str]:
    """Return the settings of this process as a record has them."""
    return {name: str(value) for name, value in of_this_process().items()}


def apply(found: Mapping[str, Any]) -> None:
    """Give this process the settings of another one."""
    here = of_this_process()
    for name, value in found.items():
        if value != here[name]:
            setting = _SETTINGS[name]
            setting.write(importlib.import_module(setting.module), value)
