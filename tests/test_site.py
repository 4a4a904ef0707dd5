"""The documentation's site, as mkdocs.yml and .ci/site_pages.py build it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import ROOT

import raypipe
from raypipe import config
from raypipe.section import Section

pytest.importorskip("mkdocs", reason="uv sync --group docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr  # a link that leads nowhere, a page outside of the menu
    return folder


@pytest.mark.pages
def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"}
    others = {"index.html", "pages.html", "preview.html", "reference.html", "changelog.html", "contributing.html"}
    assert {path.name for path in site.glob("*.html")} == pages | others | {"404.html"}
    assert (site / "LICENSE.txt").exists() and (site / "deploy/grafana/raypipe.json").exists()


@pytest.mark.pages
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = (site / "reference.html").read_text()
    for name in raypipe.__all__:
        assert f'id="raypipe.{name}"' in text, name


def test_the_reference_has_every_section_of_the_settings() -> None:
    text = (ROOT / ".ci/reference.md").read_text()
    found = [each for each in vars(config).values() if isinstance(each, type) and issubclass(each, Section)]
    sections = [each.__name__ for each in found if each is not Section]
    assert len(sections) >= 8
    shown = re.findall(r"^::: raypipe\.(?:config\.)?(\w+)$", text, re.MULTILINE)
    assert set(sections) <= set(shown)


@pytest.mark.pages
def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]+src=\"?([^\">\s]+)", page.read_text())
        loaded += re.findall(r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)\"?[^>]*>", page.read_text())
        assert loaded and not [address for address in loaded if "//" in address], page.name


@pytest.mark.pages
def test_the_site_shows_the_picture_of_the_palette(site: Path) -> None:
    text = (site / "concepts.html").read_text()
    assert "architecture-light.svg#only-light" in text and "architecture-dark.svg#only-dark" in text
    assert "<picture>" not in text
