"""Values in LMDB files that other programs wrote: one encoded sample → its image and its label.

    pickle    (image, label), as Efficient-PyTorch's folder2lmdb writes it; opened only with store.trust_pickles
    msgpack   the same, also with msgpack_numpy's arrays, as tensorpack writes it

A value is a tuple, a list or a dict. Its image is the part that starts as an image does; its label is the part
after it, or the field of the label's name. Nothing here runs code from a value. Readers raise StoreError for a
value that takes more memory than the limit.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from raypipe.errors import StoreError
from raypipe.storage.read_limit import check_read, read_limit
from raypipe.stores.numbers import NPY
from raypipe.stores.png import stored_png

_MAGICS = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF8",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
    b"MM\0+",
    NPY,
)
# with the protocol; Python 2's have 2
_PICKLE_STARTS = [bytes([0x80, protocol]) for protocol in range(2, 6)]
# Operations of pickles that take few bytes and make an object.
_CONTAINERS = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT", "TUPLE"}
_CONTAINERS |= {"TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"}
_CONTAINER_BYTES = 64
_PLACE_BYTES = 16  # a place in a pickle's memory takes so many at most
# Names in dicts, in the order of preference.
_LABELS = (
    "label",
    "labels",
    "target",
    "targets",
    "cls",
    "class",
    "y",
    "text",
    "caption",
)

Part = int | str
"""Place of a part in a value: position in a tuple, or name in a dict; -1 = the value is the part."""


def value_kind(value: bytes | bytearray | memoryview) -> str:
    """Return the kind of a value by its bytes: "image", a key of `READERS`, or "" for others."""
    if is_image(value):
        return "image"
    if bytes(value[:2]) in _PICKLE_STARTS:
        return "pickle"
    try:
        read = _from_msgpack(memoryview(value))
    except ValueError:
        return ""
    except StoreError:  # its kind is known, and it is too large
        return "msgpack"
    return "msgpack" if isinstance(read, list | dict | bytes) else ""


def is_image(value: bytes | bytearray | memoryview) -> bool:
    """Return whether a value is an encoded image, by its first bytes."""
    start = bytes(value[:12])
    return start.startswith(_MAGICS) or start[8:12] == b"WEBP" or start[4:8] == b"ftyp"


# Kinds


class _PlainUnpickler(pickle.Unpickler):
    """Makes bytes, text, numbers, tuples, lists and dicts, which no class or function is imported for."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"it names {module}.{name}: of a pickle, raypipe reads bytes, str, int, float, tuple, list and dict. "
            "Read such values with your own code, and give the samples to `raypipe.convert`"
        )


def _from_pickle(value: memoryview) -> Any:
    try:
        _check_pickle(value)
        return _PlainUnpickler(io.BytesIO(value), encoding="bytes").load()
    except (ValueError, StoreError):
        raise
    except Exception as error:  # damage makes it raise anything
        raise ValueError(
            f"it cannot be unpickled: {type(error).__name__}: {error}"
        ) from None


def _check_pickle(value: memoryview) -> None:
    """Raise StoreError if a pickle's operations take more memory than the limit."""
    limit = read_limit(len(value))
    num_bytes = 0
    for operation, argument, _ in pickletools.genops(io.BytesIO(value)):
        if "PUT" in operation.name:
            num_bytes = max(num_bytes, _PLACE_BYTES * int(argument or 0))
        elif operation.name in _CONTAINERS:
            num_bytes += _CONTAINER_BYTES
        if num_bytes > limit:
            check_read("a pickle", num_bytes, len(value))


def _from_msgpack(value: memoryview) -> Any:
    import msgpack

    in_containers = 0

    def count(container: Any) -> Any:
        nonlocal in_containers
        in_containers += _CONTAINER_BYTES * (1 + len(container))
        check_read("a value of msgpack", in_containers, len(value))
        return container

    try:
        return msgpack.unpackb(
            value,
            raw=True,
            strict_map_key=False,
            list_hook=count,
            object_hook=count,
        )
    except StoreError:
        raise
    except Exception as error:
        raise ValueError(
            f"it is not msgpack: {type(error).__name__}: {error}"
        ) from None


READERS: dict[str, Callable[[memoryview], Any]] = {
    "pickle": _from_pickle,
    "msgpack": _from_msgpack,
}
"""Kind → its reader: the value's bytes → Python values; raises ValueError for others."""


