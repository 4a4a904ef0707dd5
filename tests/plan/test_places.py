from __future__ import annotations

import pytest

from raypipe.errors import CursorError
from raypipe.plan.places import Cursor


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        "null",
        '{"epoch": 1}',
        '{"epoch": "x", "step": 1}',
        '{"epoch": 1e999}',
    ],
)
def test_what_is_no_cursor_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(CursorError, match="not a cursor"):
        Cursor.from_json(text)
