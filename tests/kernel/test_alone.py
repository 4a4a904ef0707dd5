"""The kernel's folder works by itself, as its README shows it, beside nothing of raypipe."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raypipe import kernel

FOLDER = Path(kernel.__file__).parent
README = (FOLDER / "README.md").read_text()


def block(language: str) -> str:
    """The first block of code of the README in this language."""
    match = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert match
    return match[1]


@pytest.mark.skipif(bool(kernel.why_no_kernel()), reason=kernel.why_no_kernel())
def test_a_copy_under_another_name_runs_the_readmes_program(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "pixels")
    for path in (tmp_path / "pixels").glob("*.py"):
        path.write_text(re.sub(r"raypipe\.kernel", "pixels", path.read_text()))
    spec = importlib.util.find_spec("_raypipe_kernel")
    assert spec and spec.origin
    shutil.copy(spec.origin, tmp_path)
    code = (
        "import sys; sys.modules['raypipe'] = None\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"{block('python')}\n"
        "print(pixels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_the_readmes_build_names_what_is_there(tmp_path: Path) -> None:
    project = tomllib.loads(block("toml"))
    (extension,) = project["tool"]["setuptools"]["ext-modules"]
    for source in extension["sources"]:
        assert (FOLDER / Path(source).relative_to("pixels")).is_file()
    assert dict(extension["define-macros"])["CHECKED_ENTROPY"]
    assert "-ffp-contract=off" in extension["extra-compile-args"]
    if not (compiler := shutil.which(os.environ.get("CC", "cc"))):
        pytest.skip("there is no compiler")
    shutil.copytree(FOLDER / "csrc", tmp_path / "pixels" / "csrc")
    probe = block("console").splitlines()[-1].replace("cc ", f"{compiler} ", 1)
    done = subprocess.run(probe, shell=True, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0 or b"jpeglib.h" in done.stderr, done.stderr
