"""Kills real processes and nodes of a local cluster under a stream, and compares what comes out with what should.

    python tests/faults/bench.py --scenarios 36 --seed 0 [--kinds actor,node,…]
    python tests/faults/bench.py --trainers 3 --consume-s 0 --repeats 3 [--local]    the gaps of runs, by kind

Each scenario is one stream with one randomised fault. `delivered` counts the micro-batches that reach the consumer
(after a restart of the trainers: those that count, up to the checkpoint that they resume from), `delay` is the
longest that the consumer had to wait for one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from local_nodes import Nodes, cluster, kill  # isort: skip  first of all: it says where Ray keeps its files

sys.path.append(str(Path(__file__).parents[1] / "support"))
import cv2
import numpy as np
import ray.train
from ray.train.collective import broadcast_from_rank_zero
from rich.console import Console
from rich.table import Table

from raypipe.config import PlanConfig, PoolConfig
from raypipe.device.prefetcher import Batch
from raypipe.rayext.trainer import RunTrainer
from raypipe.stores.destination import write_atomically
from raypipe.streaming.handover import loader
from raypipe.streaming.hashes import batch_hash, combine
from raypipe.streaming.loader import Loader
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.streaming.run_log import events_of
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.fields import MicroBatch

NUM_SAMPLES = 320
# Kinds with images of 96 pixels a side. Smaller blocks, below 100 KB, outlive their node: Ray keeps them in the
# memory of the process that asked for them.
LARGE = ("frozen node", "node")
# Kinds whose ranks make micro-batches themselves while a pool starts, as they do for all transforms but functions
# without `rng`. Elsewhere they would make the whole stream, and there would be no actor to kill.
BRIDGED = ("trainer", "frozen trainer")
# the same samples: actors read the one, a reader the other
STORES = (
    "lmdb",
    "parquet",
)
PLAN = PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=32, seed=11)
THREE = replace(PLAN, global_batch_size=48)  # for three trainers
CONSUME_S = 0.04  # of the consumer per micro-batch, so that a stream lives long enough to be hurt
CHECKPOINT_EVERY = 5
# Micro-batches in a block where several are at hand when an actor dies, or where a reader is not done before it
# dies; else it is found, from 1 on.
BLOCK = 3
SCENARIO_S = 600  # a scenario that takes longer hangs: it ends the bench with what each thread does
# Ray Train looks for notices every 5 s
NOTICE_S = {
    "drained node": 2.0,  # a short stream still runs when the node goes
    "drained trainer": 12.0,
}
EARLY = ("frozen", "drained")


@dataclass
class Outcome:
    """Of one scenario.

    Attributes:
        kind: what was done.
        after: micro-batches that had been consumed by then.
        delivered, expected: micro-batches.
        duplicates: micro-batches that came twice.
        equal: whether the digest is that of an undisturbed stream.
        delay_s: see above.
        faults: lines that the supervisor wrote.
    """

    kind: str
    after: int
    delivered: int
    expected: int
    duplicates: int
    equal: bool
    delay_s: float
    faults: int


def crop(image: np.ndarray) -> np.ndarray:
    time.sleep(0.002)
    return np.ascontiguousarray(image[:16, :16])


def enlarged(image: np.ndarray) -> np.ndarray:
    time.sleep(0.002)
    return np.ascontiguousarray(cv2.resize(image, (96, 96)))


def crop_with_rng(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return crop(image)


def make_stores(folder: str, num_samples: int, names: list[str]) -> dict[str, str]:
    """The same samples in stores of some of `STORES`."""
    rng = np.random.default_rng(0)
    samples = [
        {
            "image": cv2.imencode(".png", rng.integers(0, 256, (20, 24, 3), np.uint8))[
                1
            ].tobytes(),
            "label": i % 7,
        }
        for i in range(num_samples)
    ]
    paths = {name: f"{folder}/store.{name}" for name in names}
    for path in paths.values():
        write_atomically(path, samples, tuple("abcdefg"))
    return paths


def spec_of(
    store: str, max_actors: int, kind: str = "", plan: PlanConfig = PLAN
) -> StreamSpec:
    # A pool that has all CPUs when a node goes has none to be restarted on.
    min_actors = 4 if kind == "node for good" else 1
    block = BLOCK * kind.endswith(("actor", "actors", "node", "reader"))
    transform = enlarged if kind in LARGE else crop
    if kind in BRIDGED:
        transform = crop_with_rng
    return open_stream(
        store,
        store,
        plan=plan,
        train_transform=transform,
        val_transform=transform,
        pool=PoolConfig(
            min_actors=min_actors,
            max_actors=max_actors,
            max_in_flight=(0, block),
            stall_timeout_s=60,
        ),
    )


def digest_of(batch: Batch) -> bytes:
    fields = {
        "image": batch.image.permute(0, 2, 3, 1).numpy(),
        "label": batch.target_host,
    }
    return batch_hash(
        MicroBatch(batch.position, batch.index, batch.weight.numpy(), {**fields})
    )


def without_ray(spec: StreamSpec) -> list[tuple[str, bytes]]:
    """Places and digests of a stream, made in this process."""
    maker, places = MicroBatchMaker(spec), spec.plan.micro_batches(spec.plan.start())
    return [(str(at), batch_hash(maker.batch(at))) for at in places]


@dataclass
class Damage:
    """What is done, and what mends it so many seconds later."""

    hurt: Callable[[], None]
    mend: Callable[[], None] | None = None
    mend_after_s: float = 0.0


_background = ThreadPoolExecutor(1)


def every_batch(loader: Loader) -> Iterator[Batch]:
    for epoch in loader.epochs():
        yield from epoch.train
        yield from epoch.val


def consume(
    spec: StreamSpec, damage: Damage, after: int
) -> tuple[list[tuple[str, bytes]], float, int]:
    """Places and digests, in the order of arrival; the longest wait; and the number of lines of the supervisor."""
    rows: list[tuple[str, bytes]] = []
    longest, mend_at = 0.0, float("inf")
    stream = loader(spec, max_actors=spec.pool.max_actors)
    faults: list[str] = []
    hurting: list[Future[None]] = []
    num = spec.plan.num_micro_batches(spec.plan.start())
    asked = time.monotonic()
    for batch in every_batch(stream):
        if rows:
            longest = max(longest, time.monotonic() - asked)
        rows.append((str(batch.position), digest_of(batch)))
        if len(rows) == after:
            hurting.append(_background.submit(damage.hurt))
            if damage.mend:
                mend_at = time.monotonic() + damage.mend_after_s
        if damage.mend and time.monotonic() > mend_at:
            damage.mend()  # here, since nodes can be started in the main thread only
            mend_at = float("inf")
        time.sleep(CONSUME_S)
        if len(rows) == num:  # the stream's end is that of its supervisor
            faults = [
                text
                for kind, text in events_of(stream._stream.supervisor, 0)
                if kind == "fault"
            ]
        asked = time.monotonic()
    for each in hurting:
        each.result()  # it found what to kill
    return rows, longest, len(faults)


def train_fn(config: dict[str, Any]) -> None:
    """A trainer without a model: what it learns is the list of what it saw, and that is its checkpoint's."""
    stream = loader(config["spec"], max_actors=2)
    folder = Path(config["folder"])
    attempt = broadcast_from_rank_zero(time.monotonic())
    if stream.rank == 0:
        with (folder / "sizes").open("a") as file:
            file.write(f"{stream.world_size}\n")
    rows = []
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as path:
            seen = json.loads((Path(path) / "seen.json").read_text())
        rows = [
            row for row in seen if int(row[0][-3:]) % stream.world_size == stream.rank
        ]
    steps = 0
    for batch in every_batch(stream):
        rows.append((str(batch.position), digest_of(batch).hex()))
        time.sleep(config["consume_s"])
        with (folder / f"done-{stream.rank}").open("a") as file:
            file.write(
                json.dumps([time.monotonic(), attempt, str(batch.position)]) + "\n"
            )
        steps += batch.ends_step
        if batch.ends_step and (
            batch.position.split == "train" or stream.cursor.step == 0
        ):
            # a step, or a validation
            noticed = (
                config["heeds_notices"]
                and getattr(stream, "should_checkpoint", lambda: False)()
            )
            if noticed or (
                batch.position.split == "train" and steps % CHECKPOINT_EVERY == 0
            ):
                report(stream, rows)
    report(stream, rows)


