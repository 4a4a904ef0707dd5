"""What is said of a GPU's JPEG engine, by nvJPEG's own status."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.device import jpeg_engine
from raypipe.device.jpeg_decoders import by_torchvision


@pytest.mark.parametrize(
    ("status", "has_nvcuvid", "capabilities", "is_well", "words"),
    [
        (0, True, "", True, "with the GPU's JPEG engine"),
        (7, True, "all", True, "which this GPU does not have"),  # a T4
        (7, False, "compute,utility", False, "NVIDIA_DRIVER_CAPABILITIES is compute,utility"),
        (7, False, "", False, "NVIDIA_DRIVER_CAPABILITIES is not set"),
        (6, True, "all", False, "status 6"),
        (None, True, "", False, "without nvJPEG"),
    ],
)
def test_each_status_is_told(
    status: int | None, has_nvcuvid: bool, capabilities: str, is_well: bool, words: str
) -> None:
    found = jpeg_engine.told(status, has_nvcuvid, capabilities)
    assert found[0] is is_well and words in found[1]


def test_the_library_that_decodes_is_asked() -> None:
    by_torchvision()
    if "libnvjpeg" not in Path("/proc/self/maps").read_text():
        pytest.skip("this torchvision is not built for CUDA")
    status = jpeg_engine._hardware_status()
    assert isinstance(status, int) and 0 <= status <= 10
    assert not jpeg_engine._has_library("libno-such-library.so.1")
