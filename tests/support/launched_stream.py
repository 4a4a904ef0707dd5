"""A training of several processes, by a launcher: launched_stream.py STORE FOLDER ENGINE RESUMES KIND DIES_AT.

Each writes the batches that it gets, with a hash of their pixels, into FOLDER, and goes on from the state that the
first one saves there after each step. KIND says how it learns its share:

    ranks     by torchrun or `accelerate launch`
    tensor    by a mesh, in which all processes are one tensor-parallel group
    R/W       by its rank and world size, without a launcher
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import raypipe


def spec_of(store: str, engine: Any) -> raypipe.StreamSpec:
    return raypipe.open_stream(
        store,
        plan=raypipe.PlanConfig(
            epochs=2, micro_batch_size=4, global_batch_size=8, seed=1
        ),
        transform=raypipe.TransformConfig(train="light", size=16),
        # the pool makes the rest, but not all before ranks take some
        pool=raypipe.PoolConfig(engine=engine, head_start=1, max_in_flight=4),
    )


def described(batch: Any) -> str:
    """The place, the samples and a hash of the pixels of a batch."""
    pixels = hashlib.sha256(batch.image.numpy().tobytes()).hexdigest()
    return f"{batch.position} {batch.index.tolist()} {pixels}"


def seen(folder: Path, rank: int) -> list[str]:
    """What a process was given, and forget it."""
    file = folder / f"seen-{rank}"
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def launch(
    store: Path, folder: Path, kind: str, engine: str = "inline", dies_at: int = 0
) -> None:
    """Two processes, of torchrun or of none, to their end."""
    # processes without a launcher begin apart: one may have saved before the other looks
    resumes = str(int((folder / "state").exists()))
    arguments = [__file__, str(store), str(folder), engine, resumes]
    launcher = [sys.executable]
    kinds = [kind]
    if kind == "plain":
        kinds = ["0/2", "1/2"]
    elif "/" not in kind:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        ]
    environment = {
        name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"
    }
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    started = [
        subprocess.Popen([*launcher, *arguments, each, str(dies_at)], env=environment)
        for each in kinds
    ]
    codes = [process.wait() for process in started]
    assert any(codes) == (dies_at > 0), codes


def main() -> None:
    store, folder, engine, resumes, kind, dies_at = sys.argv[1:]
    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if "/" in kind:
        rank, world_size = map(int, kind.split("/"))
        options = {"rank": rank, "world_size": world_size}
    else:
        distributed.init_process_group("gloo")
        rank = distributed.get_rank()
    if kind == "tensor":
        axes = ("dp", "tp")
        options = {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=axes)}
    loader = raypipe.loader(spec_of(store, engine), **options)
    state = Path(folder, "state")
    if int(resumes):
        loader.load_state_dict(torch.load(state))
    with Path(folder, f"seen-{rank}").open("a") as file:
        for epoch in loader.epochs():
            for batch in epoch.train:
                print(described(batch), file=file, flush=True)
                if "/" not in kind:
                    distributed.barrier()
                if batch.ends_step and rank == 0:
                    torch.save(loader.state_dict(), state)
                if loader.global_step == int(dies_at) > 0:
                    os.kill(os.getpid(), 9)
    if engine == "ray":
        import ray

        address = ray.get_runtime_context().gcs_address
        Path(folder, f"cluster-{rank}").write_text(address)


if __name__ == "__main__":
    main()
