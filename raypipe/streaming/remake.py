"""Makes the first samples of a split twice, to find a user's code whose results depend on more than the sample.

A transform's draws are seeded, as far as its generators are found. Other state (a counter, a running statistic, a
generator made from the clock, a buffer that threads share) shows itself where the same samples are made again in
another copy of the transform, last first, and, where threads share its module, by several of them at once.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import platform
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import ConfigError, SampleError
from raypipe.plan.places import Sides, Split
from raypipe.transform.fields import COLUMN
from raypipe.transform.samples import EncodedSample

NUM_REMADE = 4
_NUM_REPEATS = 3
_NUM_ROUNDS = 8  # each thread makes all samples so many times
_LONGEST_S = 0.2  # after one round, for slow transforms
_SWITCH_S = 1e-5  # as often as Python can change the thread that runs

MadeSample = Mapping[str, Any]
"""The fields of one sample."""


@dataclass(frozen=True)
class Probe:
    """A sample as one process has made it, for others to compare.

    Attributes:
        of: split and size of image that it was made for.
        sample, key: the stored sample and its key.
        digest: hash of its fields.
        strength: transform.strength, where it was made.
        machine: model of the processor, on which pixels of libraries depend.
    """

    of: tuple[Split, int | Sides]
    sample: EncodedSample
    key: tuple[int, int]
    digest: str
    strength: float = 1.0
    machine: str = field(default_factory=lambda: processor())


def processor() -> str:
    """The model of this machine's processor."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        return next(
            (
                line.split(":")[1].strip()
                for line in lines
                if line.startswith("model name")
            ),
            "",
        )
    return platform.processor()


def digest_of(sample: MadeSample) -> str:
    """A hash of a sample's fields."""
    content = hashlib.blake2b(digest_size=16)
    for name, value in sorted(sample.items()):
        if isinstance(value, np.ndarray):
            array = value
        else:
            array = np.frombuffer(repr(value).encode(), np.uint8)
        content.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return content.hexdigest()


def check_probe(probe: Probe, digest: str, title: str) -> str:
    """Compare a sample of another process with what this process makes of it.

    Returns:
        A warning if it differs and the processors do, too; else nothing.

    Raises:
        ConfigError: it differs, on processors of the same model.
    """
    if digest == probe.digest:
        return ""
    if probe.machine != processor():
        return f"{title} makes other pixels on {processor()} than on {probe.machine}"
    cause = "two processes differ, so its results depend on the process (hash() of a text, what it made first, …)"
    raise _depends(title, "a field", cause)


def copied(code: Any) -> Any:
    """A copy of a user's code with its own state, as far as it can be copied; else the code itself."""
    if isinstance(code, types.FunctionType) and code.__closure__:
        cells = tuple(types.CellType(copied(content)) for content in _contents(code))
        twin = types.FunctionType(
            code.__code__, code.__globals__, code.__name__, code.__defaults__, cells
        )
        twin.__kwdefaults__ = code.__kwdefaults__
        twin.__dict__ = dict(code.__dict__)
        return functools.update_wrapper(twin, code, updated=())
    if isinstance(code, Mapping):
        return {name: copied(value) for name, value in code.items()}
    if isinstance(code, list | tuple):
        if type(code) in (list, tuple):
            return type(code)(map(copied, code))
        return code
    try:
        return copy.deepcopy(code)
    except Exception:  # a lock, an open file, …
        return code


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is bound later
            yield None


def check_remade(
    first: Sequence[MadeSample],
    maker: Callable[[], Callable[[int], MadeSample]],
    title: str,
    num_threads: int = 1,
) -> None:
    """Compare samples with what copies of the code make of them, last first, and by several threads at once.

    Args:
        first: the samples as the stream has made them.
        maker: makes a copy of the code, as a function that makes the sample with a number in `first`.
        title: name of the transform, for errors.
        num_threads: threads of this process that will make samples at once.

    Raises:
        ConfigError: they differ.
    """
    numbers = range(len(first))
    try:
        make = maker()
        again = {number: make(number) for number in reversed(numbers)}
        for number in numbers:
            if name := _differing(first[number], again[number]):
                cause = _cause(maker())
                if num_threads > 1:  # they have made the first samples
                    cause += f", or {_in_the_way(num_threads)}"
                raise _depends(title, name, cause)
        if num_threads > 1:
            _check_threads(first, maker, title, num_threads)
    except SampleError:  # the stream's own errors say what such a sample is
        return


def _differing(first: MadeSample, second: MadeSample) -> str:
    """The name of a field that differs; empty: none does."""
    for name in first:
        if name not in second or not _is_equal(first[name], second[name]):
            return name
    return ""


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and first.tobytes() == second.tobytes()
        )
    return type(first) is type(second) and bool(first == second)


def _cause(make: Callable[[int], MadeSample]) -> str:
    """Describe the cause, by a copy that makes one sample again and again: draws may be equal by chance."""
    first = make(0)
    if any(_differing(first, make(0)) for _ in range(_NUM_REPEATS)):
        return (
            "the same sample made twice in a row differs, so it keeps state "
            "from call to call, or draws elsewhere"
        )
    return "its results change with the samples that it has made before, so it keeps state of them"


def _depends(title: str, field: str, cause: str) -> ConfigError:
    code_name = "make_columns" if field.startswith(f"{COLUMN}.") else title
    return ConfigError(
        f"{code_name} does not make the same of the same sample: {cause} ({field} differs). Let it take an "
        "argument `rng`, and draw from that alone, or from the generators of random, numpy and torch, which "
        "raypipe seeds for each sample; make generators and pipelines outside of the call; and keep no "
        "counter, buffer or statistic from sample to sample (docs/reproducibility.md)"
    )


def _check_threads(
    first: Sequence[MadeSample],
    maker: Callable[[], Callable[[int], MadeSample]],
    title: str,
    num_threads: int,
) -> None:
    failures: list[str | BaseException] = []
    together = threading.Barrier(num_threads)

    def work(make: Callable[[int], MadeSample], offset: int) -> None:
        try:
            together.wait()
            end_s = time.monotonic() + _LONGEST_S
            for turn in range(_NUM_ROUNDS * len(first)):
                if turn >= len(first) and time.monotonic() > end_s:
                    return
                number = (turn + offset) % len(first)
                if name := _differing(first[number], make(number)):
                    failures.append(name)
                    return
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(maker(), offset))
        for offset in range(num_threads)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for failure in failures:
        if isinstance(failure, BaseException):
            raise failure
        raise _depends(title, failure, _in_the_way(num_threads))


def _in_the_way(num_threads: int) -> str:
    return f"{num_threads} threads that run it at once get in each other's way (a shared buffer?)"
