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
