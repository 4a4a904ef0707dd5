"""One result by every build of the kernel, and at each level of vector instructions.

csrc/versions.h, color_simd.h, resize_simd.h     set_simd: 0 none, 1 SSSE3, 2 AVX2
csrc/kernel.c                                     installed, for processors without AVX2 and SSSE3, and others
"""

from __future__ import annotations

import importlib.util
import shutil
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
