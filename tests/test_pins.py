"""What raypipe imports is declared, and what it is installed with stands in one list (deploy/pins.py)."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import runpy
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]


def imported(path: Path) -> set[str]:
    """The packages that a file imports anywhere in it, without raypipe and the standard library's."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return (
        {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"raypipe"}
    )


def check_declared(
    paths: Iterable[Path], *declared: list[str], installed: bool = False
) -> None:
    """Check that requirements name what files import, or of that only what is installed here."""
    asked = map(Requirement, itertools.chain(*declared))
    names = {canonicalize_name(requirement.name) for requirement in asked}
    distributions = importlib.metadata.packages_distributions()
    for path in paths:
        for name in imported(path) - {"nvidia"}:  # a namespace
            found = {canonicalize_name(each) for each in distributions.get(name, [])}
            assert found & names or (installed and not found), (
                f"{path} imports {name}, of {found}: not declared"
            )


def test_every_package_that_is_imported_is_declared() -> None:
    paths = [*(ROOT / "raypipe").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]
    check_declared(paths, PROJECT["project"]["dependencies"], *EXTRAS.values())


def test_a_benchmark_with_its_own_environment_asks_for_what_it_imports() -> None:
    script = ROOT / "benchmarks" / "peers.py"
    header = script.read_text().split("# ///")[1].replace("\n# ", "\n")
    asked = tomllib.loads(header.partition("\n")[2])["dependencies"]
    of_extras = [EXTRAS[name] for name in Requirement(asked[0]).extras]
    check_declared(
        script.parent.glob("peer*.py"),
        asked,
        PROJECT["project"]["dependencies"],
        *of_extras,
        installed=True,
    )


def test_uv_and_the_image_have_one_list_of_exact_versions() -> None:
    lines = (ROOT / "deploy/constraints.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    uv = PROJECT["tool"]["uv"]
    assert uv["constraint-dependencies"] == listed
    assert set(uv["build-constraint-dependencies"]) <= set(listed)
    # Written again, both are as they are.
    text = (ROOT / "pyproject.toml").read_text()
    with_lists = runpy.run_path(str(ROOT / "deploy/pins.py"))["with_lists"]
    assert with_lists(text, listed, uv["build-constraint-dependencies"]) == text


def test_every_requirement_has_a_pin_within_its_range() -> None:
    listed = map(Requirement, PROJECT["tool"]["uv"]["constraint-dependencies"])
    exact = {pin.name: str(pin.specifier).removeprefix("==") for pin in listed}
    groups = [
        [one for one in group if isinstance(one, str)]
        for group in PROJECT["dependency-groups"].values()
    ]
    asked = itertools.chain(
        PROJECT["project"]["dependencies"],
        PROJECT["build-system"]["requires"],
        *EXTRAS.values(),
        *groups,
    )
    for requirement in map(Requirement, asked):
        version = exact[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (
            f"{requirement}: deploy/pins.py has {version}"
        )
