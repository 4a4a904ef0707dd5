"""What one micro-batch gives to the device, counted on a CPU: operations, and passes over images.

    python benchmarks/budgets.py                       # counts, and milliseconds of the host
    python benchmarks/budgets.py --rows 256 --size 224

    operations    calls of torch's operators, those that only view a tensor left out; on a GPU most are a launch
                  each. Draws on the host are among them
    passes        those of them that read or write a tensor of at least as many elements as the images have
    images moved  what all of them read and write, in bytes, over the bytes of the images in float32
    host ms       a call's median time on this CPU, with images so small that the arithmetic hardly counts

The last line is JSON.
`tests/device/test_budgets.py` holds the counts against the table in benchmarks/results/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment
from raypipe.train.models import build_model
from raypipe.train.ordered import StepBatchNorm

CPU = torch.device("cpu")
# Memory that nothing has been written to.
_ALLOCATES = ("aten.empty", "aten.new_empty")


@dataclass(frozen=True)
class Budget:
    """What one micro-batch takes; see the module."""

    operations: int
    passes: int
    images_moved: float


class Counted(TorchDispatchMode):
    """Counts the operations that run within it.

    Args:
        image_elements: of the images; 0 = there are none.

    Attributes:
        operations, passes: name → count.
        bytes_moved: read and written.
    """

    def __init__(self, image_elements: int = 0) -> None:
        super().__init__()
        self.operations = Counter[str]()
        self.passes = Counter[str]()
        self.bytes_moved = 0
        self._image_elements = image_elements

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or name.startswith(_ALLOCATES):
            return result
        self.operations[name] += 1
        leaves = pytree.tree_leaves((args, kwargs, result))
        # One that is written in place, or given as `out`, is among both arguments and results.
        tensors = {
            id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)
        }.values()
        if self._image_elements and any(
            tensor.numel() >= self._image_elements for tensor in tensors
        ):
            self.passes[name] += 1
        self.bytes_moved += sum(
            _elements(tensor) * tensor.element_size() for tensor in tensors
        )
        return result

    def budget(self) -> Budget:
        if self._image_elements:
            moved = self.bytes_moved / (4 * self._image_elements)
        else:
            moved = 0.0
        return Budget(self.operations.total(), self.passes.total(), round(moved, 1))


def _elements(tensor: torch.Tensor) -> int:
    """Those in memory: along a stride of 0 there is one."""
    sizes = [
        size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if stride
    ]
    return int(np.prod(sizes))


def augmented(rows: int, size: int, **config: Any) -> Callable[[int], Any]:
    """Runs a configuration on one micro-batch of a seed."""
    pixels = np.random.default_rng(0).integers(0, 256, (rows, size, size, 3), np.uint8)
    image = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    target = torch.arange(rows)
    augment = DeviceAugment(AugmentConfig(**config), CPU)
    counts = np.ones(rows, bool)
    return lambda seed: augment(image, target, counts, seed=seed)


def batch_norm(model: str, device: str) -> Callable[[int], Any]:
    """The statistics of a step of one micro-batch, without the model's own forward."""
    with torch.device(device):
        statistics_of = StepBatchNorm(build_model(model, 10).train(), 1, 1)

    def step(seed: int) -> None:
        statistics_of.begin()
        statistics_of.take()
        statistics_of.end()

    return step


CONFIGS: dict[str, dict[str, Any]] = {
    "none": {},
    "MixUp": {"mixup_alpha": 0.4},
    "CutMix": {"cutmix_alpha": 1.0},
    "light": {"preset": "light"},
    "standard": {"preset": "standard"},
    "strong": {"preset": "strong"},
}


def counted(part: Callable[[int], Any], image_elements: int = 0) -> Budget:
    """The counts of a call that is not the first."""
    part(0)
    with Counted(image_elements) as seen:
        part(0)
    return seen.budget()


def budgets(rows: int = 8, size: int = 32) -> Iterator[tuple[str, Budget]]:
    """The name and the counts of each part."""
    for name, config in CONFIGS.items():
        yield name, counted(augmented(rows, size, **config), rows * size * size * 3)
    # Nothing is computed on "meta": the counts are the same.
    yield "statistics of ResNet-50", counted(batch_norm("resnet50", "meta"))


def host_ms(part: Callable[[int], Any], calls: int = 60) -> float:
    took = []
    for seed in range(calls):
        started = time.perf_counter()
        part(seed)
        took.append(1000 * (time.perf_counter() - started))
    return statistics.median(took[calls // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8, help="images in a micro-batch")
    parser.add_argument(
        "--size", type=int, default=32, help="side of the images, pixels"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        name: augmented(args.rows, args.size, **config)
        for name, config in CONFIGS.items()
    }
    parts["statistics of ResNet-50"] = batch_norm("resnet50", "cpu")
    found = {}
    print("| of one micro-batch | operations | passes | images moved | host ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, budget in budgets(args.rows, args.size):
        found[name] = [*astuple(budget), round(host_ms(parts[name]), 2)]
        print(f"| {name} | {' | '.join(map(str, found[name]))} |", flush=True)
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "rows": args.rows,
                "size": args.size,
                "found": found,
            }
        )
    )


if __name__ == "__main__":
    main()
