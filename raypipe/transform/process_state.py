"""State that the threads of a process share: random generators, and the number of OpenCV's threads.

seed_process   before user code that draws from the generators: its draws depend only on the key. If that code is
               the first to import torch, torch is seeded as it is imported
process_kept   around work in a process that is also the user's: the state is put back
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from raypipe.kernel import cv2

_MAX_SEED = 0x7FFFFFFF  # OpenCV's seeds are C ints
_SEEDS: Any = (0, _MAX_SEED)

_drawing = threading.RLock()  # held by the one thread that seeds the generators
_counting = threading.Lock()
_num_within = 0
_num_threads = 1


class _TorchWatch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as it is imported, and seeds it behind its import by the key that a thread has last seeded with.

    Attributes:
        key: thread and seed of a sample; None = no work of raypipe's is under way.
        state: of torch's generator as it was imported; None = it has not been.
    """

    def __init__(self) -> None:
        self.key: tuple[int, int] | None = None  # (thread, seed)
        self.state: Any = None
        self._loader: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "torch":
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self.state = module.default_generator.get_state()
        if self.key is not None and self.key[0] == threading.get_ident():
            module.default_generator.manual_seed(self.key[1])


_watch = _TorchWatch()


def seed_process(k0: int, k1: int) -> None:
    """Seed the generators of OpenCV, Python, NumPy and torch by two integers in [0, 2^64); takes 20 to 55 µs."""
    np.random.seed((k0 & 0xFFFFFFFF, k0 >> 32, k1 & 0xFFFFFFFF, k1 >> 32))
    _seed_others(k0, k1)


def seed_for_item(k0: int, k1: int) -> None:
    """As `seed_process`, with 32 of the bits for NumPy, since small items take no longer than these seeds."""
    np.random.seed(k1 & 0xFFFFFFFF)
    _seed_others(k0, k1)


def seed_cheaply(k0: int) -> None:
    """Seed the generators of OpenCV and torch; takes 2 µs."""
    seed_opencv(k0)
    # None while torch is being imported
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        # not torch.manual_seed, which goes to the GPUs as well
        generator.manual_seed(k0)
        return
    _watch.key = threading.get_ident(), k0
    if _watch not in sys.meta_path:
        sys.meta_path.insert(0, _watch)


def costly_states() -> Any:
    """Return the states of Python's and NumPy's generators, which take longest to seed, to compare them."""
    of_numpy: Any = np.random.get_state(legacy=False)
    words = of_numpy["state"]
    drawn = words["key"].tobytes(), words["pos"], of_numpy["gauss"]
    return random.getstate(), drawn


def _seed_others(k0: int, k1: int) -> None:
    random.seed(k0 << 64 | k1)
    seed_cheaply(k0)


def seed_opencv(seed: int) -> None:
    """Seed the generator of OpenCV by an integer in [0, 2^64)."""
    if cv2 is not None:
        cv2.setRNGSeed(seed & _MAX_SEED)


@contextlib.contextmanager
def process_kept(generators: bool = True) -> Iterator[None]:
    """Run OpenCV in one thread, as an actor does; then put back its threads, and the generators' states.

    OpenCV does not expose the state of its generator, one per thread: it is left at a seed drawn from itself.

    Args:
        generators: the work draws from those of Python, NumPy and torch. Putting them back takes 0.1 ms.
    """
    nothing = contextlib.nullcontext()
    with (
        _opencv_kept() if cv2 else nothing,
        _generators_kept() if generators else nothing,
    ):
        yield


@contextlib.contextmanager
def _opencv_kept() -> Iterator[None]:
    global _num_within, _num_threads
    with _counting:
        if not _num_within:
            _num_threads = cv2.getNumThreads()
            cv2.setNumThreads(1)
        _num_within += 1
    seed = int(cv2.randu(np.zeros(1, np.int32), *_SEEDS).item())
    try:
        yield
    finally:
        cv2.setRNGSeed(seed)
        with _counting:
            _num_within -= 1
            if not _num_within:
                cv2.setNumThreads(_num_threads)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    with _drawing:
        torch = sys.modules.get("torch")
        of_python = random.getstate()
        of_numpy = np.random.get_state(legacy=False)
        of_torch = torch.default_generator.get_state() if torch is not None else None
        try:
            yield
        finally:
            _watch.key = None
            _watch.remove()
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            if torch is None and "torch" in sys.modules:
                of_torch = _watch.state
            if of_torch is not None:
                sys.modules["torch"].default_generator.set_state(of_torch)
