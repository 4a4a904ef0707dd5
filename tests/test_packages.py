from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import raypipe
from raypipe.packages import DISTRIBUTION, differences, versions

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())[
    "project"
]


def test_raypipe_knows_its_name_and_its_version_without_being_installed() -> None:
    assert (DISTRIBUTION, raypipe.__version__) == (PROJECT["name"], PROJECT["version"])
    assert versions()["raypipe"] == raypipe.__version__


def test_errors_and_pages_name_extras_that_there_are_and_no_other_project() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for path in (ROOT / "raypipe").rglob("*.py"):
        text = path.read_text()
        assert (
            "pip install 'raypipe" not in text and "pip install raypipe" not in text
        ), path
        assert set(re.findall(r"to_install\('(\w+)'\)", text)) <= extras, path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "llms.txt"]:
        asked = re.findall(
            r"pip install '?([\w.-]+?)(?:\[(\w+)\])?'?[\s`]", path.read_text()
        )
        assert "raypipe" not in [name for name, _ in asked], path
        assert {extra for name, extra in asked if name == "."} <= extras | {""}, path


def test_packages_are_other_ones_by_version_and_not_by_build() -> None:
    here = versions()
    assert (
        differences(here | {"torch": f"{str(here['torch']).partition('+')[0]}+cu130"})
        == ""
    )
    assert (
        differences(here | {"numpy": "1.0"}) == f"numpy {here['numpy']} instead of 1.0"
    )
