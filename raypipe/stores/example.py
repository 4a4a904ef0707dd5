"""A `tf.train.Example`: features by name, of which the wanted ones are read.

Example  {1: Features}                       Feature    {1: BytesList | 2: FloatList | 3: Int64List}
Features {1: {1: name, 2: Feature}, …}       a list     {1: value, …}, of numbers packed into one field or not
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from raypipe.stores.wire import BYTES, VARINT, fields, signed, varint

_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_LISTS = {_BYTES_LIST: "bytes", _FLOAT_LIST: "float", _INT64_LIST: "int64"}
_MAX_FEATURES = 10_000


def features_of(record: bytes) -> dict[str, memoryview]:
    """The features of a record, as they stand in it.

    Raises:
        ValueError: it is no Example, or has more than 10,000 features.
    """
    found: dict[str, memoryview] = {}
    num_entries = 0
    for features in _submessages(memoryview(record), 1):
        for entry in _submessages(features, 1):
            name, feature = b"", memoryview(b"")  # the last of each counts
            for number, kind, value in fields(entry):
                if kind == BYTES and number in (1, 2):
                    assert isinstance(value, memoryview)
                    name, feature = (bytes(value), feature) if number == 1 else (name, value)
            found[name.decode()] = feature
            num_entries += 1
            if num_entries > _MAX_FEATURES:
                raise ValueError(f"more than {_MAX_FEATURES:,} features")
    return found


def kind_of(feature: memoryview) -> str:
    """ "bytes", "float" or "int64", or "" for a feature without a list."""
    last = 0
    for number, kind, _ in fields(feature):
        if kind == BYTES and number in _LISTS:
            last = number
    return _LISTS.get(last, "")


def only_bytes(feature: memoryview) -> bytes:
    """The one value of a feature of bytes.

    Raises:
        ValueError: it is of another kind, or has not one value.
    """
    found = (value for part in _submessages(feature, _BYTES_LIST) for value in _submessages(part, 1))
    values = list(islice(found, 2))
    if len(values) != 1:
        raise ValueError(f"{'several' if values else 'no'} values of bytes in place of one")
    return bytes(values[0])


def only_int(feature: memoryview) -> int:
    """The one value of a feature of int64.

    Raises:
        ValueError: it is of another kind, or has not one value.
    """
    values: list[int] = []
    for part in _submessages(feature, _INT64_LIST):
        for number, kind, value in fields(part):
            if len(values) > 1:
                break
            if number == 1 and kind == VARINT:
                assert isinstance(value, int)
                values.append(value)
            elif number == 1 and kind == BYTES:
                assert isinstance(value, memoryview)
                at = 0
                while at < len(value) and len(values) < 2:
                    one, at = varint(value, at)
                    values.append(one)
    if len(values) != 1:
        raise ValueError(f"{'several' if values else 'no'} values of int64 in place of one")
    return signed(values[0])


def _submessages(message: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, kind, value in fields(message):
        if number == wanted and kind == BYTES:
            assert isinstance(value, memoryview)
            yield value
