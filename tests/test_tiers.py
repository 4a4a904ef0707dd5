"""The names of the tests themselves."""

from __future__ import annotations

import re
from pathlib import Path


def test_names_have_fewer_than_70_characters() -> None:
    for path in Path(__file__).parent.rglob("test_*.py"):
        for name in re.findall(r"\bdef (test_\w+)\(", path.read_text()):
            assert len(name) < 70, f"{path.name}: {name}"
