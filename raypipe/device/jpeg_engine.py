"""Whether nvJPEG can use this GPU's JPEG engine, which decodes baseline JPEGs beside the kernels of the training.

Data-centre chips have one (A100, A30, H100 and others). nvJPEG loads the driver's libnvcuvid.so.1 for it, which
NVIDIA's container toolkit brings into a container for the driver capability `video` alone. Without it nvJPEG
decodes by kernels, as on a chip without an engine, and says nothing (NVIDIA/CUDALibrarySamples#132).
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

# Of nvjpeg.h.
_BACKEND_HARDWARE = 3
_SUCCESS, _ARCH_MISMATCH = 0, 7
_CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"


def jpeg_engine() -> tuple[bool, str]:
    """Whether all is well, and what was found, once a library has decoded on the current CUDA device."""
    status = _hardware_status()
    return told(status, _has_library("libnvcuvid.so.1"), os.environ.get(_CAPABILITIES, ""))


def told(status: int | None, has_nvcuvid: bool, capabilities: str) -> tuple[bool, str]:
    """As `jpeg_engine`.

    Args:
        status: nvjpegStatus_t of opening the hardware backend; None = no nvJPEG is loaded.
        has_nvcuvid: whether the driver's libnvcuvid is there.
        capabilities: that the container was started with; "" = none are named.
    """
    if status is None:
        return False, "without nvJPEG"
    if status == _SUCCESS:
        return True, "with the GPU's JPEG engine"
    if status == _ARCH_MISMATCH and has_nvcuvid:
        return True, "without a JPEG engine, which this GPU does not have"
    if status == _ARCH_MISMATCH:
        named = f"{_CAPABILITIES} is {capabilities}" if capabilities else f"{_CAPABILITIES} is not set"
        return False, f"without a JPEG engine: libnvcuvid.so.1 is missing, and {named}"
    return False, f"without a JPEG engine: opening it fails with nvJPEG's status {status}"


def _hardware_status() -> int | None:
    """What nvJPEG says when its hardware backend is opened, in the library that this process has loaded."""
    maps = Path("/proc/self/maps")
    found = re.search(r"/\S*/libnvjpeg\S*", maps.read_text()) if maps.exists() else None
    if not found:
        return None
    library, handle = ctypes.CDLL(found[0]), ctypes.c_void_p()
    status = int(library.nvjpegCreateEx(_BACKEND_HARDWARE, None, None, 0, ctypes.byref(handle)))
    if status == _SUCCESS:
        library.nvjpegDestroy(handle)
    return status


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
