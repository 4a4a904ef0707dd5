"""What each image costs on its way to the GPUs, hop by hop, and which hop a target fills first.

    python benchmarks/hops.py [--images-per-s 24000 --gpus 8 --micro-batch-size 256 --size 224 --repeats 3]
    python benchmarks/hops.py --settings         # also with other RAY_object_manager_* settings: some minutes
    python benchmarks/hops.py --address auto     # the object store between two nodes of a cluster that runs

Measured here: into the object store; blocks from one raylet to another on this machine, 1, 2 and 4
of them in flight, which is a lower bound of what two machines do (these have one machine's cores, and the loopback
for a network); and the host's copy into what pinned memory would be, which it is with a CUDA device, whose PCIe is
measured, too. Also how long training stands still for a checkpoint of ResNet-50. Figures of other pages, and
published ones, stand in `Known`; prices are options. Prints tables; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

# a cluster that no other process takes for its own
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rp-")

import raypipe  # noqa: F401  # isort: skip
import numpy as np
import torch

from raypipe.plan.places import Cursor
from raypipe.streaming.blocks import MAX_BYTES, MAX_SECONDS
from raypipe.streaming.saving.run_checkpoints import RunCheckpoints

from transfers import IN_FLIGHT, SETTINGS, Transfer, measure  # isort: skip

PLACES = {"the host": 0.0, "CPU nodes": 1.0, "both": 0.5}
"""Where actors are: the share of the images that come from CPU nodes, with both half of them."""


@dataclass(frozen=True)
class Known:
    """What this script does not measure.

    Attributes:
        per_actor: images/s that an actor's CPU decodes and transforms: 15 made 12,070 (results/gpu.md).
        block_ms, place_ms: CPU time of the execution for a block, and for each micro-batch in it: a block of one
            took 6.2 ms, one of thirteen 8.5 and 9.0 (results/scale.md).
        rank_ms: time of a rank's interpreter for a micro-batch: 6.3 ms to take it (results/scale.md, in blocks of
            one), 4.3 to augment it by `standard` and 4.4 for the BatchNorm layers of ResNet-50 (results/gpu.md).
        pcie_gb_per_s: of 16 lanes of PCIe 5.0, 63 GB/s each way by its standard, less a fifth for packets.
        network_gbit_per_s: into the GPUs' host: an A3's first card has 200, a P5's has 100.
        host_cpus: of a P5.
        transfer_threads: of Ray's object manager, at most by itself.
    """

    per_actor: float = 805.0
    block_ms: float = 6.0
    place_ms: float = 0.2
    rank_ms: float = 15.0
    pcie_gb_per_s: float = 50.0
    network_gbit_per_s: float = 100.0
    host_cpus: int = 192
    transfer_threads: int = 8


KNOWN = Known()


@dataclass(frozen=True)
class Target:
    """What eight GPUs take.

    Attributes:
        images_per_s: of all GPUs.
        gpus: of the host.
        micro_batch_size: B.
        size: side of an image, pixels.
    """

    images_per_s: float
    gpus: int
    micro_batch_size: int
    size: int

    @property
    def image_bytes(self) -> int:
        return 3 * self.size**2

    def per_block(self, actor_cpus: float = float("inf"), known: Known = KNOWN) -> int:
        """Micro-batches in a block: what fits MAX_BYTES, and what an actor makes in MAX_SECONDS."""
        of_bytes = MAX_BYTES / (self.micro_batch_size * self.image_bytes)
        return max(
            1,
            int(
                min(
                    of_bytes,
                    MAX_SECONDS * known.per_actor * actor_cpus / self.micro_batch_size,
                )
            ),
        )


@dataclass(frozen=True)
class Hop:
    """A hop at the target.

    Attributes:
        name: of it.
        needs: what the target asks of it, by the place of the actors, in `unit`.
        has: what there is.
        moves: what gives it more room.
    """

    name: str
    needs: dict[str, float]
    has: float
    unit: str
    moves: str

    def used(self, place: str) -> float:
        return self.needs[place] / self.has


def hops(
    target: Target,
    moved: Transfer,
    copied: dict[str, float],
    known: Known = KNOWN,
) -> list[Hop]:
    """The hops of a stream to all GPUs.

    Args:
        moved: from one raylet to another.
        copied: the result of `copies`.
    """
    per_s = target.images_per_s
    gpus = target.gpus
    rows = target.micro_batch_size
    cores = per_s / known.per_actor
    gb_per_s = per_s * target.image_bytes / 1e9
    fewer = "actors on the host; transform.size"
    cpus = len(os.sched_getaffinity(0))
    # by CPU time, since other processes may be busy
    both = cpus / (moved.source_cpu_s + moved.sink_cpu_s)
    if math.isnan(both):  # they are on other machines
        both = moved.gb_per_s

    def needs(by: Callable[[float], float]) -> dict[str, float]:
        return {place: by(share) for place, share in PLACES.items()}

    def execution_ms(cpus: int) -> float:
        """CPU time for a micro-batch."""
        return known.block_ms / target.per_block(cpus, known) + known.place_ms

    def execution(cpus: int) -> Hop:
        return Hop(
            f"execution, actors of {cpus} CPU{'s' * (cpus > 1)}",
            needs(lambda share: per_s / rows / 1000 * execution_ms(cpus)),
            1.0,
            "core",
            "pool.cpus_per_actor; pool.max_in_flight",
        )

    to_host = needs(lambda share: gb_per_s * share)
    to_rank = needs(lambda share: gb_per_s / gpus)
    return [
        Hop(
            "read and transform, on the host",
            needs(lambda share: cores * (1 - share)),
            known.host_cpus - 8 * gpus,
            "cores",
            "CPU nodes; --short-side; convert --seekable",
        ),
        Hop(
            "into the object store",
            needs(lambda share: gb_per_s / cores),
            moved.put_gb_per_s,
            "GB/s an actor",
            "more actors",
        ),
        Hop(
            "network into the host",
            to_host,
            known.network_gbit_per_s / 8,
            "GB/s",
            fewer,
        ),
        Hop(
            "object manager: both raylets on these cores", to_host, both, "GB/s", fewer
        ),
        Hop(
            "object manager: its busiest thread",
            to_host,
            1 / moved.thread_cpu_s,
            "GB/s",
            fewer,
        ),
        Hop(
            f"object manager: CPU time of {known.transfer_threads} threads",
            to_host,
            known.transfer_threads / moved.sink_cpu_s,
            "GB/s",
            "RAY_object_manager_rpc_threads_num",
        ),
        execution(1),
        execution(4),
        Hop(
            "copy to pinned memory",
            to_rank,
            copied["copy_gb_per_s"],
            "GB/s a rank",
            "no change needed",
        ),
        Hop(
            "PCIe",
            to_rank,
            copied.get("pcie_gb_per_s", known.pcie_gb_per_s),
            "GB/s a GPU",
            "no change needed",
        ),
        Hop(
            "interpreter of a rank",
            needs(lambda share: per_s / rows / gpus),
            1000 / known.rank_ms,
            "micro-batches/s",
            "larger micro-batches; a lighter preset",
        ),
    ]


def show_hops(measured: list[Hop]) -> None:
    """One table, in Markdown, the fullest first."""
    print(
        f"| hop | there is | {' | '.join(PLACES)} | what moves it |\n| --- | ---: |{' ---: |' * len(PLACES)} --- |"
    )
    for hop in sorted(measured, key=lambda hop: -max(map(hop.used, PLACES))):
        used = " | ".join(
            f"{hop.used(place):.0%}" if hop.needs[place] else "" for place in PLACES
        )
        print(f"| {hop.name} | {hop.has:,.2f} {hop.unit} | {used} | {hop.moves} |")


def show_transfers(rows: list[tuple[str, int, int, Transfer]]) -> None:
    """A table of transfers, each with settings, blocks in flight, and bytes of an image."""
    print(
        "| settings | in flight | GB/s | images/s | CPU s for a GB: put, source, sink | busiest thread |"
    )
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for settings, case, num_bytes, moved in rows:
        cpu = f"{moved.put_cpu_s:.2f}, {moved.source_cpu_s:.2f}, {moved.sink_cpu_s:.2f}"
        rates = f"{moved.gb_per_s:.2f} | {moved.gb_per_s * 1e9 / num_bytes:,.0f}"
        print(
            f"| {settings} | {case} | {rates} | {cpu} | {moved.thread_cpu_s:.2f} ({moved.thread}) |"
        )


def show_prices(
    target: Target, core_hour: float, gb: float, known: Known = KNOWN
) -> None:
    """What CPU nodes and what they send cost for a million images, in dollars."""
    hours = 1e6 / known.per_actor / 3600
    print(
        f"\n| a million images, {hours:.2f} core-hours | CPU nodes | the same and traffic between zones |"
    )
    print("| --- | ---: | ---: |")
    traffic = target.image_bytes * 1e6 / 1e9 * gb
    for place, share in PLACES.items():
        nodes = share * hours * core_hour
        print(f"| actors on {place} | ${nodes:.3f} | ${nodes + share * traffic:.2f} |")


def rate(repeats: int, num_bytes: int, action: Callable[[], object]) -> float:
    """GB/s, the median, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        action()
        found.append(num_bytes / 1e9 / (time.perf_counter() - began))
    return statistics.median(found[1:])


