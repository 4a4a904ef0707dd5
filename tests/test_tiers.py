"""The tests themselves: their names, what they import, and the budget of the default tier."""

from __future__ import annotations

import ast
from pathlib import Path

FILES = {
    path: ast.parse(path.read_text())
    for path in sorted(Path(__file__).parent.rglob("*.py"))
}


def test_names_have_fewer_than_70_characters() -> None:
    functions = (
        node
        for tree in FILES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
    assert not [
        node.name
        for node in functions
        if node.name.startswith("test_") and len(node.name) >= 70
    ]


def test_no_module_imports_from_a_module_of_tests() -> None:
    tests = {path.stem for path in FILES if path.stem.startswith("test_")} | {
        "conftest"
    }
    for path, tree in FILES.items():
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            names += (
                [node.module]
                if isinstance(node, ast.ImportFrom) and node.module
                else []
            )
            assert not tests & {name.split(".")[-1] for name in names}, path
