"""The counts of benchmarks/results/gpu.md: what the device side gives to the device for one micro-batch."""

from __future__ import annotations

import re
from pathlib import Path

from budgets import CONFIGS, Budget, budgets

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu.md"


def written() -> dict[str, Budget]:
    """The table of the page."""
    row = re.compile(
        r"^\| (.+?) \| (\d+) \| (\d+) \| ([\d.]+) \| [\d.]+ \|$", re.MULTILINE
    )
    table = PAGE.read_text().partition("\n## Budgets\n")[2].partition("\n## ")[0]
    return {
        name.strip("`"): Budget(int(operations), int(passes), float(moved))
        for name, operations, passes, moved in row.findall(table)
    }


def test_no_part_takes_more_than_the_page_says() -> None:
    expected, found = written(), dict(budgets())
    assert found.keys() == expected.keys() == {*CONFIGS, "statistics of ResNet-50"}
    for name, budget in found.items():
        limit = expected[name]
        assert budget.operations <= limit.operations, (name, budget)
        assert budget.passes <= limit.passes, (name, budget)
        assert budget.images_moved <= limit.images_moved, (name, budget)
