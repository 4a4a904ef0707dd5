"""The table of what came of each file of a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("each_file.py")


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
