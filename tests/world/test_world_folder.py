"""`RAYPIPE_WORLD=FOLDER pytest --tier world` tries any folder of files as `test_drawn` tries its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from drawn import image, saved

PROGRAM = Path(__file__).parents[2] / "fuzz" / "each_file.py"


def findings_in(folder: Path) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, PROGRAM, folder],
        stdout=subprocess.PIPE,
        check=True,
        env=environment,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(findings: list[dict[str, Any]]) -> str:
    """A line for each file, and the reasons of refusals with their counts."""
    lines, counts = list[str](), Counter[str]()
    for each in findings:
        said = "; ".join(
            f"{reason} [{', '.join(places)}]"
            for reason, places in each["reasons"].items()
        )
        noise = f" ({each['noise']} bytes on stderr)" if each["noise"] else ""
        lines.append(
            f"{each['file']:60} {each['kind']:12} {each['verdict']:8} {said}{noise}".rstrip()
        )
        counts[each["verdict"]] += 1
        if each["verdict"] == "refused":
            counts[f"refused: {_kind_of_reason(each)}"] += 1
    lines += [f"{number:6} {name}" for name, number in sorted(counts.items())]
    return "\n".join(lines)


def _kind_of_reason(finding: dict[str, Any]) -> str:
    return re.sub(r"\d+", "N", next(iter(finding["reasons"])).partition(" (")[0])


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
