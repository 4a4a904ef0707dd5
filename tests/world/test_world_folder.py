"""`RAYPIPE_WORLD=FOLDER pytest --tier world` tries any folder of files as `test_drawn` tries its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from drawn import image, saved
from world_table import findings_in, table


@pytest.mark.world
@pytest.mark.timeout(3600)
def test_each_file_of_a_folder_is_delivered_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not (folder := os.environ.get("RAYPIPE_WORLD")):
        pytest.skip("RAYPIPE_WORLD names no folder")
    findings = findings_in(Path(folder))
    with capsys.disabled():
        print(f"\n{table(findings)}")
    assert findings
    bad = [
        each
        for each in findings
        if each["verdict"] not in ("equal", "refused") or each["noise"] > 2000
    ]
    assert not bad, table(bad)


def test_the_table_has_what_came_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(saved(image(), "PNG"))
    (tmp_path / "cut.png").write_bytes(saved(image(), "PNG")[:99])
    findings = findings_in(tmp_path)
    assert [each["verdict"] for each in findings] == ["refused", "equal"]
    assert "truncated" in table(findings)
