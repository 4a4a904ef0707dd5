from __future__ import annotations

import importlib
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raypipe
from raypipe import packages
from raypipe.importing import user_code
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
            r"pip install '?([\w.-]+?)(?:\[([\w,]+)\])?'?[\s`]", path.read_text()
        )
        assert "raypipe" not in [name for name, _ in asked], path
        ours = [named for name, named in asked if name in (".", DISTRIBUTION)]
        assert {extra for named in ours for extra in named.split(",")} <= extras | {
            ""
        }, path


def test_packages_are_other_ones_by_version_and_not_by_build() -> None:
    here = versions()
    assert (
        differences(here | {"torch": f"{str(here['torch']).partition('+')[0]}+cu130"})
        == ""
    )
    assert (
        differences(here | {"numpy": "1.0"}) == f"numpy {here['numpy']} instead of 1.0"
    )


def test_each_library_that_makes_pixels_has_its_version() -> None:
    libraries = {"kornia", "pillow-heif", "tifffile", "imagecodecs", "lmdb", "pillow"}
    assert libraries <= {name for name, version in versions().items() if version}


@pytest.mark.parametrize(
    "changed",
    [
        "kernel/csrc/color.h",
        "streaming/maker.py",
        "_raypipe_lmdb",
    ],
)
def test_code_that_makes_pixels_is_part_of_its_digest(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(ROOT / "raypipe", tmp_path / "raypipe"))
    for name in ("_raypipe_kernel", "_raypipe_lmdb"):
        (root / name).write_bytes(b"compiled")
    monkeypatch.setattr(raypipe, "__file__", str(root / "__init__.py"))
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: SimpleNamespace(origin=str(root / name)),
    )
    before = packages.code_digest.__wrapped__()
    path = root / changed
    path.write_bytes(path.read_bytes() + b"\n")
    assert packages.code_digest.__wrapped__() != before
    assert versions()["raypipe's code"] == packages.code_digest()


def test_the_code_of_the_user_is_that_of_imported_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = tmp_path / "helper_of_a_user.py"
    helper.write_text("offset = 1\n")
    importlib.import_module("helper_of_a_user")
    before = user_code()
    assert not {"numpy", "raypipe", "json"} & before.keys()
    helper.write_text("offset = 2\n")
    assert user_code()["helper_of_a_user"] != before["helper_of_a_user"]
    monkeypatch.delitem(sys.modules, "helper_of_a_user")
