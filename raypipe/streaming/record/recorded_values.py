"""Values as JSON, for the record of a run, and back again when the run is replayed.

3, "text", null, […]               plain values, and lists of entries; also of what was a tuple
{"map": [[key, entry], …]}         keys may be numbers
{"settings": {name: …}}            a section of the settings
{"import": "module:name"}          a function or a class that can be imported
{"albumentations": {…}}            a pipeline of the library's own steps
{"object": name}                   anything else: its class; a replay needs it again
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.section import Section
from raypipe.transform.albumentations import described
from raypipe.transform.transform_steps import albumentations


def recorded(value: Any) -> Any:
    """Return a value as its entry in a run's record."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Section):
        fields = vars(value).items()
        return {"settings": {name: recorded(item) for name, item in fields}}
    if isinstance(value, Mapping):
        return {"map": [[recorded(key), recorded(value[key])] for key in value]}
    if type(value) in (list, tuple):
        return [recorded(item) for item in value]
    if name := _name_of(value):
        return {"import": name}
    pipeline = described(value)
    if pipeline is not None:
        return {"albumentations": pipeline}
    return {"object": type(value).__name__}


def restored(entry: Any, name: str, trusts: bool, section: Any = None) -> Any:
    """Return the value of an entry.

    Args:
        entry: from `recorded`.
        name: name of the argument, for errors.
        trusts: whether the code that it names may run.
        section: the class of an argument that is a section of the settings; None = it is none.

    Raises:
        ConfigError: it cannot be made again from the record, or its code cannot be imported or is not trusted.
    """
    if section and entry is not None:
        fields = entry["settings"].items()
        return section(
            **{
                field: restored(item, f"{name}.{field}", trusts)
                for field, item in fields
            }
        )
    if isinstance(entry, list):
        return [restored(item, name, trusts) for item in entry]
    if not isinstance(entry, dict):
        return entry
    if "map" in entry:
        return {key: restored(item, name, trusts) for key, item in entry["map"]}
    if "import" in entry:
        return import_name(entry["import"], name, trusted=trusts)
    if "albumentations" in entry:
        return albumentations().from_dict(entry["albumentations"])
    raise ConfigError(
        f"{name} was an object ({entry['object']}), which a run's folder cannot keep: give it again, "
        f"raypipe.replay(run, {name.partition('.')[0]}=…)"
    )


def _name_of(value: Any) -> str:
    """Return a function's or class's `module:name`; empty = its module does not have it by that name."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__":
        return ""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is value else ""
