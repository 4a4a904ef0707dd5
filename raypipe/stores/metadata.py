"""What raypipe's writers note in a file of theirs: a record of an LMDB file, the first member of a tar.

{"version": 1, "count": …, "columns": [{"name": …, "type": …}, …], "classes": […] or null, "fingerprint": …}
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from raypipe.errors import StoreError
from raypipe.stores.record import check_column_types

NAME = "__raypipe__"
"""The record's key, and the member's name."""
VERSION = 1

# What parsing damage raises: OverflowError for a count of 1e999, RecursionError for a thousand brackets.
_DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, StoreError)


@dataclass(frozen=True)
class Metadata:
    """Of one file.

    Attributes:
        count: samples in it.
        types: column → its type, in order.
        classes: names, position = label; None where there are none.
        fingerprint: of its samples.
    """

    count: int
    types: dict[str, str]
    classes: tuple[str, ...] | None
    fingerprint: str

    def to_json(self) -> bytes:
        content = {
            "version": VERSION,
            "count": self.count,
            "columns": [{"name": name, "type": kind} for name, kind in self.types.items()],
            "classes": self.classes,
            "fingerprint": self.fingerprint,
        }
        return json.dumps(content).encode()

    @staticmethod
    def from_json(text: bytes, where: str) -> Metadata:
        """Raises StoreError, which begins with `where`, when the text is damaged or of another version."""
        try:
            content = json.loads(text)
            if content["version"] != VERSION:
                raise StoreError(f"version {content['version']}; this raypipe reads version {VERSION}")
            count = int(content["count"])
            types = {str(column["name"]): str(column["type"]) for column in content["columns"]}
            check_column_types(types)
            classes = content["classes"]
            names = None if classes is None else tuple(str(name) for name in classes)
            return Metadata(count, types, names, str(content["fingerprint"]))
        except _DAMAGE as error:
            raise StoreError(f"{where}: {error!s:.500}") from error
