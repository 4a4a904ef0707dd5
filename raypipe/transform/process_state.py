"""State that the threads of a process share: random generators, and the threads of OpenCV and torch.

seed_process     before user code that draws from the generators: its draws depend only on the key
drawn            around both: code that is the first to import torch, which no seed has reached, is called again
process_kept     around work in a process that is also the user's: the state is put back
use_one_thread   in a process of its own: sums of torch depend on its number of threads
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from raypipe.kernel import cv2

_MAX_SEED = 0x7FFFFFFF  # OpenCV's seeds are C ints
_RANGE: Any = (0, _MAX_SEED)
_SEED_OF_TORCH = 67280421310721  # with which its generator is imported
_T = TypeVar("_T")

_drawing = threading.RLock()  # held by the one thread that seeds the generators
_counting = threading.Lock()
_num_within = 0
_num_threads = 1


def seed_process(k0: int, k1: int) -> None:
    """Seed the generators of OpenCV, Python, NumPy and torch by two integers in [0, 2^64); takes 20 to 55 µs."""
    seed_opencv(k0)
    _seed_python(k0, k1)
    _seed_torch(k0, k1)
    np.random.seed((k0 & 0xFFFFFFFF, k0 >> 32, k1 & 0xFFFFFFFF, k1 >> 32))


def seed_for_item(k0: int, k1: int) -> None:
    """As `seed_process`, with 32 of the bits for NumPy, since small items take no longer than these seeds."""
    for seed in _SEEDS.values():
        seed(k0, k1)


def seed_opencv(k0: int, k1: int = 0) -> None:
    """Seed the generator of OpenCV by an integer in [0, 2^64)."""
    if cv2 is not None:
        cv2.setRNGSeed(k0 & _MAX_SEED)


def _seed_python(k0: int, k1: int) -> None:
    random.seed(k0 << 64 | k1)


def _seed_numpy(k0: int, k1: int) -> None:
    np.random.seed(k1 & 0xFFFFFFFF)


def _seed_torch(k0: int, k1: int) -> None:
    of_torch = torchs_generator()
    if of_torch is not None:
        # not torch.manual_seed, which goes to the GPUs as well
        of_torch.manual_seed(k0)


_SEEDS = {
    "opencv": seed_opencv,
    "python": _seed_python,
    "numpy": _seed_numpy,
    "torch": _seed_torch,
}


class SeedsOfItems:
    """Seeds of the process's generators for items: of those that items draw from, which is seen afterwards."""

    def __init__(self) -> None:
        # code may ask torch for its seed, which is no draw
        self._drawn = {"torch"}

    def seed(self, k0: int, k1: int) -> None:
        """Seed them for an item."""
        for name in self._drawn:
            _SEEDS[name](k0, k1)

    def made(self, make: Callable[[], _T]) -> _T:
        """Return what a function makes that calls `seed` for each item; again, if items draw from further ones."""
        while True:
            made, names = with_draws(make)
            if names <= self._drawn:
                return made
            self._drawn |= names


def torchs_generator() -> Any:
    """Return torch's generator; None while torch is not imported as a whole."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def drawn(make: Callable[[], _T]) -> _T:
    """Return what a function makes that seeds the process first; one that imports torch is called twice."""
    had_torch = "torch" in sys.modules
    made = make()
    if had_torch or "torch" not in sys.modules:
        return made
    return make()


def with_draws(make: Callable[[], _T]) -> tuple[_T, set[str]]:
    """Return what a function makes, and the names of the generators that it has drawn from, or seeded.

    Other numbers after the same seed show that somebody has drawn in between.
    """
    seed_for_item(0, 0)
    expected = _next_draws()
    seed_for_item(0, 0)
    made = make()
    draws = _next_draws()
    return made, {name for name in draws if draws[name] != expected.get(name)}


def _next_draws() -> dict[str, float]:
    draws = {"python": random.random(), "numpy": np.random.random_sample()}
    if cv2 is not None:
        draws["opencv"] = _drawn_of_opencv()
    of_torch = torchs_generator()
    if of_torch is not None:
        torch = sys.modules["torch"]
        draws["torch"] = torch.rand((), dtype=torch.float64, generator=of_torch).item()
    return draws


def _drawn_of_opencv() -> int:
    return int(cv2.randu(np.zeros(1, np.int32), *_RANGE).item())


def use_one_thread() -> None:
    """Run OpenCV, and torch from this thread, in one thread: their own number is one per core."""
    if cv2 is not None:
        cv2.setNumThreads(1)
    if torchs_generator() is not None:
        sys.modules["torch"].set_num_threads(1)


@contextlib.contextmanager
def process_kept(generators: bool = True) -> Iterator[None]:
    """Run OpenCV in one thread, as an actor does; then put back its threads, and the generators' states.

    OpenCV does not expose the state of its generator, one per thread: it is left at a seed drawn from itself.

    Args:
        generators: the work draws from those of Python, NumPy and torch. To put them back takes 0.1 ms. torch has
            one thread then, too.
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
    seed = _drawn_of_opencv()
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
        of_torch = torchs_generator()
        of_python = random.getstate()
        of_numpy = np.random.get_state(legacy=False)
        state = None if of_torch is None else of_torch.get_state()
        try:
            with torch_in_one_thread():
                yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            if of_torch is not None:
                of_torch.set_state(state)
            elif (imported := torchs_generator()) is not None:
                imported.manual_seed(_SEED_OF_TORCH)


@contextlib.contextmanager
def torch_in_one_thread() -> Iterator[None]:
    """Run torch from this thread in one thread, if it is imported; then as before."""
    if torchs_generator() is None:
        yield
        return
    torch = sys.modules["torch"]
    # of this thread; the number of threads that begin meanwhile would be 1
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