def report(stream: Any, rows: list[Any]) -> None:
    gathered: list[Any] = [None] * stream.world_size
    torch_distributed().all_gather_object(gathered, rows)
    with tempfile.TemporaryDirectory() as path:
        checkpoint = None
        if stream.rank == 0:
            (Path(path) / "seen.json").write_text(
                json.dumps([row for rank in gathered for row in rank])
            )
            stream.save(path)
            checkpoint = ray.train.Checkpoint.from_directory(path)
        ray.train.report({}, checkpoint=checkpoint)


def torch_distributed() -> Any:
    import torch.distributed

    return torch.distributed


@dataclass
class Trainers:
    """How many trainers a scenario has: from the fewest to the most, with their seconds per micro-batch.

    They run on the head, or, where nodes are to go from under them, on the CPU nodes: two on one each; or where a
    local run has its own. A restart after a notice does not count as a failure.
    """

    fewest: int = 2
    most: int = 2
    consume_s: float = CONSUME_S
    on_nodes: bool = False
    is_local: bool = False
    max_failures: int = 4

    @property
    def resources(self) -> dict[str, float]:
        if self.is_local:
            return {"CPU": 0.01}
        return {"CPU": 0, "trainer" if self.on_nodes else "head": 1}


def train(
    spec: StreamSpec, damage: Damage, after: int, trainers: Trainers
) -> tuple[list[tuple[str, bytes]], float, list[int], int, int]:
    """As `consume`, by trainers that Ray Train restarts when the fault reaches them; their numbers, how many steps
    they had finished and did again, and how many micro-batches in all."""
    with tempfile.TemporaryDirectory(prefix="raypipe-faults-") as name:
        folder = Path(name)
        elastic = trainers.fewest < trainers.most
        trainer = RunTrainer(
            train_fn,
            per_step=spec.plan.config.per_step,
            timeout_s=900,
            take_signals=lambda: None,
            train_loop_config={
                "spec": spec,
                "folder": name,
                "consume_s": trainers.consume_s,
                "heeds_notices": trainers.on_nodes and not elastic,
            },
            scaling_config=ray.train.ScalingConfig(
                num_workers=(trainers.fewest, trainers.most)
                if elastic
                else trainers.most,
                resources_per_worker=trainers.resources,
                placement_strategy="SPREAD" if trainers.on_nodes else "PACK",
                elastic_resize_monitor_interval_s=3.0,
            ),
            run_config=ray.train.RunConfig(
                storage_path=name,
                # a cluster keeps what it knows of a run by its name
                name=folder.name,
                failure_config=ray.train.FailureConfig(
                    max_failures=trainers.max_failures
                ),
            ),
        )
        with ThreadPoolExecutor(1) as pool:
            # nodes can be started in the main thread only
            fitting = pool.submit(trainer.fit)
            while len(read_done(folder)) < after and not fitting.done():
                time.sleep(0.05)
            damage.hurt()
            if damage.mend:
                time.sleep(damage.mend_after_s)
                damage.mend()
            result = fitting.result()
        with result.checkpoint.as_directory() as path:
            seen = json.loads((Path(path) / "seen.json").read_text())
        sizes = [int(line) for line in (folder / "sizes").read_text().split()]
        seen = [(at, bytes.fromhex(digest)) for at, digest in seen]
        place = {
            str(at): number
            for number, at in enumerate(spec.plan.micro_batches(spec.plan.start()))
        }
        # The gap of a rank is measured with what it does itself, which is little.
        done = read_done(folder)
        rows = sorted(seen, key=lambda row: place[row[0]])
        times = [finished_at for finished_at, _, _ in done]
        return (
            rows,
            float(np.diff(times).max()),
            sizes,
            steps_again(done, spec.plan.config.per_step),
            len(done) - len(seen),
        )


