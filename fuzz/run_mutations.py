"""Mutated inputs, one after the other, in a process that may die of one.

    python fuzz/run_mutations.py KIND FIRST COUNT FOLDER
    python fuzz/run_mutations.py

Without arguments it takes lines of such, each in a forked process: imports take longer than a hundred inputs.
That process says all in FOLDER/stdout and FOLDER/stderr; the line of the answer is how it ended.

Input number n is a pure function of n. Its number is on stderr before it is used, so the last number there is
that of the input which the process died of. An input may use a gigabyte more than there was before the first,
30 s of CPU (SIGPROF ends it), and 300 s on the clock (SIGALRM ends it). The last line of stdout is JSON: outcomes
by mutation, wrong exceptions, slowest input, and the peak of memory.
"""

from __future__ import annotations

import collections
import faulthandler
import io
import json
import math
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

# pyarrow's allocator reserves a gigabyte of addresses at its first large value: all that the limit leaves, or
# nothing where it does not fit. Without that, the limit is one of what is used.
os.environ["MIMALLOC_ARENA_RESERVE"] = "0"

import numpy as np
import pyarrow as pa
from column_inputs import Columns
from mutate import ANY, Mutation
from mutate_columns import GROUPS
from mutate_images import OF_FORMAT
from mutate_stores import OF_KIND, make, no_file
from PIL import Image

from raypipe.errors import SampleError, StoreError
from raypipe.stores import open_store
from raypipe.transform.decode.jpeg import open_for_crop
from raypipe.transform.decode.rgb import decode

MEMORY_BYTES = 1 << 30
# of one input; a machine with much else to do takes the second
CPU_S = 30.0
CLOCK_S = 300.0


def encoded(kind: str) -> list[bytes]:
    """A few images in all the modes of a format."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), np.uint8)).resize(
        (43, 37), Image.Resampling.BICUBIC
    )
    gray, alpha, palette = small.convert("L"), small.convert("RGBA"), small.quantize(40)
    variants = {
        "jpeg": [(small, {}), (small, {"progressive": True}), (gray, {}), (small.convert("CMYK"), {}),
                 (small.resize((300, 260)), {"quality": 60})],
        "png": [(small, {}), (gray, {}), (alpha, {}), (palette, {}), (small.convert("1"), {}),
                (small, {"save_all": True, "append_images": [alpha]})],
        "webp": [(small, {}), (small, {"lossless": True}), (alpha, {}),
                 (small, {"save_all": True, "append_images": [gray]})],
        "bmp": [(small, {}), (gray, {}), (palette, {}), (small.convert("1"), {}), (alpha, {})],
        "gif": [(palette, {}), (palette, {"save_all": True, "append_images": [gray]}), (gray, {})],
        "tiff": [(small, {}), (small, {"compression": "tiff_deflate"}), (palette, {"compression": "tiff_lzw"}),
                 (small, {"compression": "jpeg"}), (small.convert("1"), {"compression": "group4"})],
    }  # fmt: skip
    images = []
    for image, options in variants[kind]:
        out = io.BytesIO()
        image.save(out, kind, **options)
        images.append(out.getvalue())
    return images


class Images:
    """One image of a format per input."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.seeds = encoded(kind)
        self.mutations = list({**ANY, **OF_FORMAT[kind]}.items())

    def run(self, number: int, rng: np.random.Generator) -> tuple[str, str]:
        name, mutate = self.mutations[number % len(self.mutations)]
        data = mutate(self.seeds[int(rng.integers(len(self.seeds)))], rng)
        outcome = decoded(data, rng)
        same_in_part(data, rng)
        return name, outcome

    def warm_up(self) -> None:
        for seed in self.seeds:
            decode(seed, exif=True)


def decoded(data: bytes | None, rng: np.random.Generator) -> str:
    try:
        image = decode(
            data,
            min_side=int(rng.choice([0, 8, 224])) or None,
            exif=bool(rng.integers(2)),
        )
    except SampleError as error:
        assert "MemoryError" not in str(error), (
            "a limit was not looked at, and the process's own stood in for it"
        )
        return "bad sample"
    assert (
        image.dtype == np.uint8
        and image.ndim == 3
        and image.shape[2] == 3
        and image.flags.c_contiguous
    )
    return "good"