def copies(num_bytes: int, repeats: int) -> dict[str, float]:
    """Host memory to host memory by one thread; with a CUDA device, to pinned memory, and on to the device."""
    source = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    cuda = torch.cuda.is_available()
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=cuda)
    found = {
        "copy_gb_per_s": rate(
            repeats, num_bytes, lambda: np.copyto(pinned.numpy(), source)
        )
    }
    if cuda:
        device = torch.empty_like(pinned, device="cuda")

        def copy() -> None:
            device.copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()

        found["pcie_gb_per_s"] = rate(repeats, num_bytes, copy)
    return found


def checkpoint(repeats: int) -> dict[str, float]:
    """Seconds that training stands still for a checkpoint of ResNet-50, and until that is on the disk."""
    from torchvision.models import resnet50

    model = resnet50().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    still = list[float]()
    whole = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        writer = RunCheckpoints(Path(folder).as_uri())
        for step in range(repeats + 1):
            began = time.perf_counter()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            writer.save(state, Cursor(0, step, "f" * 16), {}, {})
            still.append(time.perf_counter() - began)
            writer.wait()
            whole.append(time.perf_counter() - began)
    return {
        "checkpoint_still_s": statistics.median(still[1:]),
        "checkpoint_whole_s": statistics.median(whole[1:]),
    }


