# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "raypipe-data",
#     "grain>=0.2.18",
#     "litdata>=0.2.76,<0.3",
#     "mosaicml-streaming>=0.13,<0.14",
#     "psutil>=5.9",
#     "torch>=2.14",  # torchvision is built against the CUDA build of torch: the two are asked for together
#     "torchdata>=0.11",
#     "torchvision>=0.29",
# ]
#
# [tool.uv.sources]
# raypipe-data = { path = "..", editable = true }
# ///
"""The comparison in README.md: each cell of its table, found by running the loader.

    uv run benchmarks/compare.py [--peers Grain raypipe] [--cells resume elastic]

An epoch of 144 samples in global batches of 16, on W processes of one machine (gloo), with CPU workers.
A sample's "pixels" are a random number that its transform draws. Cells:

    off_host   CPU work runs on a node of a Ray cluster that has no trainer
    order      W = 2 and W = 4: each global batch has the same samples
    pixels     W = 2 and W = 4: each sample has the same random numbers
    resume     stopped after 5 steps, and continued: the rest of the epoch, as an unbroken run has it
    elastic    the same, from W = 2 to W = 4: each sample of the rest exactly once; and with its order and pixels
    mixture    3 to 1 of two sources: exact in each global batch, before and after such a resume, with the samples
               of an unbroken run
    lost       SIGKILL for a CPU worker in the middle of the epoch: all samples come, and nothing is started again
    filter     order, elastic and pixels, over the samples that an expression passes

A cell is "yes", or "no" with what happened. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from compare_peers import (
    BATCH,
    RANKS,
    SOURCES,
    STEPS,
    Batch,
    Case,
    grain_filtered,
    write_sources,
)
from rich.console import Console
from rich.table import Table

_STOP = 5  # steps of a run before it stops
_LIMIT_S = 120
_ON_RAY = ("raypipe", "Ray Data")
_PACKAGES = {
    "raypipe": "raypipe-data",
    "torch DataLoader": "torch",
    "StatefulDataLoader": "torchdata",
    "MosaicML Streaming": "mosaicml-streaming",
    "LitData": "litdata",
    "Ray Data": "ray",
    "Grain": "grain",
}


@dataclass(frozen=True)
class Run:
    """What a run gave.

    Attributes:
        steps: the global batches, of all ranks.
        states: of all ranks at the end.
        error: of the first rank that failed; empty = none.
        workers: processes that transformed samples: id, its parent's, and the node.
        killed: the id of the one that was killed.
    """

    steps: list[Batch]
    states: list[Any]
    error: str
    workers: list[list[str]]
    killed: str = ""

    def numbers(self) -> list[list[int]]:
        """The samples of each global batch, without their order in it."""
        return [sorted(number for number, _ in step) for step in self.steps]

    def drawn(self) -> dict[int, float]:
        return {number: draw for step in self.steps for number, draw in step}


def run(peer: str, folder: Path, **options: Any) -> Run:
    """Run all ranks of a loader to the end; an error of one is in the Run."""
    own = folder / f"{peer}-{time.monotonic_ns()}"
    own.mkdir()
    if options.pop("filtered", False):
        own = own / "filtered"
        own.mkdir()
    case = Case(own, folder, **{"workers": 2 if options["world"] == 1 else 1} | options)
    error = ""
    try:
        if peer in _ON_RAY:
            from compare_ray import RUNS

            RUNS[peer](case)
        else:
            error = _by_processes(peer, case)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    found = [own / f"rank-{rank}" for rank in range(case.world)]
    ranks = [
        pickle.loads(path.read_bytes()) if path.exists() else ([], None)
        for path in found
    ]
    steps = [
        list(chain(*parts))
        for parts in zip(*(batches for batches, _ in ranks), strict=False)
    ]
    records = (own / "workers").iterdir() if (own / "workers").exists() else ()
    workers = [[path.name, *path.read_text().split(" ")] for path in records]
    if (own / "killed").exists():
        killed = (own / "killed").read_text()
    else:
        killed = ""
    return Run(steps, [state for _, state in ranks], error, workers, killed)


def _by_processes(peer: str, case: Case) -> str:
    """A process for each rank, as torchrun starts them; returns the error of the first that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(case.world):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GLOBAL_RANK": str(rank),
            "WORLD_SIZE": str(case.world),
            "LOCAL_WORLD_SIZE": str(case.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        path = case.folder / f"case-{rank}"
        path.write_bytes(pickle.dumps(replace(case, rank=rank)))
        log = (case.folder / f"log-{rank}").open("w")
        command = [sys.executable, __file__, "--rank-of", peer, str(path)]
        started.append(
            subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        )
    deadline = time.monotonic() + _LIMIT_S
    while (
        any(process.poll() is None for process in started)
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    late = [process for process in started if process.poll() is None]
    for process in late:
        process.kill()
    logs = [
        (case.folder / f"log-{rank}").read_text().strip() for rank in range(case.world)
    ]
    failed = [
        log for process, log in zip(started, logs, strict=True) if process.returncode
    ]
    if late:
        return f"it hung for {_LIMIT_S} s"
    return failed[0].splitlines()[-1] if failed else ""


def rank_of(peer: str, path: Path) -> None:
    """The process of one rank."""
    import torch

    case: Case = pickle.loads(path.read_bytes())
    torch.manual_seed(1)
    if case.world > 1:
        torch.distributed.init_process_group("gloo")
    batches = list[Batch]()
    state = None
    try:
        for batch, state in RANKS[peer](case):  # noqa: B007
            batches.append(batch)
    finally:
        (case.folder / f"rank-{case.rank}").write_bytes(pickle.dumps((batches, state)))
        if sys.exc_info()[0]:
            sys.stdout.flush()
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    if case.world > 1:
        torch.distributed.barrier()
    os._exit(0)


class Cells:
    """The cells of one loader, each "yes" or why not."""

    def __init__(self, peer: str, folder: Path) -> None:
        self._run = cache(lambda **options: run(peer, folder, **options))
        self._again = lambda **options: run(peer, folder, **options)
        self._peer = peer

    def _whole(self, world: int, **options: Any) -> Run:
        """An unbroken epoch."""
        found = self._run(world=world, **options)
        if found.error:
            raise RuntimeError(found.error)
        return found

    def _continued(self, before: int, after: int, **options: Any) -> Run:
        """The rest of an epoch that was stopped after some steps."""
        stopped = self._run(world=before, steps=_STOP, **options)
        if stopped.error or not any(stopped.states):
            raise RuntimeError(stopped.error or "it has no state to save")
        rest = self._again(world=after, states=stopped.states, **options)
        if rest.error:
            raise RuntimeError(rest.error)
        return rest

    def off_host(self) -> str:
        found = self._whole(2)
        nodes = {node for *_, node in found.workers}
        if self._peer not in _ON_RAY:
            return f"no: {len(found.workers)} processes, all of the training host"
        if len(nodes) > 1 or self._trains_elsewhere(nodes):
            return "yes"
        return f"no: nodes {nodes}"

    def _trains_elsewhere(self, nodes: set[str]) -> bool:
        import ray

        return not nodes <= {
            node["NodeID"] for node in ray.nodes() if node["Resources"].get("CPU") == 4
        }

    def order(self) -> str:
        two = self._whole(2).numbers()
        four = self._whole(4).numbers()
        same = sum(a == b for a, b in zip(two, four, strict=False))
        if two == four and len(two) == STEPS:
            return "yes"
        return f"no: {same} of {STEPS} global batches are equal"

    def pixels(self) -> str:
        two = self._whole(2).drawn()
        four = self._whole(4).drawn()
        both = two.keys() & four.keys()
        same = sum(two[number] == four[number] for number in both)
        if same == len(both) == STEPS * BATCH:
            return "yes"
        return f"no: of {len(both)} samples {same} have the same"

    def resume(self) -> str:
        return self._compare(self._continued(2, 2), self._whole(2))

    def elastic(self) -> str:
        return self._compare(self._continued(2, 4), self._whole(2))

    def _compare(self, rest: Run, whole: Run) -> str:
        expected = whole.numbers()[_STOP:]
        wanted = sorted(chain(*expected))
        got = sorted(chain(*rest.numbers()))
        if got != wanted:
            lost = len(set(wanted) - set(got))
            twice = len(got) - len(set(got))
            early = len(set(got) - set(wanted))
            return f"no: of {len(wanted)} samples {lost} are lost, {twice} come twice, {early} came before"
        same = sum(rest.drawn()[number] == whole.drawn()[number] for number in wanted)
        if rest.numbers() == expected:
            order = "same global batches"
        else:
            order = "other global batches"
        return f"yes: {order}, {same} of {len(wanted)} samples with the same random numbers"

    def mixture(self) -> str:
        def few(batches: list[list[int]]) -> list[int]:
            return [
                sum(number >= min(SOURCES["few"]) for number in numbers)
                for numbers in batches
            ]

        whole = self._whole(2, mixed=True).numbers()
        if {*few(whole)} != {BATCH // 4}:
            return f"no: {few(whole)} of {BATCH} samples are of the smaller source"
        rest = self._continued(2, 4, mixed=True).numbers()
        if rest != whole[_STOP:]:
            same = sum(a == b for a, b in zip(rest, whole[_STOP:], strict=False))
            return f"no: exact, but after the resume {same} of {len(rest)} global batches are the unbroken run's"
        return "yes"

    def lost(self) -> str:
        found = self._again(world=1, kills=True, slow_s=0.03)
        num = len({number for numbers in found.numbers() for number in numbers})
        if not found.killed:
            return f"not run: no CPU worker was found; {found.error}"
        if found.error or num != STEPS * BATCH:
            return f"no: {num} of {STEPS * BATCH} samples came; {found.error}"
        in_order = found.steps == self._whole(1, slow_s=0.03).steps
        return f"yes: {'in the same order, with the same random numbers' if in_order else 'in another order'}"

    def filter(self) -> str:
        if self._peer == "Grain":
            try:
                next(grain_filtered(Case(Path(), Path())))
            except ValueError as error:
                return f"no: {error}"
            return "yes"
        if self._peer != "raypipe":
            return "not offered"
        whole = self._whole(2, filtered=True)
        rest = self._continued(2, 4, filtered=True)
        assert min(number for numbers in whole.numbers() for number in numbers) >= 48, (
            "the filter's samples alone"
        )
        return self._compare(rest, whole)


_CELLS = (
    "off_host",
    "order",
    "pixels",
    "resume",
    "elastic",
    "mixture",
    "lost",
    "filter",
)


def of(cell: Callable[[], str]) -> str:
    try:
        return cell()
    except Exception as error:
        return f"no: {str(error)[:300]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", nargs="+", default=[*_PACKAGES], choices=[*_PACKAGES]
    )
    parser.add_argument("--cells", nargs="+", default=_CELLS, choices=_CELLS)
    parser.add_argument(
        "--rank-of", nargs=2, metavar=("PEER", "CASE"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    if args.rank_of:
        return rank_of(args.rank_of[0], Path(args.rank_of[1]))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    if {*args.peers} & {*_ON_RAY}:
        from compare_ray import start_cluster

        start_cluster()
    found = dict[str, dict[str, str]]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_sources(folder)
        for peer in args.peers:
            cells = Cells(peer, folder)
            found[peer] = {"version": version(_PACKAGES[peer])}
            for name in args.cells:
                found[peer][name] = of(getattr(cells, name))
                print(f"{peer}, {name}: {found[peer][name]}", flush=True)
    table = Table("", *(f"{peer} {found[peer]['version']}" for peer in found))
    for name in args.cells:
        table.add_row(name, *(found[peer][name].partition(":")[0] for peer in found))
    Console(width=150).print(table)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
