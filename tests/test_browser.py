"""The pages in a real browser, without a network. Skipped where there is none (apt-get install chromium)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
from recorded_runs import make_run

from raypipe.pages import COLOURS
from raypipe.pages.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.pages, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")]


def shown(page: Path, *options: str, height: int = 2600) -> np.ndarray:
    """What a browser draws of a page, uint8 BGR; anything that it has to say of the page is an error."""
    assert CHROMIUM
    screenshot = page.with_suffix(".png")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
    command += [f"--window-size=1040,{height}", f"--screenshot={screenshot}", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={page.parent}/profile"]
    done = subprocess.run(
        [*command, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    assert screenshot.exists(), done.stderr
    return cv2.imread(str(screenshot))


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_a_run_draws_its_charts_on_light_and_on_dark(tmp_path: Path, dark: bool) -> None:
    run = make_run(tmp_path / "one")
    write_report(str(run))
    seen = shown(run / "report.html", f"--blink-settings=preferredColorScheme={1 - dark}").astype(int)
    assert (seen[0, 0] < 60).all() if dark else (seen[0, 0] > 200).all()
    first = [int(COLOURS[0][i : i + 2], 16) for i in (5, 3, 1)]
    blue = (abs(seen - first) < 12).all(2)
    assert blue.sum() > 2000