def same_in_part(data: bytes, rng: np.random.Generator) -> None:
    """A crop of a JPEG that is decoded alone: a part of the whole image, or as bad."""
    opened = open_for_crop(data, exif=False)
    if opened is None or math.prod(opened[0]) > 4_000_000:
        return
    (height, width), decode_box = opened
    top, left = int(rng.integers(height)), int(rng.integers(width))
    box = (
        top,
        left,
        int(rng.integers(1, height - top + 1)),
        int(rng.integers(1, width - left + 1)),
    )
    results = []
    for run in (
        lambda: decode(data)[top : top + box[2], left : left + box[3]],
        lambda: decode_box(box),
    ):
        try:
            results.append(run().tobytes())
        except SampleError as error:
            results.append(str(error))
    assert results[0] == results[1], "a crop and its place in the whole image differ"


class Stores:
    """One store with one mutated file per input; every sample of it is read and decoded."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.templates = make(folder, [*encoded("jpeg"), *encoded("png")])[kind]
        self.contents = [template.read_bytes() for template in self.templates]
        self.mutations: list[tuple[str, Mutation | None]] = list(
            {**ANY, **OF_KIND[kind]}.items()
        )
        if kind == "folder":
            self.mutations += [("no file", None)] * 8

    def run(self, number: int, rng: np.random.Generator) -> tuple[str, str]:
        name, mutate = self.mutations[number % len(self.mutations)]
        chosen = int(rng.integers(len(self.templates)))
        template, data = self.templates[chosen], self.contents[chosen]
        try:
            if mutate is None:
                name = no_file(template, rng)
            else:
                template.write_bytes(mutate(data, rng))
            return name, read_all(self.address(template), rng)
        finally:
            if template.is_dir():
                template.rmdir()
            template.unlink(missing_ok=True)
            template.write_bytes(data)

    def address(self, template: Path) -> Path:
        return template.parent.parent if self.kind == "folder" else template

    def warm_up(self) -> None:
        for template in self.templates:
            assert read_all(self.address(template), np.random.default_rng(0)) == "good"


def read_all(path: Path, rng: np.random.Generator) -> str:
    """Read and decode all samples of a store, or 300 from its start and its end."""
    try:
        store = open_store(path)
        num = len(store)
        assert num >= 0 and len(store.fingerprint) == 32
        assert store.groups is None or store.groups[-1] == num
        columns = tuple(dict.fromkeys(("image", *tuple(store.schema.names))))
        assert store.classes is None or all(
            isinstance(name, str) for name in store.classes
        )
        outcomes = set()
        for indices in np.array_split(
            np.unique([np.arange(min(num, 300)), num - 1 - np.arange(min(num, 300))]),
            40,
        ):
            if indices.size:  # few at a time, as a check of a store has them
                batch = store.read(rng.permutation(indices), columns)
                assert all(len(batch[name]) == len(indices) for name in columns)
                outcomes |= {decoded(image, rng) for image in batch["image"]}
    except StoreError as error:
        assert str(path) in str(error) and len(str(error)) < 2_000
        assert (
            not re.search("MemoryError|malloc|realloc", str(error))
            or path.suffix == ".parquet"
        ), str(error)
        return "clear error"
    return "good" if outcomes <= {"good"} else "bad sample"


def main(kind: str, first: int, count: int, folder: Path) -> None:
    faulthandler.enable()
    reader = Images if kind in OF_FORMAT else Columns if kind in GROUPS else Stores
    inputs: Images | Columns | Stores = reader(kind, folder)
    inputs.warm_up()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    resource.setrlimit(
        resource.RLIMIT_AS, (used + MEMORY_BYTES, resource.RLIM_INFINITY)
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: dict[str, collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    wrong, slowest = [], (0.0, 0, "")
    for number in range(first, first + count):
        os.write(2, b"%d\n" % number)
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_S)
        try:
            name, outcome = inputs.run(number, np.random.default_rng([number, 7]))
        except Exception as error:
            name, outcome = (
                inputs.mutations[number % len(inputs.mutations)][0],
                "wrong exception",
            )
            trace, origin = error.__traceback__, ""
            while trace is not None:
                origin = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
                trace = trace.tb_next
            wrong.append(
                f"{kind} {number} ({name}): {type(error).__name__}: {error!s:.200} at {origin}"
            )
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pa.default_memory_pool().release_unused()  # which the limit would count against the next
        outcomes[name][outcome] += 1
        slowest = max(slowest, (time.process_time() - start, number, name))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "outcomes": outcomes,
                "wrong": wrong,
                "slowest": slowest,
                "peak_mib": (peak - before) / 1024,
            }
        )
    )


def answer_lines() -> None:
    """Run the inputs of each line of stdin in a process of its own, and print its exit status."""
    for line in sys.stdin:
        kind, first, count, folder = line.rstrip("\n").split(" ", 3)
        if not (child := os.fork()):
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(f"{folder}/{name}", os.O_CREAT | os.O_WRONLY), number)
            main(kind, int(first), int(count), Path(folder))
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        answer_lines()
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
