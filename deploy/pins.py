"""Write the one list of exact versions: deploy/constraints.txt, and the same in pyproject.toml for `uv run`.

    python deploy/pins.py              # for new ranges; what they allow of the old list stays
    python deploy/pins.py --upgrade    # all at their newest

It needs uv alone. The list holds raypipe, its extras and its groups, on Linux and macOS, and what builds the image
and the wheel. It has names and versions alone: where they come from is the reader's business. pyproject.toml's
ranges are what raypipe promises to others; `.ci/newest` tries them at their newest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "pyproject.toml"
CONSTRAINTS = ROOT / "deploy/constraints.txt"
HEADER = """\
# The exact versions of `uv run`, of deploy/Dockerfile, and of any machine that should be like them. Written by
# deploy/pins.py, together with the same list in pyproject.toml.
"""
BUILD = ("hatchling",)
IMAGE = ("uv", *BUILD)
"""What deploy/Dockerfile installs beside raypipe's own requirements."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest version of everything"
    )
    upgrade = parser.parse_args().upgrade
    unpinned = with_lists(PROJECT.read_text(), [], [])
    old = [] if upgrade else CONSTRAINTS.read_text().splitlines()
    pins = resolve(unpinned, IMAGE, old, groups=("dev", "docs", "bench", "release"))
    build_pins = resolve("", BUILD, pins)
    CONSTRAINTS.write_text(HEADER + "".join(f"{pin}\n" for pin in pins))
    PROJECT.write_text(with_lists(unpinned, pins, build_pins))


def resolve(
    project: str,
    names: tuple[str, ...],
    preferred: list[str],
    groups: tuple[str, ...] = (),
) -> list[str]:
    """Exact versions of everything that a pyproject.toml and further names need.

    Args:
        project: text of a pyproject.toml; empty = there is none.
        names: further packages.
        preferred: lines of versions that are taken where they fit.
        groups: dependency groups of the project.

    Returns:
        `name==version`, sorted; with a marker only where one version does not fit every Python.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = ["names.in"], Path(folder, "pins.txt")
        Path(folder, "names.in").write_text("\n".join(names))
        output.write_text("\n".join(preferred))
        if project:
            Path(folder, "pyproject.toml").write_text(project)
            inputs += [
                "pyproject.toml",
                "--all-extras",
                *(word for name in groups for word in ("--group", name)),
            ]
        command = [
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            "3.11",
        ]
        command += [
            "--fork-strategy",
            "fewest",
            "--no-annotate",
            "--no-header",
            "--no-emit-find-links",
        ]
        subprocess.run(
            [*command, "--output-file", output.name, *inputs], cwd=folder, check=True
        )
        lines = [line for line in output.read_text().splitlines() if "==" in line]
    pins = [line.split(" ; ")[0] for line in lines]
    names_found = [pin.split("==")[0] for pin in pins]
    # A marker says where a package is asked for, which is nothing to a constraint, unless there are two of a name.
    return sorted(
        line if names_found.count(name) > 1 else pin
        for line, pin, name in zip(lines, pins, names_found, strict=True)
    )


def with_lists(project: str, pins: list[str], build_pins: list[str]) -> str:
    """The text of a pyproject.toml with both of `tool.uv`'s lists of versions replaced."""
    for name, lines in {
        "constraint-dependencies": pins,
        "build-constraint-dependencies": build_pins,
    }.items():
        array = "".join(f'    "{line.replace(chr(34), chr(39))}",\n' for line in lines)
        project, count = re.subn(
            rf"^{name} = \[.*?^\]$",
            f"{name} = [\n{array}]",
            project,
            flags=re.MULTILINE | re.DOTALL,
        )
        assert count == 1, name
    return project


if __name__ == "__main__":
    main()
