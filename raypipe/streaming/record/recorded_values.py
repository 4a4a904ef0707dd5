"""Values as JSON, for the record of a run, and back again when the run is replayed.

3, "text", null                    plain values as they are
{"list": […]}, {"tuple": […]}      of such entries
{"map": [[key, entry], …]}         keys may be numbers
{"settings": {name: …}}            a section of the settings
{"import": "module:name"}          a function or a class that can be imported
{"store": "module:name", …}        one of raypipe's stores, with its address and options
{"albumentations": {…}}            a pipeline of the library's own steps
{"array": "<i8", "shape": […], …}  numbers
{"object": name, "text": …}        anything else: its class; a replay needs it again
"""

from __future__ import annotations

import base64
import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.section import Section
from raypipe.stores.base import FileStore
from raypipe.transform.albumentations import described
from raypipe.transform.transform_steps import albumentations

# Each start of a run has a record, so arrays in it are small.
_MAX_BYTES = 256 << 10
_SHOWN_CHARACTERS = 200
# A value may hold itself.
_MAX_DEPTH = 24


class NotRecordedError(ConfigError):
    """A value of a run is not in its record."""


RecordedValue = dict[str, Any] | str | int | float | bool | None
"""A value in a run's record."""


def recorded(value: Any, depth: int = 0) -> Any:
    """Return a value as its entry in a run's record."""
    if _is_plain(value):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Section):
        fields = [field.name for field in dataclasses.fields(value)]
        return {
            "settings": {
                name: recorded(getattr(value, name), depth + 1) for name in fields
            }
        }
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            pairs = [[key, recorded(item, depth + 1)] for key, item in value.items()]
            if all(_is_plain(key) for key, _ in pairs):
                return {"map": pairs}
        if type(value) in (list, tuple):
            kind = type(value).__name__
            return {kind: [recorded(item, depth + 1) for item in value]}
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES
    if is_small and value.dtype.kind in "biuf":
        content = np.ascontiguousarray(value)
        return {
            "array": content.dtype.str,
            "shape": list(content.shape),
            "bytes": base64.b64encode(content.tobytes()).decode(),
        }
    if name := _name_of(value):
        return {"import": name}
    if isinstance(value, FileStore) and _is_ours(type(value).__module__):
        return {
            "store": f"{type(value).__module__}:{type(value).__name__}",
            "address": value.address,
            "options": [recorded(option, depth + 1) for option in value.options],
        }
    pipeline = described(value)
    if pipeline is not None:
        return {"albumentations": pipeline}
    return {"object": type(value).__name__, "text": _text(value)}


def restored(entry: RecordedValue, name: str, trusts: bool, section: Any = None) -> Any:
    """Return the value of an entry.

    Args:
        entry: from `recorded`.
        name: name of the argument, for errors.
        trusts: whether the code that it names may run.
        section: the class of an entry that is a section of the settings.

    Raises:
        NotRecordedError: it cannot be made again from the record.
        ConfigError: its code cannot be imported, or is not trusted.
    """
    if not isinstance(entry, dict):
        return entry
    if "settings" in entry:
        return section(
            **{
                field: restored(item, f"{name}.{field}", trusts)
                for field, item in entry["settings"].items()
            }
        )
    if "map" in entry:
        return {key: restored(item, name, trusts) for key, item in entry["map"]}
    if "list" in entry:
        return [restored(item, name, trusts) for item in entry["list"]]
    if "tuple" in entry:
        return tuple(restored(item, name, trusts) for item in entry["tuple"])
    if "array" in entry:
        content = base64.b64decode(entry["bytes"])
        return np.frombuffer(content, entry["array"]).reshape(entry["shape"])
    if "import" in entry:
        return import_name(entry["import"], name, trusted=trusts)
    if "store" in entry:
        if not _is_ours(entry["store"]):
            raise NotRecordedError(
                f"{name}: {entry['store']} is not a store of raypipe's"
            )
        make = import_name(entry["store"], name, trusted=False)
        options = [restored(option, name, trusts) for option in entry["options"]]
        return make(entry["address"], *options)
    if "albumentations" in entry:
        return albumentations().from_dict(entry["albumentations"])
    raise NotRecordedError(
        f"{name} was an object ({entry['object']}: {str(entry.get('text'))[:_SHOWN_CHARACTERS]}), which a run's "
        f"folder cannot keep: give it again, raypipe.replay(run, {name.rpartition('.')[2]}=…)"
    )


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_ours(module: str) -> bool:
    return module.startswith("raypipe.stores.")


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


def _text(value: Any) -> str:
    """Return an object's text for people, without its address in memory."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # the user's own __repr__
        return ""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)[:_SHOWN_CHARACTERS]
