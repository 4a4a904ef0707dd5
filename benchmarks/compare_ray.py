"""The two loaders that work on a Ray cluster, raypipe and plain Ray Data, as ranks of a TorchTrainer.

The cluster has two nodes on this machine: one with CPUs for the trainers, and one for CPU work alone.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from compare_peers import BATCH, SEED, SOURCES, Batch, Case, note_worker, transformed

_MICRO = 4


def start_cluster() -> None:
    import ray
    from ray.cluster_utils import Cluster

    import raypipe  # noqa: F401  before Ray is imported by anything else: it sets what Ray reads then

    cluster = Cluster(
        True, head_node_args={"num_cpus": 4, "object_store_memory": 200 << 20}
    )
    cluster.add_node(num_cpus=2, object_store_memory=200 << 20)
    ray.init(address=cluster.address, log_to_driver=False)


def raypipe_run(case: Case) -> None:
    """All ranks: micro-batches of 4, of which a step has four."""
    import numpy as np

    import raypipe

    def draws(image: np.ndarray) -> np.ndarray:
        note_worker(case.folder)
        time.sleep(case.slow_s)
        return np.random.randint(0, 256, image.shape, np.uint8)

    stores = {name: str(case.data / f"{name}.lmdb") for name in case.sources}
    mixture: dict[str, float] = {"many": 3, "few": 1} if case.mixed else {}
    spec = raypipe.open_stream(
        stores if case.mixed else stores["many"],
        plan=raypipe.PlanConfig(
            epochs=1,
            micro_batch_size=_MICRO,
            global_batch_size=BATCH,
            seed=SEED,
            mixture=mixture,
        ),
        train_transform=draws,
        pool=raypipe.PoolConfig(micro_batches_per_block=1),
        filter="label >= 48" if case.folder.name == "filtered" else "",
    )

    def rank(case: Case) -> Iterator[tuple[Batch, Any]]:
        loader = raypipe.loader(spec)
        if case.states:
            loader.load_state_dict(case.states[0])
        for epoch in loader.epochs():
            pairs = list[tuple[int, float]]()
            for batch in case.taken(epoch.train):
                numbers = batch.target.tolist()
                sums = batch.image.flatten(1).double().sum(1).tolist()
                pairs += zip(numbers, sums, strict=True)
                if batch.ends_step:
                    yield pairs, loader.state_dict()
                    pairs = []

    # A rank is handed micro-batches, not whole steps.
    steps = case.steps and case.steps * BATCH // _MICRO // case.world
    _train(replace(case, steps=steps), rank, {})


def ray_data_run(case: Case) -> None:
    """All ranks: a shuffled Dataset, split over them by Ray Train."""
    import ray.data

    def part(name: str) -> Any:
        return ray.data.from_items(
            [{"number": number} for number in SOURCES[name]], override_num_blocks=12
        )

    def draws(row: dict[str, Any]) -> dict[str, Any]:
        number, draw = transformed(case, row["number"])
        return {"number": number, "draw": draw}

    dataset = part("many")
    if case.mixed:
        dataset = dataset.mix(part("few"), weights=[0.75, 0.25])
    if not case.mixed:
        dataset = dataset.random_shuffle(seed=SEED)
    else:
        dataset = dataset
    dataset = dataset.map(draws)

    def rank(case: Case) -> Iterator[tuple[Batch, Any]]:
        shard: Any = ray.train.get_dataset_shard("train")
        if case.states:
            raise NotImplementedError(
                f"its iterator has no state: {[n for n in dir(shard) if 'state' in n]}"
            )
        batches = shard.iter_batches(
            batch_size=BATCH // case.world, drop_last=True, prefetch_batches=1
        )
        for batch in case.taken(batches):
            yield (
                list(
                    zip(batch["number"].tolist(), batch["draw"].tolist(), strict=True)
                ),
                None,
            )

    _train(case, rank, {"train": dataset})


def _train(
    case: Case,
    rank: Callable[[Case], Iterator[tuple[Batch, Any]]],
    datasets: dict[str, Any],
) -> None:
    """Run the ranks in a TorchTrainer; each leaves its batches and its last state in the folder."""
    import ray.train.torch

    def train_fn(config: dict[str, Any]) -> None:
        number = ray.train.get_context().get_world_rank()
        batches = list[Batch]()
        state = None
        for batch, state in rank(  # noqa: B007
            replace(case, rank=number, kills=case.kills and number == 0)
        ):
            batches.append(batch)
        (case.folder / f"rank-{number}").write_bytes(pickle.dumps((batches, state)))

    with tempfile.TemporaryDirectory() as folder:
        ray.train.torch.TorchTrainer(
            train_fn,
            scaling_config=ray.train.ScalingConfig(
                num_workers=case.world, resources_per_worker={"CPU": 1}
            ),
            run_config=ray.train.RunConfig(name="compare", storage_path=folder),
            datasets=datasets,
        ).fit()


RUNS = {"raypipe": raypipe_run, "Ray Data": ray_data_run}
