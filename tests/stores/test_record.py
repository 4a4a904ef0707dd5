from __future__ import annotations

import json

import pytest

from raypipe.errors import StoreError
from raypipe.stores.record import Metadata

ONE = Metadata(3, {"image": "binary", "label": "int64"}, ("cat", "dog"), "0123")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": 2}, "version 2; this raypipe reads version 1"),
        (
            {"columns": [{"name": "image", "type": "int8"}]},
            "column 'image' has type 'int8'",
        ),
        ({"columns": 3}, "not iterable"),
        ({"count": "many"}, "invalid literal"),
    ],
)
def test_what_does_not_fit_is_one_error_with_its_place(
    changed: dict[str, object], reason: str
) -> None:
    text = json.dumps(json.loads(ONE.to_json()) | changed).encode()
    with pytest.raises(StoreError, match=f"^x.lmdb has a bad record: .*{reason}"):
        Metadata.from_json(text, "x.lmdb has a bad record")
