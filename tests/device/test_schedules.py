"""The device side on a simulated CUDA device, in schedules that a seed draws.

What runs is the code of `raypipe.device` as it stands. See simulated_cuda.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from schedules import AS_IT_STANDS, PROGRAMS, beside_a_capture, decoding, run
from simulated_cuda import Cuda
from tiers import is_soak

# Programs: each draws its form from the simulation's seed


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_no_schedule_goes_wrong(program: Any, request: pytest.FixtureRequest) -> None:
    num = 5 if program is decoding else 30  # it has many more operations
    for seed in range(1000 if is_soak(request.config) else num):
        cuda = run(AS_IT_STANDS, program, seed)
        assert not cuda.errors, f"seed {seed}: {cuda.errors[0]}"


# CUDA graphs


def test_a_graph_that_watches_its_own_thread_is_captured_beside_the_ring() -> None:
    for seed in range(30):
        cuda = Cuda(seed)
        with AS_IT_STANDS.on(cuda):
            beside_a_capture(cuda, "thread_local")
