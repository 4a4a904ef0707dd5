"""Runs of run_mutations.py in processes that may die of an input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass
class Report:
    """What became of some inputs: how many by mutation and outcome, and what must not be."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, int, str] = (0.0, 0, "")  # CPU seconds, number, mutation
    peak_mib: float = 0.0

    def add(self, other: Report) -> None:
        for name, counts in other.outcomes.items():
            self.outcomes.setdefault(name, Counter()).update(counts)
        self.wrong += other.wrong
        self.slowest = max(self.slowest, tuple(other.slowest))
        self.peak_mib = max(self.peak_mib, other.peak_mib)


class Program:
    """run_mutations.py, which has imported what it needs, and takes inputs in processes that it forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "fuzz" / "run_mutations.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )

    def run(self, kind: str, first: int, count: int, folder: Path) -> Report:
        """Run inputs in one process; where it dies of one, another goes on behind that."""
        folder.mkdir(parents=True)
        assert self._process.stdin
        assert self._process.stdout
        print(kind, first, count, folder, file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        if status == 0:
            lines = (folder / "stdout").read_text().splitlines()
            return Report(**json.loads(lines[-1]))
        said = (folder / "stderr").read_text(errors="replace")
        numbers = [int(line) for line in said.splitlines() if line.isdigit()]
        assert numbers, f"no input was run: {said[-2000:]}"
        last = numbers[-1]
        rest = first + count - last - 1
        report = self.run(kind, last + 1, rest, folder / "rest") if rest else Report()
        report.wrong.insert(
            0, f"{kind} {last}: the process ended with {status}: {said[-1500:]}"
        )
        return report

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
