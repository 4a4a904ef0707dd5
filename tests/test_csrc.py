"""Each file of csrc/ has a test that names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Where to look for the tests of a file: the docstrings of their modules.
DOCSTRINGS = {
    str(path.relative_to(TESTS)): ast.get_docstring(ast.parse(path.read_text())) or ""
    for path in sorted(TESTS.rglob("test_*.py"))
}


@pytest.mark.parametrize("path", sorted((TESTS.parent / "csrc").glob("*.*")), ids=lambda path: path.name)
def test_a_module_of_tests_names_it(path: Path) -> None:
    assert [name for name, text in DOCSTRINGS.items() if re.search(rf"\b{re.escape(path.name)}\b", text)]
