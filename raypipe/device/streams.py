"""Devices and their streams, and the hand-over of tensors from one stream to another. Knows torch, not Ray.

On CPU the same code runs over torch.cpu's streams and events, which do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from raypipe.errors import ConfigError


def numbered(device: torch.device | str) -> torch.device:
    """The device by its number: which one is current differs between threads.

    Raises:
        ConfigError: the device is neither CUDA nor CPU.
    """
    device = torch.device(device)
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"device is {device}: batches go to cuda or cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def new_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()


def new_event(device: torch.device) -> Any:
    # Blocking, or a thread that waits for it would burn a core while the host is ahead of the device.
    return torch.cuda.Event(blocking=True) if device.type == "cuda" else torch.cpu.Event()


def hand_over(ready: Any, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
    """Let what this thread's current stream is given from now on read tensors that another stream makes.

    Call it in the thread that works on them: which stream is current differs between threads.

    Args:
        ready: an event that the other stream has recorded behind its work on them.
        tensors: on `device`, memory of the other stream.
        device: with its number.
    """
    stream = torch.get_device_module(device).current_stream(device)
    ready.wait(stream)
    for tensor in tensors:
        if tensor.is_cuda:  # once freed, its memory is not used again before this stream has done with it
            tensor.record_stream(stream)
