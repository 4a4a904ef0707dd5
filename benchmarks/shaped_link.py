"""A stream over a link of limited speed: what arrives, and where the bytes wait. Linux, as root.

    python benchmarks/shaped_link.py [--gbit-per-s 1 10 --seconds 20]

Two nodes of a Ray cluster on this machine, each in a network namespace of its own, joined by a pair of virtual
interfaces that `tc` shapes (token bucket): a head with the consumer, as the GPUs' host has it, and a CPU node with
two actors. Their transform costs nothing, so that the link is the limit, or the object manager. For each speed:
images/s, bytes on the link, and how full the object stores of both nodes are at most. A table; the last line
is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="rp-"))

import raypipe  # noqa: F401  # isort: skip
import cv2
import numpy as np
import psutil
import ray
from ray._private.internal_api import node_stats

from raypipe.config import PlanConfig, PoolConfig
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.row import host_batches
from raypipe.streaming.spec import StreamSpec

from resume import RepeatedStore  # isort: skip

_GPUS = "10.77.0.1"
_CPUS = "10.77.0.2"
_SIDE = 224
_ROWS = 128
_STORE_BYTES = 3_000_000_000
_PORT = 6399


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def link(gbit_per_s: float) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a link between them."""
    names = f"rp{os.getpid()}a", f"rp{os.getpid()}b"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "rp0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "rp0",
            "netns",
            names[1],
        )
        for name, ours, other in zip(
            names, (_GPUS, _CPUS), (_CPUS, _GPUS), strict=True
        ):
            _ip("-n", name, "addr", "add", f"{ours}/24", "dev", "rp0")
            for device in ("lo", "rp0"):
                _ip("-n", name, "link", "set", device, "up")
            # by which Ray finds its own address
            _ip("-n", name, "route", "add", "default", "via", other)
            bucket = ["rate", f"{gbit_per_s}gbit", "burst", "2mb", "latency", "20ms"]
            subprocess.run(
                [
                    "tc",
                    "-n",
                    name,
                    "qdisc",
                    "add",
                    "dev",
                    "rp0",
                    "root",
                    "tbf",
                    *bucket,
                ],
                check=True,
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@contextlib.contextmanager
def cluster(namespaces: tuple[str, str]) -> Iterator[None]:
    """A head without CPUs in the first namespace, a node of two in the second."""
    common = [
        "--block",
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
    ]
    head = [
        "--head",
        f"--port={_PORT}",
        f"--node-ip-address={_GPUS}",
        "--num-cpus=0",
        "--include-dashboard=false",
    ]
    node = [f"--address={_GPUS}:{_PORT}", f"--node-ip-address={_CPUS}", "--num-cpus=2"]
    processes = []
    ray_program = str(Path(sys.executable).parent / "ray")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    log = Path(os.environ["RAY_TMPDIR"], "nodes.log").open("w")  # noqa: SIM115  closed with this process
    try:
        for namespace, options in zip(namespaces, (head, node), strict=True):
            command = [
                "ip",
                "netns",
                "exec",
                namespace,
                ray_program,
                "start",
                *options,
                *common,
            ]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )
            time.sleep(6)
        yield
    finally:
        for process in processes[::-1]:  # all of a node: there is nothing to keep
            below = psutil.Process(process.pid)
            for one in [*below.children(recursive=True), below]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait()


def spec_of() -> StreamSpec:
    image = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    result = np.random.default_rng(0).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    return open_stream(
        RepeatedStore(MemoryStore([image], [0]), 4_000_000),
        plan=PlanConfig(epochs=1, micro_batch_size=_ROWS),
        train_transform=lambda image: result,
        pool=PoolConfig(min_actors=2, max_actors=2),
    )


def _received() -> int:
    return int(Path("/sys/class/net/rp0/statistics/rx_bytes").read_text())


def measure(seconds: float) -> dict[str, float]:
    """A stream from a CPU node into this one; in the namespace of the head."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        address=f"{_GPUS}:{_PORT}", _node_ip_address=_GPUS, logging_level=logging.ERROR
    )
    nodes: dict[str, int] = {}
    while len(nodes) < 2:
        time.sleep(0.2)
        nodes = {
            node["NodeManagerAddress"]: node["NodeManagerPort"]
            for node in ray.nodes()
            if node["Alive"]
        }
    spec = spec_of()
    (iterator,) = splits(spec, spec.plan.start(), max_actors=2)
    batches = host_batches(iterator)

    def used(address: str) -> int:
        return int(
            node_stats(
                address, nodes[address], include_memory_info=False
            ).store_stats.object_store_bytes_used
        )

    began = time.perf_counter()
    count = 0
    first = 0
    looked = 0.0
    grown = 15.0  # until blocks are as large as they get
    most = {_GPUS: 0, _CPUS: 0}
    start = bytes_before = 0.0
    for _ in batches:
        now = time.perf_counter()
        count += 1
        if now - began < grown:
            first = count
            start = now
            bytes_before = _received()
            continue
        if now - looked > 0.5:
            looked, most = (
                now,
                {address: max(most[address], used(address)) for address in most},
            )
        if now - start > seconds:
            break
    elapsed = time.perf_counter() - start
    received = _received() - bytes_before
    batches.close()  # type: ignore[attr-defined]
    return {
        "images_per_s": (count - first) * _ROWS / elapsed,
        "gbit_per_s": received * 8e-9 / elapsed,
        "consumer_store_mb": most[_GPUS] / 1e6,
        "actors_store_mb": most[_CPUS] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit-per-s", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        status = 1
        try:
            print(json.dumps(measure(args.seconds)), flush=True)
            status = 0
        except Exception:
            traceback.print_exc()
        os._exit(status)  # the execution goes on until the nodes end
    rows = []
    print(
        "| link, Gbit/s | images/s | Gbit/s on it | store at the consumer, MB | at the actors, MB |"
    )
    print("| ---: | ---: | ---: | ---: | ---: |", flush=True)
    for gbit_per_s in args.gbit_per_s:
        with link(gbit_per_s) as namespaces, cluster(namespaces):
            inside = [
                sys.executable,
                __file__,
                "--inside",
                "--seconds",
                str(args.seconds),
            ]
            command = ["ip", "netns", "exec", namespaces[0], *inside]
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=200, check=True
            )
        row = {"link": gbit_per_s, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        rates = f"{row['images_per_s']:,.0f} | {row['gbit_per_s']:.2f}"
        stores = f"{row['consumer_store_mb']:,.0f} | {row['actors_store_mb']:,.0f}"
        print(f"| {gbit_per_s:g} | {rates} | {stores} |", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
