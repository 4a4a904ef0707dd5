from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypipe

ROOT = Path(raypipe.__file__).parent


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


@pytest.mark.parametrize(
    "folder", [ROOT, ROOT.parent / "jobs"], ids=["raypipe", "jobs"]
)
def test_no_line_hides_two_statements_in_one_assignment(folder: Path) -> None:
    found = [
        f"{path.relative_to(folder)}, {line}"
        for path in sorted(folder.rglob("*.py"))
        for line in parallel_assignments(path.read_text())
    ]
    assert found == []


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


@pytest.mark.parametrize(
    "folder", [ROOT, ROOT.parent / "jobs"], ids=["raypipe", "jobs"]
)
def test_the_program_is_the_same_without_its_assertions(folder: Path) -> None:
    found = [
        f"{path.relative_to(folder)}, {line}"
        for path in sorted(folder.rglob("*.py"))
        for line in hidden_effects(path.read_text())
    ]
    assert found == []
