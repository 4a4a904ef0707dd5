from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest
from ray._private import services

import raypipe
from raypipe.rayext.ray_private import find_private, replace, replaced

RAYEXT = Path(raypipe.__file__).parent / "rayext"
PRIVATE = re.compile(
    r"\bray(?:\.\w+)*?\.(?:_private|_internal|_raylet)\b(?:\.[a-z_]+)*"
)


def test_a_name_that_ray_lacks_is_one_line_with_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    missing = [
        "ray._private.no_module.start",
        "ray._private.services.NoClass.start",
        "ray._private.services.no_function",
    ]
    with caplog.at_level(logging.WARNING):
        for path in missing:
            for _ in range(2):
                assert find_private(path, "the start takes longer") is None
                replace(path, lambda function: None, loss="the start takes longer")
                with replaced(path, lambda _: None, loss="the start takes longer"):
                    pass
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
    for path, message in zip(missing, caplog.messages, strict=True):
        assert message.endswith(f" has no {path}: the start takes longer")


def test_a_replacement_wraps_rays_function_and_is_put_back() -> None:
    path = "ray._private.services.ConsolePopen"
    before = services.ConsolePopen
    assert find_private(path, "") is before
    with replaced(path, lambda popen, number: (popen, number), 3, loss=""):
        assert services.ConsolePopen == (before, 3)
    assert services.ConsolePopen is before


def private_modules(source: str) -> set[str]:
    """The private modules of Ray that a source imports, or names in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {match for text in found for match in PRIVATE.findall(text)}


def test_the_readme_lists_each_private_module_of_ray() -> None:
    listed = PRIVATE.findall((RAYEXT / "README.md").read_text())
    used = {
        module
        for path in RAYEXT.glob("*.py")
        for module in private_modules(path.read_text())
    }
    assert len(used) > 20
    for module in used:
        # An f-string names the beginning of a path.
        assert any(
            module.startswith(name) or name.startswith(module) for name in listed
        ), module
    for name in listed:
        assert any(
            module.startswith(name) or name.startswith(module) for module in used
        ), f"{name} is in no module any more"