def read_done(folder: Path) -> list[tuple[float, float, str]]:
    """Time, attempt and place of each micro-batch that trainers were done with, in the order of the times."""
    lines = [
        line
        for file in folder.glob("done-*")
        for line in file.read_text().split("\n")[:-1]
    ]
    return sorted(tuple(json.loads(line)) for line in lines)


def steps_again(done: list[tuple[float, float, str]], per_step: int) -> int:
    """How many optimizer steps had been finished by all ranks, and were made again."""
    finished = Counter(
        (attempt, at[:-5]) for _, attempt, at in done if at.startswith("train")
    )
    return sum(
        num == per_step and any(a > attempt and s == step for a, s in finished)
        for (attempt, step), num in finished.items()
    )


KINDS = (
    "actor",
    "reader",
    "all actors",
    "supervisor",
    "node",
    "node for good",
    "drained node",
    "coordinator",
    "trainer",
    "drained trainer",
    "elastic",
    "frozen actor",
    "frozen node",
    "frozen trainer",
    "frozen coordinator",
    "frozen reader",
)


# They have trainers of a number, or a loop, of their own; and those that need more than one node.
BY_ITSELF = ("drained trainer", "elastic")
OF_NODES = {kind for kind in KINDS if "node" in kind} | {"drained trainer", "elastic"}


