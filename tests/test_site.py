"""The documentation's site, as mkdocs.yml and .ci/site_pages.py build it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT

pytest.importorskip("mkdocs", reason="uv sync --group docs")


@pytest.mark.pages
def test_the_site_is_built_and_each_of_its_links_leads_somewhere(
    tmp_path: Path,
) -> None:
    options = ["--strict", "--quiet", "--site-dir", str(tmp_path)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"}
    assert pages <= {path.stem for path in tmp_path.glob("*.html")}
