"""The documentation's site, as mkdocs.yml and .ci/site_pages.py build it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT

import raypipe

pytest.importorskip("mkdocs", reason="uv sync --group docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    # a link that leads nowhere, a page outside of the menu
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.pages
def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {
        f"{path.stem}.html"
        for path in (ROOT / "docs").glob("*.md")
        if path.name != "README.md"
    }
    others = {
        "index.html",
        "pages.html",
        "preview.html",
        "api.html",
        "changelog.html",
        "contributing.html",
    }
    assert {path.name for path in site.glob("*.html")} == pages | others | {"404.html"}
    results = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {path.stem for path in (site / "results").glob("*.html")} == results - {
        "README"
    } | {"index"}
    assert (site / "LICENSE.txt").exists() and (
        site / "deploy/grafana/raypipe.json"
    ).exists()


@pytest.mark.pages
def test_the_python_api_has_every_public_name(site: Path) -> None:
    text = (site / "api.html").read_text()
    for name in raypipe.__all__:
        assert f'id="raypipe.{name}"' in text, name


@pytest.mark.pages
def test_the_site_has_llms_txt_with_links_to_its_pages(site: Path) -> None:
    for name in ("llms.txt", "llms-full.txt"):
        linked = re.findall(r"\]\(([\w-]+\.html)", (site / name).read_text())
        assert len(linked) > 10 and all((site / page).exists() for page in linked)


@pytest.mark.pages
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe|source)[^>]+src=\"?([^\">\s]+)", page.read_text()
        )
        loaded += re.findall(
            r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*>",
            page.read_text(),
        )
        assert loaded and not [address for address in loaded if "//" in address], (
            page.name
        )
