"""The GPU's utilization: the share of the time for which it executes kernels, as NVML counts it (`nvidia-smi`).

torch asks NVML through the package `nvidia-ml-py`, the extra `gpu`. Without it, on a CPU, and where a device does
not count (a part of one, by MIG), there is no utilization, and all that shows it leaves it out.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import torch

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UtilizationSum:
    """UtilizationSum of a stretch of time, which add up by `+`.

    Attributes:
        total: sum of the shares, each in [0, 1].
        number: count of the samples.
    """

    total: float = 0.0
    number: int = 0

    def __add__(self, addend: UtilizationSum) -> UtilizationSum:
        return UtilizationSum(self.total + addend.total, self.number + addend.number)

    def __sub__(self, addend: UtilizationSum) -> UtilizationSum:
        return UtilizationSum(self.total - addend.total, self.number - addend.number)

    @property
    def mean(self) -> float | None:
        """None = there are no samples."""
        return self.total / self.number if self.number else None


class Utilization:
    """Utilization of one device; a thread of the caller's calls `sample` about once a second.

    Attributes:
        latest: the last sample, in [0, 1]; None = there is none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_known = device.type == "cuda"
        self._lock = threading.Lock()
        self._samples = UtilizationSum()
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
        with self._lock:
            self._samples += UtilizationSum(share, 1)
            self.latest = share
        return share

    @property
    def samples(self) -> UtilizationSum:
        """Sum up all samples so far."""
        with self._lock:
            return self._samples
