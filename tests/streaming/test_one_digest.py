"""One digest of decoded and augmented images, whichever nodes and actors make them, and whatever they lose.

With the extension and without; 1, 2 and 4 threads; blocks of 1, 3 and as many micro-batches as pay; 1 to 3 actors;
four kills, in the soak ten. tests/transform/test_at_once.py has the same of one micro-batch, test_any_plan.py of
plans of all kinds.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import pytest
import ray
import without_ray
from ray import cloudpickle
from signalled import own_processes

from raypipe import kernel
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.digest import iterate_digests
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.spec import StreamSpec

from pictures import picture  # isort: skip
from tiers import is_soak  # isort: skip

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("idle_cluster"),
    pytest.mark.skipif(
        not kernel.available(), reason=f"no kernel: {kernel.why_no_kernel()}"
    ),
    pytest.mark.timeout(900),
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Without = Literal["no actor", "the first actor", "every actor"]
WITHOUT: tuple[Without, ...] = ("no actor", "the first actor", "every actor")
POOLS = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (4, 1)]
"""Threads of an actor, which are its CPUs, and actors, that the cluster of the tests has room for."""


def pictures(num: int, first: int) -> list[bytes | None]:
    """JPEGs of several sizes, a PNG, and a damaged one."""
    images: list[bytes | None] = [
        picture(first + i, *[(40, 60), (90, 70), (64, 64)][i % 3]) for i in range(num)
    ]
    images[1] = cv2.imencode(".png", np.full((50, 70, 3), 99, np.uint8))[1].tobytes()
    images[2] = picture(first + 2)[:-300]
    return images


class Losing(MemoryStore):
    """A store, of which some of the actors that it goes to lose the extension.

    Args:
        folder: where each actor leaves its process id and whether it has the extension; shared by the actors.
        without: who loses it.
        pause_s: that the read of a micro-batch takes, so that a stream is there long enough to be hurt.
    """

    def __init__(
        self, images: list[bytes | None], folder: Path, without: Without, pause_s: float
    ) -> None:
        super().__init__(images, np.arange(len(images)) % 5)
        self._folder, self._without, self._pause_s, self._driver = (
            folder,
            without,
            pause_s,
            os.getpid(),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A worker that is no actor serves other tests, too.
        if self._without == "no actor" or not ray.get_runtime_context().get_actor_id():
            return
        if self._without == "every actor" or self._is_first():
            sys.modules["_raypipe_kernel"] = None  # type: ignore[assignment]  # so that an import of it fails

    def _is_first(self) -> bool:
        path = self._folder / "first"
        try:
            with path.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            # a store of another split has come before
            return path.read_text() == str(os.getpid())
        return True

    def read(
        self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")
    ) -> Any:
        if os.getpid() != self._driver:
            (self._folder / f"{os.getpid()} {kernel.available()}").touch()
            # Not while a restarted actor reads one at a time: it would blame that sample for a second death.
            time.sleep(self._pause_s * (len(indices) > 1))
        return super().read(indices, columns)


def spec_of(folder: Path, without: Without, pause_s: float, **pool: Any) -> StreamSpec:
    stores = [
        Losing(pictures(*part), folder, without, pause_s)
        for part in ((80, 0), (20, 500))
    ]
    transform = TransformConfig(
        train="heavy", val="light", size=32, max_bad_fraction=0.5
    )
    plan = PlanConfig(epochs=3, micro_batch_size=8, global_batch_size=8, seed=7)
    return open_stream(*stores, plan=plan, transform=transform, pool=PoolConfig(**pool))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The digests of the stream that this process makes, with the kernel; the reference's are equal."""
    digests = without_ray.digests(
        spec_of(tmp_path_factory.mktemp("alone"), "no actor", 0)
    )
    assert len(digests) == 3 * (10 + 3)
    assert len(set(digests)) == 3 * 10 + 3  # each validation is the same
    return digests


@contextmanager
def killed(times: int, seed: int) -> Iterator[list[int]]:
    """Within, actors are killed at random moments; gives the process ids of those that were."""
    choose, pids, ended = random.Random(seed), list[int](), threading.Event()

    def kill() -> None:
        while len(pids) < times and not ended.wait(choose.uniform(0.1, 0.7)):
            if actors := sorted(
                set(own_processes("MapWorker(MapBatches(Transform")) - set(pids)
            ):
                pids.append(choose.choice(actors))
                os.kill(pids[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield pids
    finally:
        ended.set()
        killer.join()


def digests_of(
    folder: Path,
    without: Without,
    threads: int,
    actors: int,
    block: int,
    kills: int = 0,
) -> list[bytes]:
    """Of the stream that such actors make; checks that they were such."""
    folder.mkdir()
    spec = spec_of(
        folder,
        without,
        0.25 if kills else 0.02,
        min_actors=actors,
        cpus_per_actor=threads,
        micro_batches_per_block=block,
    )
    assert spec.pool.kernel_threads == threads
    start = spec.plan.start()
    with killed(kills, seed=actors) as pids:
        iterators = splits(spec, start, max_actors=actors)
        digests = [one.digest for one in iterate_digests(spec.plan, start, iterators)]
    has_extension = {path.name.partition(" ")[2] for path in folder.glob("* *")}
    assert has_extension <= {"no actor": {"True"}, "every actor": {"False"}}.get(
        without, {"True", "False"}
    )
    assert has_extension and len(pids) == kills
    return digests


def test_one_digest_with_or_without_kernel_for_any_threads_and_actors(
    alone: list[bytes], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cases: list[tuple[Without, tuple[int, int], int]] = [
        ("no actor", (1, 3), 3),
        ("the first actor", (2, 2), 1),
        ("every actor", (4, 1), 0),
    ]
    if is_soak(request.config):
        cases = list(itertools.product(WITHOUT, POOLS, (1, 3, 0)))
    for number, (without, (threads, actors), block) in enumerate(cases):
        found = digests_of(tmp_path / str(number), without, threads, actors, block)
        assert found == alone, (without, threads, actors, block)


@pytest.mark.parametrize(
    ("without", "block"),
    [
        ("the first actor", 1),
        *[
            pytest.param("no actor", block, marks=pytest.mark.soak)
            for block in (1, 3, 0)
        ],
        *[
            pytest.param("every actor", block, marks=pytest.mark.soak)
            for block in (1, 3, 0)
        ],
    ],
)
def test_kills_change_nothing(
    alone: list[bytes],
    tmp_path: Path,
    without: Without,
    block: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    # more than there are actors; an actor that is restarted takes a second and a half of CPU
    kills = 10 if is_soak(request.config) else 4
    # all may hit one block
    monkeypatch.setattr("raypipe.streaming.supervisor.MAX_ATTEMPTS", kills + 1)
    assert digests_of(tmp_path / "killed", without, 1, 3, block, kills) == alone
