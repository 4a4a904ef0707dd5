"""Instructions of the kernel for a fixed drawn set, by preset and step, at each level of vector instructions.

    python benchmarks/instructions.py [--write]

Valgrind's callgrind counts them, so a build has the same numbers on any machine, however busy. They are held to
benchmarks/results/instructions.json, within 5 %; what has moved is named with its functions. --write writes that
file: a change that costs or saves instructions says so in its commit. Exit status 1: something has moved.

Numbers of another compiler are not comparable: the file says which one it is of.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results" / "instructions.json"
TOLERANCE = 0.05
LEVELS = ("no vectors", "SSSE3", "AVX2")

_NUM_SAMPLES = 6
_SIDES = [(180, 240), (240, 180), (256, 256), (97, 131), (300, 200), (64, 64)]
_SMALL = [(32, 32)] * _NUM_SAMPLES
_PRESETS = ("light", "heavy", "center", "resize", "small")
_STEPS: dict[str, dict[str, Any]] = {
    "Affine": {"rotate": (10, 10), "scale": (0.9, 0.9), "p": 1},
    "ColorJitter": {"p": 1},
    "ToGray": {"p": 1},
    "Solarize": {"p": 1},
    "Posterize": {"p": 1},
    "GaussianBlur": {"p": 1},
    "MotionBlur": {"p": 1},
    "CoarseDropout": {"p": 1},
}
# as few functions as have most of the instructions
_NUM_NAMED = 8
_ENTRY = "py_run"


def cases() -> dict[str, tuple[Any, int, list[tuple[int, int]]]]:
    """The transform, the size and the images' heights and widths, by name."""
    found: dict[str, tuple[Any, int, list[tuple[int, int]]]] = {
        preset: (preset, 112, _SIDES) for preset in _PRESETS
    }
    found["flip-crop"] = ("flip-crop", 32, _SMALL)
    for name, arguments in _STEPS.items():
        steps = [{"Resize": {"height": 112, "width": 112}}, {name: arguments}]
        found[name] = (steps, 112, _SIDES)
    return found


def make_all() -> None:
    """Make each case's images at each level; callgrind writes a file at the end of each call of the kernel."""
    import numpy as np
    from PIL import Image

    from raypipe.config import TransformConfig
    from raypipe.kernel import extension
    from raypipe.transform.sample_maker import SampleMaker
    from raypipe.transform.samples import of_images

    rng = np.random.default_rng(0)
    pictures: dict[tuple[int, int], bytes] = {}
    for height, width in {*_SIDES, *_SMALL}:
        coarse = rng.integers(0, 256, (height // 8, width // 8, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize((width, height)).save(file, "JPEG", quality=90)
        pictures[height, width] = file.getvalue()
    keys = np.arange(2 * _NUM_SAMPLES, dtype=np.uint64).reshape(-1, 2)
    for level in range(len(LEVELS)):
        extension._extension().set_simd(level)
        for transform, size, sides in cases().values():
            samples = of_images([pictures[side] for side in sides])
            SampleMaker(transform, TransformConfig(size=size)).make(samples, keys)


def counted() -> dict[str, Counter[str]]:
    """Instructions of each case at each level, by function of the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/out",
            "--collect-atstart=no",
            f"--toggle-collect={_ENTRY}",
            f"--dump-after={_ENTRY}",
            sys.executable,
            __file__,
            "--make",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        files = sorted(
            Path(folder).glob("out.*"), key=lambda path: int(path.suffix[1:])
        )
        found = [counts for path in files if (counts := of_kernel(path.read_text()))]
    # the first calls try whether the kernel can be used
    names = [f"{case}, {level}" for level in LEVELS for case in cases()]
    return dict(zip(names, found[-len(names) :], strict=True))


def of_kernel(written: str) -> Counter[str]:
    """The instructions of the kernel's own functions, in a file of callgrind's."""
    names: dict[str, str] = {}

    def name_of(line: str) -> str:
        number, name = re.fullmatch(r"\w+=\((\d+)\) ?(.*)", line).groups()  # type: ignore[union-attr]
        kind = "ob" if line.startswith(("ob", "cob")) else "fn"
        return names.setdefault(f"{kind} {number}", name)

    counts = Counter[str]()
    is_kernels = False
    function = ""
    is_of_call = False
    for line in written.splitlines():
        if line.startswith("ob="):
            is_kernels = "_raypipe_kernel" in name_of(line)
        elif line.startswith("fn="):
            function = name_of(line).partition("'")[0]
        elif line.startswith(("cob=", "cfn=")):
            name_of(line)
        elif line.startswith("calls="):
            is_of_call = True
        elif re.match(r"[+*\d-]", line):
            if is_kernels and not is_of_call:
                counts[function] += int(line.split()[1])
            is_of_call = False
    return counts


def compiler() -> str:
    """The compiler of this machine, by its version."""
    done = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True)
    return f"gcc {done.stdout.strip()}"


def moved(before: dict[str, Any], now: Counter[str]) -> str:
    """What is beyond the tolerance, with the functions that moved most; empty = nothing is."""
    total = now.total()
    ratio = total / before["all"]
    if abs(ratio - 1) <= TOLERANCE:
        return ""
    known = before["functions"]
    functions = {*known, *(name for name, _ in now.most_common(_NUM_NAMED))}
    changes = {name: now[name] - known.get(name, 0) for name in functions}
    most = sorted(changes, key=lambda name: -abs(changes[name]))[:3]
    words = ", ".join(f"{name} {changes[name]:+,}" for name in most)
    return f"{before['all']:,} → {total:,} ({ratio - 1:+.1%}): {words}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the file")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_all()
        return
    known = json.loads(FILE.read_text()) if FILE.exists() else {"cases": {}}
    found: dict[str, Any] = {}
    told = []
    for name, counts in counted().items():
        functions = dict(counts.most_common(_NUM_NAMED))
        found[name] = {"all": counts.total(), "functions": functions}
        before = known["cases"].get(name)
        if before and (change := moved(before, counts)):
            told.append(f"{name}: {change}")
        print(f"{name}: {counts.total():,}")
    if options.write:
        FILE.write_text(
            json.dumps({"compiler": compiler(), "cases": found}, indent=1) + "\n"
        )
        return
    if known.get("compiler") != compiler():
        of_file = known.get("compiler")
        raise SystemExit(f"the file is of {of_file}, and this is {compiler()}")
    if told or found.keys() != known["cases"].keys():
        told += sorted(found.keys() ^ known["cases"].keys())
        raise SystemExit("\n".join(told))


if __name__ == "__main__":
    main()