def keys_in(value: memoryview, may_unpickle: bool) -> list[bytes] | None:
    """Return the keys in a value of `__keys__`; None if it is a pickle that must not be opened, or no list."""
    try:
        if bytes(value[:1]) == b"[":
            keys = json.loads(bytes(value))
        elif bytes(value[:2]) in _PICKLE_STARTS:
            keys = _from_pickle(value) if may_unpickle else None
        else:
            keys = _from_msgpack(value)
    except (ValueError, RecursionError, StoreError):
        return None
    if not isinstance(keys, list | tuple) or not all(
        isinstance(key, bytes | str | int) for key in keys
    ):
        return None
    return [key if isinstance(key, bytes) else str(key).encode() for key in keys]


# Image and label of a value


class ValueLayout(NamedTuple):
    """Places of the image and the label in the values of a file.

    Attributes:
        kind: a key of `READERS`.
        image: place of the image.
        label: place of the label; None = there is none.
    """

    kind: str
    image: Part
    label: Part | None

    def read(self, value: memoryview) -> tuple[bytes | None, Any]:
        """Return the encoded image, None if it is missing, and the label; raise ValueError for damage."""
        parts = _parts_of(READERS[self.kind](value))
        label = None if self.label is None else _plain_label(parts.get(self.label))
        return _encoded(parts.get(self.image)), label


def find_layout(kind: str, value: memoryview, target: str) -> ValueLayout:
    """Return where the image and the label are, by a value; raise ValueError if it has no image.

    Args:
        target: name of the label in a dict; "label" = any usual name.
    """
    parts = _parts_of(READERS[kind](value))
    images = [name for name, part in parts.items() if _is_image(part)]
    if not images:
        shown = ", ".join(
            f"{name}: {type(part).__name__}" for name, part in parts.items()
        )
        raise ValueError(f"it has no image ({shown:.200})")
    wanted: Iterable[Part] = parts
    if isinstance(images[0], str):
        wanted = _LABELS if target == "label" else (target,)
    labels = [name for name in wanted if name in parts and name not in images]
    return ValueLayout(kind, images[0], labels[0] if labels else None)


def _parts_of(value: Any) -> dict[Part, Any]:
    """Return the parts of a value by their places, with arrays as numpy's and images as bytes."""
    parts: dict[Part, Any] = {-1: value}
    if isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif isinstance(value, Mapping) and b"nd" not in value:
        parts = {_text(name): part for name, part in value.items()}
    for name, part in parts.items():
        if isinstance(part, bytearray):
            parts[name] = bytes(part)
        elif isinstance(part, Mapping) and b"nd" in part:
            array = _array_of(part)
            content = array.tobytes() if array.ndim == 1 else b""
            parts[name] = content if is_image(content) else array
    return parts


def _array_of(fields: Mapping[Any, Any]) -> np.ndarray:
    """Return an array, or a number as an array without dimensions, of msgpack_numpy."""
    try:
        dtype = np.dtype(_text(fields.get(b"type", b"")))
    except TypeError as error:
        raise ValueError(f"it has an array of an unknown type: {error}") from None
    shape = fields.get(b"shape") or []
    data = fields.get(b"data")
    if (
        dtype.kind not in "biuf"
        or not isinstance(data, bytes)
        or not isinstance(shape, list | tuple)
    ):
        raise ValueError(f"it has an array of {dtype}")
    array = np.frombuffer(data, dtype)
    return array.reshape([int(side) for side in shape] if fields.get(b"nd") else [])


def _is_image(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype == np.uint8 and part.ndim in (2, 3)
    return isinstance(part, bytes) and is_image(part)


def _encoded(part: Any) -> bytes | None:
    """Return an image as encoded bytes; uint8 pixels, RGB or gray, become PNG."""
    if isinstance(part, bytes) or part is None:
        return part
    if not isinstance(part, np.ndarray) or part.dtype != np.uint8:
        raise ValueError(f"its image is a {type(part).__name__}")
    if not part.size or (part.ndim != 2 and part.shape[2:] not in ((1,), (3,))):
        raise ValueError(f"its image has the shape {part.shape}")
    return stored_png(part)


def _plain_label(part: Any) -> Any:
    """Return a label as int, float, str or a list of numbers; None for anything else."""
    if isinstance(part, np.ndarray):
        part = part.tolist()
    if isinstance(part, bytes):
        return _text(part)
    if isinstance(part, list | tuple):
        are_numbers = all(isinstance(number, int | float) for number in part)
        return list(map(_as_number, part)) if part and are_numbers else None
    return _as_number(part) if isinstance(part, int | float | str) else None


def _as_number(value: Any) -> Any:
    """Return a boolean as an integer, since Arrow's integers take none; any other value as it is."""
    return int(value) if isinstance(value, bool) else value


def _text(name: Any) -> str:
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    return str(name)
