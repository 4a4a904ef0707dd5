"""One result by every build of the kernel, and at each level of vector instructions.

csrc/versions.h, color_simd.h, resize_simd.h     set_simd: 0 none, 1 SSSE3, 2 AVX2
csrc/kernel.c                                     installed, for processors without AVX2 and SSSE3, and others
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from random_jobs import Input, random_inputs

from raypipe import kernel
from raypipe.kernel import Op

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

BUILDS = [
    "gcc -mno-avx2 -mno-ssse3",
    *[
        pytest.param(compiler, marks=pytest.mark.soak)
        for compiler in (
            "gcc -mno-avx2",
            "gcc -march=native",
            "gcc -O0",
            "gcc -mno-avx2 -mno-ssse3 -O2",
            "clang",
        )
    ],
]


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.name.partition(".")[0], path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=BUILDS)
def build(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The kernel by such a compiler; functions that name their instructions have them in each build."""
    pytest.importorskip(
        "hatchling", reason="hatchling is a build dependency; the dev group has it"
    )
    if not shutil.which(request.param.split()[0]):
        pytest.skip("there is no such compiler")
    monkeypatch.setenv("CC", request.param)
    hook = module_of(ROOT / "hatch_build.py")
    reason = hook.compile_extension(hook.KERNEL, ROOT, tmp_path)
    if "unrecognized" in reason:
        pytest.skip(f"not of this processor: {reason}")
    assert not reason
    return module_of(tmp_path / hook.KERNEL.file)


@pytest.fixture(scope="module")
def inputs() -> list[Input]:
    return list(random_inputs(2000))


def statuses(module: ModuleType, inputs: list[Input]) -> list[int]:
    """The status of each image; checks those that are made, between guard bytes, against the reference."""
    found = []
    for number, one in enumerate(inputs):
        memory = np.full((3, *one.expected.shape), 77, np.uint8)
        found += module.run(
            [one.image], [kernel.Job(one.ops, one.params, memory[1:2])], 1, True
        )
        assert (memory[::2] == 77).all()
        assert found[-1] != kernel.DONE or np.array_equal(memory[1], one.expected), (
            number,
            one.ops.tolist(),
        )
    return found


def at_each_level(module: ModuleType, inputs: list[Input]) -> list[list[int]]:
    """The statuses at each level of vector instructions that the processor has."""
    try:
        most = module.set_simd(2)
        return [
            statuses(module, inputs)
            for level in range(most + 1)
            if module.set_simd(level) == level
        ]
    finally:
        module.set_simd(2)


@pytest.fixture(scope="module")
def installed(inputs: list[Input]) -> list[list[int]]:
    import _raypipe_kernel

    return at_each_level(_raypipe_kernel, inputs)


def test_each_level_has_the_pixels_of_the_reference(
    inputs: list[Input], installed: list[list[int]]
) -> None:
    assert all(found == installed[0] for found in installed)
    done = {
        int(code)
        for one, status in zip(inputs, installed[0], strict=True)
        if not status
        for code in one.ops[:, 0]
    }
    assert done == set(Op) and installed[0].count(kernel.DONE) > 0.8 * len(inputs)


@pytest.mark.system
def test_each_build_has_the_pixels_of_the_reference_and_refuses_the_same(
    build: ModuleType, inputs: list[Input], installed: list[list[int]]
) -> None:
    assert at_each_level(build, inputs) == installed


@pytest.mark.system
@pytest.mark.parametrize("file", ["color.h", "filter.h"])
def test_hardened_loops_over_pixels_are_vectorized(file: str, tmp_path: Path) -> None:
    """Both versions of each loop. An index that -fsanitize=bounds checks keeps GCC from it: take a pointer."""
    compiler = shutil.which("gcc")
    if not compiler or platform.machine() != "x86_64":
        pytest.skip("GCC says what it vectorizes; loops have two versions on x86-64")
    hook = module_of(ROOT / "hatch_build.py")
    report = tmp_path / "report"
    source = ROOT / "raypipe" / "kernel" / "csrc" / "kernel.c"
    subprocess.run(
        [
            *(compiler, "-O3", "-fPIC", "-shared", *hook.hardening([compiler])),
            *("-DPy_LIMITED_API=0x030b0000", f"-fopt-info-vec-optimized={report}"),
            *(f"-I{sysconfig.get_paths()['include']}", *hook.libjpeg_flags()[0]),
            *(source, "-o", tmp_path / "kernel.so", *hook.libjpeg_flags()[1]),
        ],
        check=True,
    )
    found = Counter(re.findall(rf"csrc/{file}:(\d+)", report.read_text()))
    lines = (source.parent / file).read_text().splitlines()
    loops = [
        number
        for number, line in enumerate(lines, 1)
        if re.search(r"for \((int(64_t)? i = 0)?; i < (num|count); i\+\+\)", line)
        and _is_versioned(lines[:number])
    ]
    assert len(loops) >= 6
    assert {
        number: found[str(number)] for number in loops if found[str(number)] < 2
    } == {}


def _is_versioned(lines: list[str]) -> bool:
    """Whether the last line is in a function that `VERSIONS` compiles twice."""
    starts = [line for line in lines if line[:1].isalpha() and "(" in line]
    return "_body(" in starts[-1]
