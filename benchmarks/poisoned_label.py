"""Seconds until a wrong label is found by the losses of a run: the commands of docs/look-inside.md, timed.

    python benchmarks/poisoned_label.py [--repeats 3]

The first program of the page plants a wrong label among the digits, and trains a small network on them, which is
not timed. The search knows the losses of the run, and not the sample: two commands list the samples of the steps
with the highest losses of the last two epochs, the sample that both drew is the suspect, and a third command lists
its steps. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "look-inside.md"
RUN = "runs/planted"
PLANTED = 977
_COMMAND = Path(sys.executable).parent / "raypipe"


def trained() -> tuple[dict[int, float], int]:
    """Run the program of the page in this folder: the loss of each step, and the steps of an epoch."""
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return names["losses"], names["spec"].plan.steps_per_epoch


def said(*args: str) -> dict[str, Any]:
    """The result of a command of raypipe, as JSON."""
    done = subprocess.run(
        [str(_COMMAND), *args], stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def found(losses: dict[int, float], steps_per_epoch: int) -> tuple[int, list[float]]:
    """Search for the suspect: its index, and the seconds of each command."""
    seconds = []
    drawn = []
    for epoch in (2, 1):
        first = epoch * steps_per_epoch + 1
        steps = range(first, first + steps_per_epoch)
        spike = max(steps, key=lambda step: losses[step])
        begun = time.perf_counter()
        rows = said("replay", RUN, "--step", str(spike))["samples"]
        seconds.append(time.perf_counter() - begun)
        drawn.append({row["index"] for row in rows})
    (suspect,) = drawn[0] & drawn[1]
    begun = time.perf_counter()
    (history,) = said("when", RUN, str(suspect))["samples"]
    seconds.append(time.perf_counter() - begun)
    assert len(history["draws"]) == 3
    return suspect, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    totals = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        losses, steps_per_epoch = trained()
        for _ in range(args.repeats):
            suspect, seconds = found(losses, steps_per_epoch)
            assert suspect == PLANTED, suspect
            totals.append(sum(seconds))
            shown = " + ".join(f"{part:.2f}" for part in seconds)
            print(f"sample {suspect}: {shown} = {sum(seconds):.2f} s", flush=True)
        os.chdir("/")
    result = {"seconds": statistics.median(totals), "repeats": args.repeats}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