def damage_of(kind: str, nodes: Nodes, choose: random.Random) -> Damage:
    processes = {
        "actor": "MapWorker",
        "all actors": "MapWorker",
        "reader": "ReadPlan",
        "supervisor": "Supervisor",
        "coordinator": "SplitCoordinator",
        "trainer": "RayTrainWorker",
    }
    if kind in processes:
        return Damage(
            lambda: kill(processes[kind], choose, all_of_them=kind == "all actors")
        )
    if kind in NOTICE_S:
        hosting = "RayTrainWorker" if kind == "drained trainer" else "MapWorker"
        return Damage(
            lambda: nodes.drain(choose, NOTICE_S[kind], hosting),
            nodes.mend,
            mend_after_s=NOTICE_S[kind],
        )
    if kind == "frozen node":
        return Damage(lambda: nodes.freeze(choose))
    if kind.startswith("frozen "):
        name = processes[kind.removeprefix("frozen ")]
        return Damage(lambda: kill(name, choose, number=signal.SIGSTOP))
    if kind == "elastic":
        return Damage(lambda: nodes.lose(choose), nodes.mend, mend_after_s=25)
    for_good = kind == "node for good"
    return Damage(
        lambda: nodes.lose(choose),
        None if for_good else nodes.mend,
        choose.uniform(0, 3),
    )


