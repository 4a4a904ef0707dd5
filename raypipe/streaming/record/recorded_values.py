"""Values of any kind as JSON, for the record of a run, and back again when the run is replayed.

3, "text", null                    plain values as they are
{"list": […]}, {"tuple": […]}      of such entries
{"map": [[key, entry], …]}         keys may be numbers
{"settings": {name: …}}            a section of the settings
{"import": "module:name", …}       a function or a class that can be imported
{"store": "module:name", …}        one of raypipe's stores, with its address and options
{"albumentations": {…}}            a pipeline of the library's own steps
{"array": "<i8", "shape": […], …}  numbers
{"object": text, "hash": …, …}     anything else: its text and hash, and a pickle unless it is large

A pickle runs code when it is opened, and is opened only with the word of trust.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError
from raypipe.importing import import_name
from raypipe.section import Section
from raypipe.stores.base import FileStore
from raypipe.transform.transform_steps import albumentations

# Each start of a run has a record, so arrays and pickles in it are small.
_MAX_BYTES = 256 << 10
_SHOWN_CHARACTERS = 2000
# A value may hold itself.
_MAX_DEPTH = 24


class NotRecordedError(ConfigError):
    """A value of a run is not in its record, or only as a pickle that nobody has trusted."""


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
            "bytes": _text(content.tobytes()),
        }
    return (
        _imported(value) or _store(value, depth) or _pipeline(value) or _object(value)
    )


def restored(entry: RecordedValue, name: str, trusts: bool, section: Any = None) -> Any:
    """Return the value of an entry.

    Args:
        entry: from `recorded`.
        name: name of the argument, for errors.
        trusts: whether pickles may be opened.
        section: the class of an entry that is a section of the settings.

    Raises:
        NotRecordedError: it cannot be made again from the record.
        ConfigError: its code cannot be imported.
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
        return _opened_store(entry, name, trusts)
    if "albumentations" in entry:
        return albumentations().from_dict(entry["albumentations"])
    return _unpickled(entry, name, trusts)


def readable(entry: RecordedValue) -> Any:
    """Return an entry for people: a plain value, or what it holds in a few words."""
    if not isinstance(entry, dict):
        return entry
    if "settings" in entry:
        return {name: readable(item) for name, item in entry["settings"].items()}
    if "map" in entry:
        return {key: readable(item) for key, item in entry["map"]}
    for kind in ("list", "tuple"):
        if kind in entry:
            return [readable(item) for item in entry[kind]]
    if "array" in entry:
        return f"{np.dtype(entry['array'])} {tuple(entry['shape'])}"
    if "albumentations" in entry:
        return json.dumps(entry["albumentations"], sort_keys=True)
    return entry.get("import") or entry.get("address") or entry.get("object")


def hash_of_module(module: str) -> str:
    """Return the hash of the file of a module that has been imported; empty if it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    if not path:
        return ""
    try:
        return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
    except OSError:
        return ""


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _imported(value: Any) -> dict[str, Any] | None:
    """The entry of a function or class by its name; None = its module does not have it by that name."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not module or not name or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        return None
    return {"import": f"{module}:{name}", "file": hash_of_module(module)}


def _store(value: Any, depth: int) -> dict[str, Any] | None:
    """The entry of one of raypipe's stores at an address; None = it is another object."""
    module = type(value).__module__
    if not isinstance(value, FileStore) or not module.startswith("raypipe.stores."):
        return None
    return {
        "store": f"{module}:{type(value).__name__}",
        "address": value.address,
        "options": [recorded(option, depth + 1) for option in value.options],
    }


def _opened_store(entry: Mapping[str, Any], name: str, trusts: bool) -> Any:
    if not entry["store"].startswith("raypipe.stores."):
        raise NotRecordedError(f"{name}: {entry['store']} is not a store of raypipe's")
    make = import_name(entry["store"], name, trusted=False)
    options = [restored(option, name, trusts) for option in entry["options"]]
    return make(entry["address"], *options)


def _pipeline(value: Any) -> dict[str, Any] | None:
    """The entry of a pipeline of Albumentations that names its steps; None = it is something else."""
    if not type(value).__module__.startswith("albumentations."):
        return None
    try:
        described = albumentations().to_dict(value)
        text = json.dumps(described)
        again = albumentations().from_dict(json.loads(text))
        if json.dumps(albumentations().to_dict(again)) == text:
            return {"albumentations": json.loads(text)}
    except Exception:  # a step with a function, or of the user's own
        return None
    return None


def _object(value: Any) -> dict[str, Any]:
    """The entry of an object that only its own code knows."""
    kind = type(value).__name__
    entry = {"object": kind}
    try:
        text = " ".join(repr(value).split())
        entry = {"object": f"{kind}: {text}"[:_SHOWN_CHARACTERS]}
        from ray import cloudpickle  # it pickles the functions of scripts, too

        content: bytes = cloudpickle.dumps(value)
    except Exception:  # it has a lock, an open file, …
        return entry
    entry["hash"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    if len(content) <= _MAX_BYTES:
        entry["pickle"] = _text(content)
    return entry


def _unpickled(entry: Mapping[str, Any], name: str, trusts: bool) -> Any:
    if "pickle" not in entry:
        raise NotRecordedError(
            f"{name} was an object, which the run's folder could not keep ({entry['object'][:200]}): give it "
            f"again, raypipe.replay(run, {name.rpartition('.')[2]}=…)"
        )
    if not trusts:
        raise NotRecordedError(
            f"{name} was an object ({entry['object'][:200]}), which the run's folder has as a pickle: a pickle "
            "runs code when it is opened, so add --trust-run-code (trust_run_code=True) if you know who wrote it, "
            f"or give the object again, raypipe.replay(run, {name.rpartition('.')[2]}=…)"
        )
    try:
        return pickle.loads(base64.b64decode(entry["pickle"]))
    except Exception as error:
        raise NotRecordedError(
            f"{name} was an object, and its pickle cannot be opened here: {type(error).__name__}: {error}"
        ) from error
