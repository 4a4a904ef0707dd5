"""What README.md and docs/ show: their blocks of code, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "llms.txt", *sorted((ROOT / "docs").glob("*.md"))]
OURS = ("raypipe", "jobs/train.py", "jobs/tune.py")
# parts of lines that need more than there is
NOT_OURS = (
    "…",
    "OWNER",
    "gcloud",
    "kubectl",
)


def blocks(language: str, *pages: Path) -> list[str]:
    found = (
        re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
        for page in pages or PAGES
    )
    return [block for of_page in found for block in of_page]


def commands(*pages: Path) -> list[list[str]]:
    """Each command of ours, without what stands before it."""
    found = []
    for block in blocks("console", *pages):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.replace("MY-BUCKET", "my-bucket"), comments=True)
            ours = [number for number, word in enumerate(words) if word in OURS]
            if ours and not any(mark in line for mark in NOT_OURS):
                found.append(words[ours[0] :])
    return found


def defined(page: str, *names: str) -> dict[str, Any]:
    """What a page of docs/ defines in its first block of Python, and in those that define these functions."""
    first, *others = blocks("python", ROOT / "docs" / page)
    found: dict[str, Any] = {}
    for code in (
        first,
        *(code for code in others if any(f"def {name}(" in code for name in names)),
    ):
        exec(compile(code, page, "exec"), found)
    return found
