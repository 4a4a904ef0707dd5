"""A CUDA device that is not there, for the bodies of tests/gpu: their code runs, with its results, on the host.

It is the device of simulated_cuda.py, but for the order: an operation is done as soon as it is launched, so any
code may use it, with threads of its own. What it shows are mistakes of calls: of names and arguments that have
changed, of tensors that are on different devices, of a host that would wait where it must not, of streams that
nothing orders (torch's sanitizer judges them). What cannot run here is in `UNLIKE`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import simulated_cuda
import torch
import torch.distributed.tensor  # which an optimizer imports, and cannot while torch.Generator is pretended
from simulated_cuda import CUDA, Cuda, Stream, mapped, memory_of, tensors_of
from tiers import is_soak

from raypipe.device import ring

# Test, or module of tests → why it cannot run here.
UNLIKE = {
    "test_loop_gpu": "runs in processes of Ray, which have no pretended device",
    "test_loader_gpu": "runs in processes of Ray, which have no pretended device",
    "test_two_ranks_learn_what_one_does": "its processes have no pretended device",
    "test_a_compiled_model_learns_what_the_plain_one_does": "a compiler makes kernels of the CPU for it",
    "test_nccl_refuses_two_ranks_of_one_device": "its processes have no pretended device",
    "test_pinned_memory_is_what_the_page_says": "torch's allocator of pinned memory is not imitated",
    "test_a_device_that_has_drained_is_told_from_one_at_work[True]": "it is never busy",
    "test_a_state_is_saved_as_of_its_step_though_the_device_is_behind": (
        "the tensors have no storage on the device"
    ),
}
# Operations by which the host reads a value of the device, and so waits for it.
READS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "equal.default",
    "unique",
)
# Those that take more than some seconds here.
LONG = {
    "test_repeated_and_resumed_runs_end_with_the_same_bits",
    "test_an_fp16_overflow_in_the_very_first_step_leaves_no_trace",
    "test_a_checkpoint_learns_the_same_on_cpu_and_gpu_to_rounding",
}
# On CUDA these take indices that are in host memory.
_TAKES_HOST = (
    "aten.copy_",
    "aten._to_copy",
    "aten.index.",
    "aten.index_put",
    "aten._has_compatible",
)


HAS_CUDA = torch.cuda.is_available()


def skip_what_cannot_run(items: list[pytest.Item]) -> None:
    """Of what takes long, and of tests with many parameters, all run with --tier soak."""
    of_test: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        of_test.setdefault(
            (Path(item.path).stem, getattr(item, "originalname", "")), []
        ).append(item)
    for (module, name), found in of_test.items():
        long = (
            [] if is_soak(found[0].config) else found if name in LONG else found[1:-1]
        )
        for item in found if not HAS_CUDA else ():
            if (
                reason := UNLIKE.get(item.name)
                or UNLIKE.get(name)
                or UNLIKE.get(module)
            ):
                item.add_marker(
                    pytest.mark.skip(reason=f"needs a CUDA device: {reason}")
                )
            elif item in long:
                item.add_marker(
                    pytest.mark.skip(
                        reason="long without a CUDA device: run with --tier soak"
                    )
                )


class Tensor(simulated_cuda.Tensor):
    """Also as a parameter: copied, saved and loaded."""

    def __deepcopy__(self, memo: Any) -> Any:
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.cpu().detach().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='{CUDA}')"

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first"
        )


class EagerCuda(Cuda):
    """Attributes: waiting_is_an_error, as torch.cuda.set_sync_debug_mode("error") says."""

    tensor_type = Tensor

    def __init__(self) -> None:
        self._lock = threading.RLock()
        super().__init__(0)
        self.host = SimpleNamespace(pause=self._pause)  # type: ignore[assignment]
        self.waiting_is_an_error = False
        self.num_allocated = self.num_pinned = 0
        self._graph: Graph | None = None

    def _pause(self, until: Callable[[], bool] | None = None) -> None:
        """Do all that has been launched."""
        with self._lock:
            while self._advance(True):
                pass
            assert until is None or until()

    def tell(self, what: str, *numbers: int) -> None:
        with self._lock:
            super().tell(what, *numbers)

    def launch(
        self,
        stream: Stream,
        run: Callable[[], Any],
        reads: set[int],
        writes: set[int],
        name: str,
    ) -> None:
        with self._lock:
            if self._graph is not None and self.is_capturing():
                self._graph.operations.append(run)
            else:
                super().launch(stream, run, reads, writes, name)

    def allocate(self, like: torch.Tensor) -> Any:
        with self._lock:
            self.num_allocated += 1
            made = super().allocate(like)
            if self._graph is not None and self.is_capturing():
                self._graph.memory.append(made)
            return made

    def choose(self, fitting: list[Any]) -> Any:
        return min(fitting, key=lambda block: block.num_bytes)

    def _freed(self, block: Any) -> None:
        with self._lock:
            super()._freed(block)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_pinned += 1
        return super().pin(tensor)

    def host_waits(self, name: str) -> None:
        if self.waiting_is_an_error:
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")

    def _operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, leaves = str(func), list(tensors_of((args, kwargs)))
        if any(
            not isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves
        ) and not name.startswith(_TAKES_HOST):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, cuda:0 and cpu, in {name}"
            )
        masks = name.startswith("aten.index") and any(
            each.dtype in (torch.bool, torch.uint8) for each in tensors_of(args[1:2])
        )
        if masks or any(read in name for read in READS):
            self.host_waits(name)
        if _writes(func):
            result = super()._operation(func, args, kwargs)  # type: ignore[misc]
            one = (
                result[0]
                if isinstance(result, tuple) and len(func._schema.returns) == 1
                else result
            )
            return one if func._schema.returns else None
        # Once, unlike there: some write to what their schema does not say (native_batch_norm).
        here = {
            key: value
            for key, value in kwargs.items()
            if key not in ("device", "pin_memory")
        }
        given, given_named = mapped(memory_of, (args, here))
        in_float = name.startswith("aten.convolution") and args[0].dtype == torch.half

        def computed() -> Any:
            with torch.no_grad():
                if in_float:  # a CPU's convolution in fp16 takes a second; CUDA's adds up in float32, too
                    floats, named = mapped(torch.Tensor.float, (given, given_named))
                    return mapped(torch.Tensor.half, func(*floats, **named))
                return func(*given, **given_named)

        made: list[Any] = []

        def placed(value: torch.Tensor) -> Any:
            made.append(self.allocate(value))
            made[-1].memory.copy_(value)
            return made[-1]

        result = mapped(placed, computed())
        places = [each.memory for each in made]

        def again() -> None:
            for place, value in zip(places, tensors_of(computed()), strict=True):
                place.copy_(value)

        reads = {each.handle.number for each in leaves if isinstance(each, Tensor)}
        # done already; a graph does it anew
        run = again if self.is_capturing() else lambda: None
        self.launch(
            self.current(), run, reads, {each.handle.number for each in made}, name
        )
        return result

    # Graphs

    def _not_captured(self, what: str) -> None:
        if not (self.is_capturing() and what == "memory is taken"):
            # from the graph's own pool
            super()._not_captured(what)

    @contextlib.contextmanager
    def graph(
        self, graph: Graph, capture_error_mode: str = "global", **_: Any
    ) -> Iterator[None]:
        self._graph = graph
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self, "_capturing", None)
            stack.callback(setattr, self, "_graph", None)
            stack.enter_context(self.capture(capture_error_mode))
            yield

    # The rest of torch.cuda

    def _names(self) -> dict[str, Any]:
        return {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "get_device_name": lambda *_: "a pretended device",
            "_sleep": lambda cycles: None,
            "utilization": lambda *_: 40,
            "graph": self.graph,
            "CUDAGraph": Graph,
            "set_sync_debug_mode": lambda mode: setattr(
                self, "waiting_is_an_error", mode == "error"
            ),
            "memory_stats": lambda *_: {"allocation.all.allocated": self.num_allocated},
            "host_memory_stats": lambda: {"active_requests.allocated": self.num_pinned},
            "memory_reserved": lambda *_: self.num_bytes,
            "memory_allocated": lambda *_: self.num_bytes,
            "mem_get_info": lambda *_: (1 << 30, 2 << 30),
            "default_generators": (torch.default_generator,),
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        autocast, generator = torch.autocast, torch.Generator

        def on_host(device_type: str, *args: Any, **options: Any) -> Any:
            return autocast("cpu", *args, **options)

        grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

        def by_device(tensors: Any, *args: Any) -> Any:
            """torch takes all tensors of Python's for the host's."""
            ours = any(isinstance(each, Tensor) for each in tensors_of(tensors))
            return {
                (CUDA if ours else of[0], of[1]): found
                for of, found in grouped(tensors, *args).items()
            }

        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        with contextlib.ExitStack() as stack:
            stack.enter_context(super().installed())
            ring._copy_stream.cache_clear()
            stack.callback(ring._copy_stream.cache_clear)
            stack.enter_context(mock.patch.multiple(torch.cuda, **self._names()))
            stack.enter_context(mock.patch.object(torch, "autocast", on_host))
            stack.enter_context(
                mock.patch.object(torch, "Generator", lambda device="cpu": generator())
            )
            for module in ("torch.optim.optimizer", "torch.nn.utils.clip_grad"):
                stack.enter_context(
                    mock.patch.object(
                        sys.modules[module],
                        "_group_tensors_by_device_and_dtype",
                        by_device,
                    )
                )
            # It would ask the driver.
            health = "_accelerator_graph_capture_health_check"
            stack.enter_context(
                mock.patch.object(
                    torch.optim.Optimizer, health, lambda *_: None, create=True
                )
            )
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            stack.callback(
                torch.__future__.set_overwrite_module_params_on_conversion, overwrite
            )
            yield


@functools.cache
def _writes(func: Any) -> bool:
    return any(
        each.alias_info is not None and each.alias_info.is_write
        for each in func._schema.arguments
    )


class Graph:
    """Attributes: operations, launched while it was captured; memory, which is no other's from then on."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], Any]] = []
        self.memory: list[Tensor] = []

    def replay(self) -> None:
        for run in self.operations:
            run()
