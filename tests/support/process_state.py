"""What a process has of its own, and a stream in it must leave alone: see `raypipe.transform.process_state`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch


def seeded() -> None:
    """Seed all generators of this process, as a user does at the beginning of a program."""
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)


def draws() -> tuple[Any, ...]:
    """The next numbers of the generators."""
    return (
        random.random(),
        np.random.random(),
        torch.rand(()).item(),
        torch.initial_seed(),
    )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """What runs within leaves the generators, and the number of OpenCV's threads, as they were."""
    seeded()
    expected = draws(), draws()
    seeded()
    first = draws()
    threads = cv2.getNumThreads()
    cv2.setNumThreads(4)
    try:
        yield
        assert cv2.getNumThreads() == 4
        assert (first, draws()) == expected
    finally:
        cv2.setNumThreads(threads)
