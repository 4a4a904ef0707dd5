"""One rank of each loader, as its documentation sets one up: what `compare.py` runs.

A rank function takes a Case and gives each of the rank's batches, a list of (number of the sample, its random
draw), and its state after it. `transformed` stands for an augmentation: a user's code that draws from the usual
generators, or from the one that the loader hands it. Each loader is imported where it is used.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCES = {"many": range(0, 144), "few": range(1000, 1048)}
"""Two sources: a mixture of 3 to 1 uses up both at once."""
BATCH = 16
STEPS = 9  # the global batch; steps of an epoch of the first source
SEED = 1
Batch = list[tuple[int, float]]


@dataclass(frozen=True)
class Case:
    """What one rank does.

    Attributes:
        folder: of this run's records.
        data: folder of the sources, in each loader's format.
        rank, world: of how many.
        workers: processes that a rank starts for its CPU work.
        mixed: both sources, 3 to 1, instead of the first one.
        states: those of all ranks of the run that stopped; empty = from the beginning.
        steps: after so many this one stops.
        kills: kill a CPU worker after the second batch.
        slow_s: seconds that each sample takes.
    """

    folder: Path
    data: Path
    rank: int = 0
    world: int = 1
    workers: int = 2
    mixed: bool = False
    states: list[Any] = field(default_factory=list)
    steps: int | None = None
    kills: bool = False
    slow_s: float = 0.0

    @property
    def sources(self) -> list[str]:
        return [*SOURCES] if self.mixed else ["many"]

    @property
    def own_state(self) -> Any:
        """The state that this rank saved; of another rank, where there are more of them now."""
        if self.states:
            return self.states[self.rank % len(self.states)]
        return None

    def taken(self, batches: Iterable[Any]) -> Iterator[Any]:
        for number, batch in enumerate(itertools.islice(batches, self.steps), 1):
            yield batch
            if self.kills and number == 2:
                kill_a_worker(self.folder)


def note_worker(folder: Path) -> None:
    """Record that this process does CPU work, and on which node of a cluster."""
    node = os.environ.get("RAY_NODE_ID", "")
    (folder / "workers").mkdir(exist_ok=True)
    (folder / "workers" / str(os.getpid())).write_text(f"{os.getppid()} {node}")


def kill_a_worker(folder: Path) -> None:
    """SIGKILL for one of the processes that have transformed samples, but never for this one."""
    import contextlib
    import signal

    for record in sorted(
        (folder / "workers").iterdir(),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    ):
        pid = int(record.name)
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                (folder / "killed").write_text(str(pid))
                return


def transformed(case: Case, number: int, rng: Any = None) -> tuple[int, float]:
    """A sample after its random transform, which draws from torch's generator, or from the one that is given."""
    note_worker(case.folder)
    time.sleep(case.slow_s)
    if rng is not None:
        return int(number), float(rng.random())
    import torch

    return int(number), float(torch.rand(()))


class Numbers:
    """A map-style dataset of torch."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._numbers = [number for name in case.sources for number in SOURCES[name]]

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, at: int) -> tuple[int, float]:
        return transformed(self._case, self._numbers[at])


def _pairs(batch: Any) -> Batch:
    """From what torch's collate makes of pairs."""
    numbers, draws = batch
    return list(zip(numbers.tolist(), draws.tolist(), strict=True))


def dataloader(case: Case) -> Iterator[tuple[Batch, Any]]:
    """PyTorch's, with its DistributedSampler; a mixture is a WeightedRandomSampler's, on one rank."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

    dataset: Any = Numbers(case)
    sampler: Any = DistributedSampler(
        dataset, case.world, case.rank, shuffle=True, seed=SEED, drop_last=True
    )
    if case.mixed:
        weights = [3 / len(SOURCES["many"])] * len(SOURCES["many"]) + [
            1 / len(SOURCES["few"])
        ] * len(SOURCES["few"])
        sampler = WeightedRandomSampler(weights, len(dataset) // case.world)
    options: dict[str, Any] = {
        "batch_size": BATCH // case.world,
        "num_workers": case.workers,
        "drop_last": True,
    }
    loader = DataLoader(
        dataset,
        sampler=sampler,
        generator=torch.Generator().manual_seed(SEED),
        **options,
    )
    if case.states:
        raise NotImplementedError(
            f"DataLoader has no state: {[n for n in dir(loader) if 'state' in n]}"
        )
    for batch in case.taken(map(_pairs, loader)):
        yield batch, None


def stateful_dataloader(case: Case) -> Iterator[tuple[Batch, Any]]:
    """torchdata's StatefulDataLoader, which replaces PyTorch's."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    dataset: Any = Numbers(case)
    sampler: Any = StatefulDistributedSampler(
        dataset, case.world, case.rank, True, SEED, drop_last=True
    )
    if case.mixed:
        raise NotImplementedError(
            "its samplers mix nothing; torchdata.nodes has a MultiNodeWeightedSampler"
        )
    options: dict[str, Any] = {
        "batch_size": BATCH // case.world,
        "num_workers": case.workers,
        "drop_last": True,
    }
    loader = StatefulDataLoader(
        dataset,
        sampler=sampler,
        generator=torch.Generator().manual_seed(SEED),
        **options,
    )
    if case.states:
        loader.load_state_dict(case.own_state)
    for batch in case.taken(map(_pairs, loader)):
        yield batch, loader.state_dict()


