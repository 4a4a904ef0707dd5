"""OpenCV, where one of its wheels is installed: a faster way to the same pixels, which nothing here needs."""

from __future__ import annotations

import importlib
from typing import Any


def _imported() -> Any:
    try:
        return importlib.import_module("cv2")
    except ImportError:  # the wheel with windows also needs libraries of the machine
        return None


cv2 = _imported()
"""The module; None = there is none."""


def use_one_thread() -> None:
    """Run OpenCV in one thread: its own, one per core, know nothing of OMP_NUM_THREADS, which Ray sets."""
    if cv2 is not None:
        cv2.setNumThreads(1)
