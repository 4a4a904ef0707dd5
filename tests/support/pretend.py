"""A device that is not there: tensors that say they are elsewhere, are in host memory, and complain of waiting.

Torch would look for a driver if they said "cuda", so they say "meta".

Every operation runs on the host. What would make the host wait for a CUDA device raises HostWaitsError:
reading a value (item, bool, nonzero, a boolean index), and a copy from or to the host that is not asked to be
non-blocking. What would be refused on CUDA, such as adding a vector in host memory to one on the device, is
refused as well.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
CPU = torch.device("cpu")
READS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "equal.default",
    "unique",
)


class HostWaitsError(AssertionError):
    """The host would wait for the device here."""


class Pretend(torch.Tensor):
    """A tensor of the pretended device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Pretend:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def pretended_device() -> Iterator[None]:
    """Within, tensors can be made on and moved to the pretended device."""
    with _Mode():
        yield


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = str(func).removeprefix("aten.")
    tensors = [
        x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
    ]
    here = [x for x in tensors if isinstance(x, Pretend)]
    there = [x for x in tensors if not isinstance(x, Pretend)]
    if here and name.startswith(READS):
        raise HostWaitsError(f"{func} reads a value on the device")
    wanted = kwargs.get("device")
    on_device = (
        torch.device(wanted).type == DEVICE.type if wanted is not None else bool(here)
    )
    if name.startswith("_to_copy"):
        if (
            bool(here) != on_device
            and not kwargs.get("non_blocking")
            and not (on_device and _is_kornias())
        ):
            raise HostWaitsError(
                f"a blocking copy of {tuple(tensors[0].shape)} between host and device"
            )
    elif name.startswith("copy_"):
        if (
            here
            and there
            and not (len(args) > 2 and args[2])
            and not kwargs.get("non_blocking")
        ):
            raise HostWaitsError(
                f"a blocking copy of {tuple(tensors[0].shape)} between host and device"
            )
    elif name.startswith(("index.", "index_put")):
        if here and any(
            x.dtype in (torch.bool, torch.uint8) for x in tensors if x is not args[0]
        ):
            raise HostWaitsError(f"{func} with a boolean index")
        if here and [x for x in there if x.ndim]:
            raise HostWaitsError(f"{func} with an index in host memory")
    elif here and any(x.ndim for x in there):
        shapes = [tuple(x.shape) for x in there]
        raise RuntimeError(
            f"{func} got tensors on the device and, of shape {shapes}, on the host"
        )
    if wanted is not None:
        kwargs = {**kwargs, "device": CPU}
    args, kwargs = pytree.tree_map_only(Pretend, lambda x: x.held, (args, kwargs))
    result = func(*args, **kwargs)
    if not on_device:
        return result
    inplace = func._schema.name.endswith("_") or "out" in kwargs

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        if inplace:
            for old in here:
                if old.held is x:
                    return old
        return Pretend(x)

    return pytree.tree_map_only(torch.Tensor, wrapped, result)


def _is_kornias() -> bool:
    """Kornia's helper asks for a non-blocking copy to devices of the type "cuda" only."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name in ("_to_device_nonblocking", "_as_tensor_nonblocking"):
            return True
    return False


def pretend(tensor: torch.Tensor) -> Pretend:
    """The tensor, on the pretended device."""
    return Pretend(tensor)
