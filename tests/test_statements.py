from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raypipe

ROOT = Path(raypipe.__file__).parents[1]


def parallel_assignments(source: str) -> Iterator[str]:
    """`a, b = x, y` of unrelated things; a swap reads a target on its right side."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        targets = {
            ast.unparse(name)
            for target in node.targets
            for name in getattr(target, "elts", [target])
        }
        read = {
            ast.unparse(part)
            for part in ast.walk(node.value)
            if isinstance(part, ast.expr)
        }
        unpacks = any(isinstance(value, ast.Starred) for value in node.value.elts)
        is_pair = all(isinstance(target, ast.Tuple) for target in node.targets)
        if is_pair and not unpacks and not targets & read:
            yield f"line {node.lineno}: {ast.unparse(node)}"


# Calls that change nothing, in an assertion that `python -O` leaves out.
PURE = {"isinstance", "all", "any", "len", "max", "min"}


def hidden_effects(source: str) -> Iterator[str]:
    """Assertions that do more than look, and those that an `except` is to catch."""
    tree = ast.parse(source)
    caught = {
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for statement in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        effects = [
            part
            for part in ast.walk(node.test)
            if isinstance(part, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
            or (isinstance(part, ast.Call) and ast.unparse(part.func) not in PURE)
        ]
        if effects or node in caught:
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("faults", [parallel_assignments, hidden_effects])
@pytest.mark.parametrize("folder", ["raypipe", "jobs"])
def test_a_line_is_one_statement_and_an_assertion_only_looks(
    folder: str, faults: Callable[[str], Iterator[str]]
) -> None:
    found = [
        f"{path}, {line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in faults(path.read_text())
    ]
    assert found == []
