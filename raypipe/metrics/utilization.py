"""The GPU's utilization: the share of the time for which it executes kernels, as NVML counts it (`nvidia-smi`).

torch asks NVML through the package `nvidia-ml-py`, the extra `gpu`. Without it, on a CPU, and where a device does
not count (a part of one, by MIG), there is no utilization, and all that shows it leaves it out.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

_logger = logging.getLogger(__name__)


def mean_share(samples: np.ndarray) -> float | None:
    """Return the mean of samples by their sum and their number, float (2,); None = there are none."""
    total, number = samples.tolist()
    return total / number if number else None


class Utilization:
    """Utilization of one device; a thread of the caller's calls `sample` about once a second.

    Attributes:
        latest: the last sample, in [0, 1]; None = there is none.
        samples: the sum of all samples so far, and their number: float (2,).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = device.type == "cuda"
        self.samples = np.zeros(2)
        self.latest: float | None = None

    def sample(self) -> float | None:
        """Ask for the device's utilization now, and count it; None where nobody knows it. Takes below 1 ms."""
        if not self._is_known:
            return None
        try:
            share = min(100, max(0, torch.cuda.utilization(self._device))) / 100
        except Exception as error:
            # no package, no permission, or a device that does not count
            self._is_known = False
            _logger.debug(
                "the utilization of %s is not known: %s: %s",
                self._device,
                type(error).__name__,
                error,
            )
            return None
        self.samples = np.add(self.samples, (share, 1))
        self.latest = share
        return share
