"""The counts of benchmarks/results/gpu.md: what the device side gives to the device for one micro-batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from budgets import CONFIGS, Budget, Counted, budgets

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


def test_the_counter_counts_what_reads_and_writes() -> None:
    image = torch.zeros(2, 3, 4, 4)  # 96 elements
    with Counted(image.numel()) as seen:
        view = image.permute(0, 2, 3, 1)[:, :2]  # nothing
        one = image + 1  # reads and writes all
        view.mul_(2)  # half of it, in place, once
        one.new_empty(2, 3, 4, 4)  # nothing
        # `ones` is an operation; one element in memory
        one += torch.ones(1).expand(2, 3, 4, 4)
    once = [
        "aten.add.Tensor",
        "aten.mul_.Tensor",
        "aten.ones.default",
        "aten.add_.Tensor",
    ]
    assert seen.operations == dict.fromkeys(once, 1)
    assert seen.passes == {"aten.add.Tensor": 1, "aten.add_.Tensor": 1}
    assert seen.bytes_moved == 4 * (2 * 96 + 48 + 1 + 96 + 1)


@pytest.mark.parametrize("size", [32, 48])
def test_the_counts_do_not_depend_on_the_size_of_the_images(size: int) -> None:
    from budgets import augmented, counted

    found = counted(augmented(6, size, preset="standard"), 6 * size * size * 3)
    limit = written()["standard"]
    assert (found.operations, found.passes) == (limit.operations, limit.passes)
