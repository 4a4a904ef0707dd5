"""What a call of csrc/kernel.c is given: lists and arrays that change meanwhile, and jobs of other types.

What would end the process runs in one of its own.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from raypipe import kernel
from raypipe.kernel.extension import _extension

pytestmark = pytest.mark.skipif(
    not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
)

START = """
import numpy as np
import _raypipe_kernel as k
image = np.arange(12 * 9 * 3, dtype=np.int64).astype(np.uint8).reshape(12, 9, 3)
def job(num):
    ops, params = np.array([[4, 0]], np.int32), np.array([[1, 1]] * num, np.int64)
    return ops, params, np.zeros((num, 12, 9, 3), np.uint8)
def is_turned(job, row=0):
    return np.array_equal(job[2][row], image[:, ::-1])
class Images:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        if index:
            raise IndexError
        change()
        return image
"""


def outcome(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", START + code], capture_output=True, text=True
    )
    return (
        done.stdout.strip()
        if done.returncode == 0
        else f"{done.returncode} {done.stderr[-500:]}"
    )


@pytest.mark.parametrize("num_more", [1, 300])
def test_jobs_that_grow_while_images_are_read(num_more: int) -> None:
    code = f"""
jobs = [job(1)]
def change():
    jobs.extend(job(1) for _ in range({num_more}))
print(list(k.run(Images(), jobs, 1, True)), all(map(is_turned, jobs)))
"""
    assert outcome(code) == "[0] True"


def test_jobs_that_shrink_while_images_are_read() -> None:
    code = """
jobs = [job(1) for _ in range(5)]
def change():
    del jobs[1:]
print(list(k.run(Images(), jobs, 1, True)), is_turned(jobs[0]))
"""
    assert outcome(code) == "[0] True"


@pytest.mark.parametrize("which", ["ops", "params"])
def test_a_program_that_is_overwritten_while_it_runs(which: str) -> None:
    """The first result lies where the program does; the second one is that of the program as it was given."""
    code = f"""
memory = np.zeros(2 * 12 * 9 * 3, np.uint8)
ops, params, _ = job(2)
if {which == "ops"}:
    shared = memory[:8].view(np.int32).reshape(1, 2)
    shared[:] = ops
    ops = shared
else:
    shared = memory[:32].view(np.int64).reshape(2, 2)
    shared[:] = params
    params = shared
one = ops, params, memory.reshape(2, 12, 9, 3)
image[:] = 77
print(list(k.run([image, image], [one], 1, True)), (memory == 77).all())
"""
    assert outcome(code) == "[0, 0] True"


def run(images: Any, jobs: Any) -> bytes:
    return bytes(_extension().run(images, jobs, 1, True))


@pytest.mark.parametrize(
    "job", [7, None, "abcd", ["ops", "params", "out"], ()], ids=repr
)
def test_a_job_that_is_no_tuple_of_three_is_a_type_error(job: Any) -> None:
    with pytest.raises(TypeError, match="ops, params, out"):
        run([b""], [job])


@pytest.mark.parametrize(("images", "jobs"), [(7, []), ([b""], 7), (None, None)])
def test_images_and_jobs_that_are_no_sequences_are_a_type_error(
    images: Any, jobs: Any
) -> None:
    with pytest.raises(TypeError):
        run(images, jobs)


def test_a_block_whose_sum_does_not_fit_is_left_to_opencv() -> None:
    """A mean over more than 2^31 / 255 pixels."""
    pixels = np.full((4096, 2060, 3), 255, np.uint8)
    out = np.zeros((1, 1, 1, 3), np.uint8)
    for height, expected in ((4096, kernel.BAD_PARAMS), (4000, kernel.DONE)):
        job = kernel.Job(
            np.array([[2, 0]], np.int32), np.array([[1, 1, 1, 3]], np.int64), out
        )
        assert kernel.run([pixels[:height]], [job])[0] == expected
    assert (out == 255).all()
