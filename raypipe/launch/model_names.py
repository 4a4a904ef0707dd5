"""Names of torchvision's models, read from its files, since its import takes seconds."""

from __future__ import annotations

import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from raypipe.errors import ConfigError
from raypipe.mistakes import did_you_mean

_REGISTERED = re.compile(r"^@register_model\(\)\n(?:@.*\n)*def (\w+)", re.MULTILINE)


def torchvision_models() -> list[str]:
    """Return the names of the installed torchvision's classification models."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return []
    files = Path(spec.submodule_search_locations[0], "models").glob("*.py")
    return sorted(
        name for file in files for name in _REGISTERED.findall(file.read_text("utf-8"))
    )


def check_model(name: str, channels: int = 3) -> None:
    """Raise ConfigError if a name is not 'small' or a torchvision model, or the model cannot take the channels."""
    if name == "small":
        return
    names = ["small", *torchvision_models()]
    if name.lower() not in names:
        raise ConfigError(
            f"train.model={name!r} is neither 'small' nor a torchvision classification model nor module:function"
            + did_you_mean(get_close_matches(name, names))
        )
    if channels != 3:
        raise ConfigError(
            f"train.model={name!r} needs three channels, but augment.mean has {channels}: use 'small' or a "
            "module:function"
        )
