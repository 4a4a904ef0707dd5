"""torch's settings that reach the pixels of the device, pinned around raypipe's work. Knows torch, not Ray.

    setting                              why it decides a pixel                                pinned to
    autocast, on CPU and CUDA            products of matrices and convolutions are halved      off
    default dtype, default device        Kornia makes tensors without naming either            float32, CPU
    precision of float32 (matmul, conv)  TF32 and bfloat16 have 11 and 8 bits                  float32's own
    cuDNN, oneDNN, cuDNN's benchmark     which implementation of a convolution is taken        on; off
    deterministic algorithms             other kernels, or an error                            off
    inference mode                       its tensors can never be trained on                   off

The mode of gradients stays as it is, since a gradient may be taken through an augmentation. Only what differs is
set, and is put back at the end: to find that nothing does takes 10 to 20 µs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn

_Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]
"""How a setting of torch's is read, and written, and the value that it has around raypipe's work."""

_SETTINGS: list[_Setting] = [
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
]
for _kind in ("cpu", "cuda"):
    _read = partial(torch.is_autocast_enabled, _kind)
    _SETTINGS.append((_read, partial(torch.set_autocast_enabled, _kind), False))
_ON_CUDA: list[_Setting] = [
    (partial(getattr, cudnn, name), partial(setattr, cudnn, name), right)
    for name, right in (
        ("enabled", True),
        ("benchmark", False),
        ("deterministic", True),
    )
]
_MKLDNN: Any = mkldnn
_CUDNN: Any = cudnn
_OF_CPU: tuple[Any, ...] = _MKLDNN.matmul, _MKLDNN.conv
_OF_CUDA: tuple[Any, ...] = *_OF_CPU, cuda.matmul, _CUDNN.conv, _CUDNN.rnn
_FULL = "none", "ieee"  # "none" is what no setting lowers


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    matmul = allows_tf32 = None
    with contextlib.suppress(RuntimeError):
        # these two refuse to be read where the newer settings were used
        matmul = torch.get_float32_matmul_precision()
        allows_tf32 = cudnn.allow_tf32
    precisions = [owner.fp32_precision for owner in _OF_CUDA]
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    for owner in _OF_CUDA:
        owner.fp32_precision = "ieee"
    try:
        yield
    finally:
        # First, since they set the newer ones, too, and must agree with them.
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if allows_tf32 is not None:
            cudnn.allow_tf32 = allows_tf32
        for owner, precision in zip(_OF_CUDA, precisions, strict=True):
            owner.fp32_precision = precision


@contextlib.contextmanager
def pinned(device: torch.device) -> Iterator[None]:
    """Context manager: torch's settings as in the module's table, for work on a device; then as they were."""
    on_cuda = device.type == "cuda"
    changed = list[tuple[Callable[[Any], object], Any]]()
    with contextlib.ExitStack() as stack:
        try:
            for read, write, right in (*_SETTINGS, *_ON_CUDA) if on_cuda else _SETTINGS:
                value = read()
                if value != right:
                    changed.append((write, value))
                    write(right)
            if any(
                owner.fp32_precision not in _FULL
                for owner in (_OF_CUDA if on_cuda else _OF_CPU)
            ):
                stack.enter_context(_full_precision())
            if torch.is_inference_mode_enabled():  # to end it would turn gradients on
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
        finally:
            for write, value in reversed(changed):
                write(value)