def mosaicml(case: Case) -> Iterator[tuple[Batch, Any]]:
    """MosaicML's StreamingDataset; its order is the same for as many canonical nodes."""
    from streaming import Stream, StreamingDataLoader, StreamingDataset

    class Streamed(StreamingDataset):
        def __getitem__(self, at: int) -> tuple[int, float]:
            return transformed(case, super().__getitem__(at)["number"])

    share = {"many": 0.75, "few": 0.25}
    streams = [
        Stream(local=str(case.data / f"mds-{name}"), proportion=share[name])
        for name in case.sources
    ]
    options: dict[str, Any] = (
        {"streams": streams} if case.mixed else {"local": str(case.data / "mds-many")}
    )
    dataset = Streamed(
        **options,
        shuffle=True,
        shuffle_seed=SEED,
        batch_size=BATCH // case.world,
        num_canonical_nodes=1,
        batching_method="stratified" if case.mixed else "random",
    )
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH // case.world,
        num_workers=case.workers,
        drop_last=True,
    )
    if case.states:
        loader.load_state_dict(case.states[0])
    for batch in case.taken(map(_pairs, loader)):
        yield batch, loader.state_dict()


def litdata(case: Case) -> Iterator[tuple[Batch, Any]]:
    """LitData's StreamingDataset, whose resume on other ranks is called elastic; of mixtures it has none."""
    from functools import partial

    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

    def part(name: str) -> Any:
        address = str(case.data / f"litdata-{name}")
        return StreamingDataset(
            address,
            shuffle=True,
            drop_last=True,
            seed=SEED,
            transform=partial(transformed, case),
        )

    dataset = part("many")
    if case.mixed:
        parts = [part(name) for name in case.sources]
        dataset = CombinedStreamingDataset(
            parts, seed=SEED, weights=[0.75, 0.25], iterate_over_all=False
        )
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH // case.world,
        num_workers=case.workers,
        drop_last=True,
    )
    if case.states:
        loader.load_state_dict(case.own_state)
    for batch in case.taken(map(_pairs, loader)):
        yield batch, loader.state_dict()


def grain(case: Case) -> Iterator[tuple[Batch, Any]]:
    """Grain's ElasticIterator over a MapDataset, whose random_map hands out a generator for each sample."""
    import grain
    from grain.experimental import ElasticIterator

    class Transform(grain.transforms.RandomMap):
        def random_map(self, element: int, rng: Any) -> tuple[int, float]:
            return transformed(case, element, rng)

    def part(name: str) -> Any:
        return grain.MapDataset.source(list(SOURCES[name])).seed(SEED).shuffle()

    dataset = part("many")
    if case.mixed:
        dataset = grain.MapDataset.mix(
            [part(name) for name in case.sources], weights=[3, 1]
        )
    dataset = dataset.seed(SEED).random_map(Transform())
    shard = grain.sharding.ShardOptions(case.rank, case.world)
    processes = grain.multiprocessing.MultiprocessingOptions(num_workers=case.workers)
    iterator: Any = iter(
        ElasticIterator(dataset, BATCH, shard, multiprocessing_options=processes)
    )
    if case.states:
        iterator.set_state(case.own_state)
    for batch in case.taken(map(_pairs, iterator)):
        yield batch, iterator.get_state()


def grain_filtered(case: Case) -> Iterator[tuple[Batch, Any]]:
    """The same with a filter."""
    import grain
    from grain.experimental import ElasticIterator

    dataset = grain.MapDataset.source(list(SOURCES["many"])).filter(
        lambda number: number % 3 > 0
    )
    yield from (
        (_pairs(batch), None)
        for batch in ElasticIterator(dataset, BATCH, grain.sharding.ShardOptions(0, 1))
    )


RANKS = {
    "torch DataLoader": dataloader,
    "StatefulDataLoader": stateful_dataloader,
    "MosaicML Streaming": mosaicml,
    "LitData": litdata,
    "Grain": grain,
}


def write_sources(folder: Path) -> None:
    """Each source in each format."""
    import cv2
    import litdata
    import numpy as np
    from streaming import MDSWriter

    from raypipe.stores.destination import write_atomically

    for name, numbers in SOURCES.items():
        with MDSWriter(
            out=str(folder / f"mds-{name}"), columns={"number": "int"}
        ) as writer:
            for number in numbers:
                writer.write({"number": number})
        address = str(folder / f"litdata-{name}")
        options: dict[str, Any] = {
            "chunk_size": 24,
            "num_workers": 1,
            "start_method": "fork",
        }
        litdata.optimize(fn=_same, inputs=list(numbers), output_dir=address, **options)
        # Its transform draws all of an image's pixels at random; labels are the numbers.
        image = cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()
        write_atomically(
            str(folder / f"{name}.lmdb"),
            ({"image": image, "label": number} for number in numbers),
            (),
        )


def _same(number: int) -> int:
    return number