def object_store(
    target: Target, repeats: int, address: str, with_settings: bool
) -> tuple[Transfer, list[tuple[str, int, int, Transfer]]]:
    """Blocks between two nodes: the fastest, and all, for `show_transfers`."""
    block = target.per_block() * target.micro_batch_size * target.image_bytes
    moved = measure([(block, in_flight) for in_flight in IN_FLIGHT], repeats, address)
    rows = [
        ("Ray's own", in_flight, target.image_bytes, transfer)
        for in_flight, transfer in zip(IN_FLIGHT, moved, strict=True)
    ]
    for settings in SETTINGS if with_settings else []:
        (transfer,) = measure([(block, 2)], repeats, settings=settings)
        name = ", ".join(f"{name} {int(value):,}" for name, value in settings.items())
        rows.append((name or "Ray's own, again", 2, target.image_bytes, transfer))
    return max(moved, key=lambda one: one.gb_per_s), rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images-per-s", type=float, default=24_000, help="of all GPUs"
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--micro-batch-size", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--settings", action="store_true", help="measure Ray's settings, too"
    )
    parser.add_argument(
        "--core-hour-price",
        type=float,
        default=0.0425,
        help="dollars: c6i.8xlarge, 1.36 / 32",
    )
    parser.add_argument(
        "--gb-price",
        type=float,
        default=0.02,
        help="dollars: between zones, of both ends",
    )
    parser.add_argument(
        "--address",
        default="",
        help="of a Ray cluster; empty = two raylets on this machine",
    )
    args = parser.parse_args()
    target = Target(args.images_per_s, args.gpus, args.micro_batch_size, args.size)
    load = os.getloadavg()[0]
    best, rows = object_store(
        target, args.repeats, args.address, args.settings and not args.address
    )
    show_transfers(rows)
    copied = copies(target.micro_batch_size * target.image_bytes, args.repeats)
    measured = hops(target, best, copied)
    print()
    show_hops(measured)
    show_prices(target, args.core_hour_price, args.gb_price)
    used = {
        hop.name: {place: hop.used(place) for place in hop.needs} for hop in measured
    }
    figures = {"copies": copied, "checkpoint": checkpoint(args.repeats), "used": used}
    figures |= {
        "transfers": [
            (settings, case, asdict(moved)) for settings, case, _, moved in rows
        ]
    }
    print(
        json.dumps(
            {"settings": vars(args), "load": [load, os.getloadavg()[0]], **figures}
        )
    )


if __name__ == "__main__":
    main()
