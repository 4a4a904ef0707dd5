"""Runs check.py on releases of Ray, each in an environment that uv lays over the project's, and shows the results.

    python tests/compat/releases.py [2.56.0 2.57.0 …] [--output benchmarks/results/ray.md]

Some four minutes each on two cores. With --output their rows in the table of that page are written anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

RELEASES = ("2.56.0", "2.57.0", "2.58.1", "2.59.0", "2.60.0")
ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 900
_ROW = re.compile(r"\| (\d+\.\d+\.\d+) \|")


def check(release: str) -> dict[str, object]:
    """What check.py found on a release, or its error."""
    command = [
        "uv",
        "run",
        "--with",
        f"ray=={release}",
        "python",
        "tests/compat/check.py",
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        return {
            "error": (done.stderr.strip().splitlines() or ["no error was printed"])[-1]
        }
    return json.loads(done.stdout.splitlines()[-1])


def row_of(release: str, found: dict[str, object]) -> str:
    """A line of the table."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    if "error" in found:
        return f"| {release} | {today} | failed | | | |"
    return f"| {release} | {today} | `{found['digest']}` | `{found['weights']}` | yes | {found['elastic']} |"


def write(page: Path, rows: dict[str, str]) -> None:
    """Put rows into the table of a page."""
    lines = page.read_text().splitlines()
    known = {match[1]: line for line in lines if (match := _ROW.match(line))} | rows
    others = [line for line in lines if not _ROW.match(line)]
    table_at = (
        next(number for number, line in enumerate(others) if line.startswith("| ---"))
        + 1
    )
    table = [
        known[release]
        for release in sorted(
            known, key=lambda release: [*map(int, release.split("."))]
        )
    ]
    page.write_text("\n".join([*others[:table_at], *table, *others[table_at:]]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows: dict[str, str] = {}
    failed = []
    for release in arguments.releases:
        found = check(release)
        rows[release] = row_of(release, found)
        print(rows[release], found.get("error", ""), flush=True)
        if "error" in found:
            failed.append(release)
        if arguments.output:
            write(arguments.output, rows)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