def run(
    kinds: list[str],
    seed: int,
    num_samples: int,
    names: list[str],
    max_actors: int,
    show: Callable[[Outcome], None],
    trainers: Trainers | None = None,
    local: bool = False,
) -> list[Outcome]:
    """Run one scenario of each of `kinds`, on one cluster and stores of some of `STORES`.

    Args:
        trainers: of all kinds; None = only the kinds that need some have some.
        local: whether the cluster is one node.
    """
    choose = random.Random(seed)
    plan = THREE if trainers and trainers.most == 3 else PLAN
    outcomes = []
    with contextlib.ExitStack() as held:
        folder = held.enter_context(
            tempfile.TemporaryDirectory(prefix="raypipe-faults-")
        )
        nodes = held.enter_context(cluster(local))
        stores = make_stores(folder, num_samples, names)
        undisturbed = {
            (name, large): without_ray(spec_of(path, max_actors, large, plan))
            for name, path in stores.items()
            for large in {kind if kind in LARGE else "" for kind in kinds}
        }
        for kind in kinds:
            faulthandler.dump_traceback_later(SCENARIO_S, exit=True)
            store = "parquet" if "reader" in kind else choose.choice(names)
            spec = spec_of(stores[store], max_actors, kind, plan)
            expected = undisturbed[store, kind if kind in LARGE else ""]
            # Who is to be killed still has work: the last quarter, the second validation, is remembered, and a
            # reader may be ahead by twice what a pool may.
            ahead = BLOCK * (3 * max_actors + 2) * (1 + ("reader" in kind))
            latest = max(2, len(expected) * 3 // 4 - ahead)
            after = choose.randint(1, latest // 2 if kind.startswith(EARLY) else latest)
            damage = damage_of(kind, nodes, choose)
            name, faults = kind, 0
            needs_trainers = kind.removeprefix("frozen ") in ("coordinator", "trainer")
            if needs_trainers or trainers:
                rows, longest, *_ = train(
                    spec, damage, after, trainers or Trainers(is_local=local)
                )
            elif kind == "elastic":
                few_or_many = Trainers(1, 4, consume_s=0.3, on_nodes=True)
                rows, longest, sizes, *_ = train(spec, damage, after // 4, few_or_many)
                name = f"{kind}, {' → '.join(map(str, sizes))} trainers"
            elif kind == "drained trainer":
                warned = Trainers(consume_s=0.3, on_nodes=True, max_failures=0)
                rows, longest, _, steps, again = train(spec, damage, after // 2, warned)
                name = f"{kind}, {steps} steps and {again} micro-batches again"
            else:
                rows, longest, faults = consume(spec, damage, after)
            places = [at for at, _ in rows]
            outcome = Outcome(
                kind=f"{name}, {store}",
                after=after,
                delivered=len(set(places)),
                expected=len(expected),
                duplicates=len(places) - len(set(places)),
                equal=combine(d for _, d in rows) == combine(d for _, d in expected),
                delay_s=round(longest, 1),
                faults=faults,
            )
            outcomes.append(outcome)
            show(outcome)
            nodes.mend()
        faulthandler.cancel_dump_traceback_later()
    return outcomes


def gaps(outcomes: list[Outcome]) -> Table:
    """The median gap of each kind."""
    drawn = Table(title="gaps", title_justify="left")
    for name in ("kind", "median", "gaps"):
        drawn.add_column(name)
    of_kind: dict[str, list[float]] = {}
    for outcome in outcomes:
        of_kind.setdefault(outcome.kind.split(",")[0], []).append(outcome.delay_s)
    for kind, delays in of_kind.items():
        each = ", ".join(map(str, delays))
        drawn.add_row(kind, f"{statistics.median(delays):.1f} s", each)
    return drawn


def main() -> bool:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenarios", type=int, default=0, help="0 = each kind `--repeats` times"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument(
        "--trainers", type=int, default=0, help="of each kind; 0 = as the kind needs it"
    )
    parser.add_argument(
        "--consume-s",
        type=float,
        default=CONSUME_S,
        help="seconds of a trainer for a micro-batch; 0 = the actors are the limit",
    )
    parser.add_argument("--local", action="store_true", help="a cluster of one node")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", default="", help="comma-separated; taken in turns; empty = all"
    )
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument(
        "--stores",
        default=",".join(STORES),
        help="comma-separated; the reader needs parquet",
    )
    parser.add_argument(
        "--max-actors",
        type=int,
        default=4,
        help="of a pool; 4 for a node that is lost for good",
    )
    parser.add_argument("--output", default="", help="file for the outcomes as JSON")
    args = parser.parse_args()
    possible = [kind for kind in KINDS if kind not in BY_ITSELF or not args.trainers]
    if args.local:
        possible = [kind for kind in possible if kind not in OF_NODES]
    if args.trainers == 1:
        # its execution runs in its own process
        possible = [kind for kind in possible if "coordinator" not in kind]
    chosen = args.kinds.split(",") if args.kinds else possible
    unknown = set(chosen) - set(possible)
    if unknown:
        parser.error(f"not here: {sorted(unknown)}; there are {', '.join(possible)}")
    num = args.scenarios or len(chosen) * args.repeats
    kinds = [chosen[i % len(chosen)] for i in range(num)]
    outcomes = run(
        kinds,
        args.seed,
        args.samples,
        args.stores.split(","),
        args.max_actors,
        lambda outcome: print(f"{asdict(outcome)}", file=sys.stderr, flush=True),
        Trainers(args.trainers, args.trainers, args.consume_s, is_local=args.local)
        if args.trainers
        else None,
        args.local,
    )
    Console(width=110).print(gaps(outcomes))
    if args.output:
        Path(args.output).write_text(
            json.dumps([asdict(o) for o in outcomes], indent=1)
        )
    ok = all(
        o.equal and o.delivered == o.expected and not o.duplicates for o in outcomes
    )
    print(
        json.dumps(
            {
                "scenarios": len(outcomes),
                "equal": sum(o.equal for o in outcomes),
                "ok": ok,
            }
        ),
        flush=True,
    )
    return ok


if __name__ == "__main__":
    ok = False
    try:
        ok = main()
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0 if ok else 1)  # Ray's own threads may wait for nodes that are gone
