"""The generators and OpenCV's threads of a process are as they were, once raypipe's work in it is done."""

from __future__ import annotations

import threading

import cv2
import numpy as np
import pytest
from process_state import draws, undisturbed

from raypipe.transform.process_state import process_kept, seed_process


def test_generators_and_thread_counts_are_restored_even_after_an_error() -> None:
    with undisturbed():
        with process_kept():
            seed_process(1, 2)
            assert cv2.getNumThreads() == 1
            first = draws()
        with pytest.raises(ValueError, match="mine"), process_kept():
            seed_process(1, 2)
            assert draws() == first
            raise ValueError("mine")


def test_the_last_worker_restores_the_number_of_threads() -> None:
    inside, leave = threading.Barrier(2), threading.Event()

    def work() -> None:
        with process_kept(generators=False):
            inside.wait(30)
            leave.wait(30)

    with undisturbed():
        thread = threading.Thread(target=work)
        with process_kept(generators=False):
            thread.start()
            inside.wait(30)
        assert cv2.getNumThreads() == 1
        leave.set()
        thread.join()


@pytest.mark.parametrize("seed", [3, 4])
def test_what_opencv_draws_afterwards_hangs_on_its_own_seed(seed: int) -> None:
    def drawn(sample: int) -> list[int]:
        cv2.setRNGSeed(seed)
        with process_kept():
            seed_process(sample, 0)
        return cv2.randu(np.zeros(4, np.int32), 0, 1 << 30).ravel().tolist()

    other = cv2.randu(np.zeros(4, np.int32), 0, 1 << 30).ravel().tolist()
    assert drawn(1) == drawn(2) != other
    cv2.setRNGSeed(seed + 10)
    with process_kept():
        seed_process(1, 0)
    assert cv2.randu(np.zeros(4, np.int32), 0, 1 << 30).ravel().tolist() != drawn(1)
