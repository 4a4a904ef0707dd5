"""States of torch that a training loop may be in, and a module whose pixels depend on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mkldnn


@contextlib.contextmanager
def _set(write: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(before)


def _dtype(dtype: torch.dtype) -> Any:
    return _set(torch.set_default_dtype, dtype, torch.float32)


def _conv_precision() -> Any:
    def write(value: str) -> None:
        mkldnn.conv.fp32_precision = value

    return _set(write, "bf16", "none")


@contextlib.contextmanager
def _drawn() -> Iterator[None]:
    with torch.random.fork_rng([]):
        torch.rand(7)
        yield


STATES: dict[str, Callable[[], Any]] = {
    "autocast of CPUs": partial(torch.autocast, "cpu", torch.bfloat16),
    "autocast of CUDA": lambda: _set(
        partial(torch.set_autocast_enabled, "cuda"), True, False
    ),
    "default float64": lambda: _dtype(torch.float64),
    "default bfloat16": lambda: _dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": lambda: _set(torch.set_deterministic_debug_mode, 2, 0),
    "warned of the others": lambda: _set(torch.set_deterministic_debug_mode, 1, 0),
    "lower precision": lambda: _set(
        torch.set_float32_matmul_precision, "medium", "highest"
    ),
    "lower precision of convolutions": _conv_precision,
    "no oneDNN": lambda: _set(torch._C._set_mkldnn_enabled, False, True),
    "one thread": lambda: _set(torch.set_num_threads, 1, torch.get_num_threads()),
    "three threads": lambda: _set(torch.set_num_threads, 3, torch.get_num_threads()),
    "other draws": _drawn,
}


def _flag(name: str, value: bool, before: bool) -> Any:
    return _set(lambda wanted: setattr(cudnn, name, wanted), value, before)


def _tf32() -> Any:
    return _set(lambda value: setattr(cuda.matmul, "allow_tf32", value), True, False)


ON_CUDA: dict[str, Callable[[], Any]] = {
    **STATES,
    "TF32": _tf32,
    "no TF32 in convolutions": lambda: _flag("allow_tf32", False, True),
    "benchmark": lambda: _flag("benchmark", True, False),
    "deterministic cuDNN": lambda: _flag("deterministic", True, False),
    "no cuDNN": lambda: _flag("enabled", False, True),
}


def seen() -> list[Any]:
    """What a loop can read of torch's state."""
    precisions = [
        owner.fp32_precision
        for owner in (cuda.matmul, mkldnn.matmul, cudnn.conv, cudnn.rnn, mkldnn.conv)
    ]
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_deterministic_debug_mode(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch._C._get_mkldnn_enabled(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        *precisions,
        torch.get_rng_state().tolist(),
    ]


class Convolved(torch.nn.Module):
    """A user's augmentation with drawn weights, a convolution, a product of matrices, and draws of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("cd,bdhw->bchw", torch.rand(3, 3).to(image), image)
        return (self.conv(image) + mixed).clamp(0, 1)


class ConvolvedOnDevice(Convolved):
    """The same on the images' device, with draws there."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.to(image.device)
        noise = torch.rand(image.shape, device=image.device)
        return super().forward((image + 0.1 * noise).detach())
