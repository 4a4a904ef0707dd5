"""The hashes of many streams, and of the weights of a run on the CPU, to compare before and after a change.

    python tests/stream_hashes.py before.json           write them
    python tests/stream_hashes.py --against before.json   and say which have changed; exit code 1 if any has

Every store, transform and target of small data made here goes through `raypipe convert`, `raypipe digest` and
jobs/train.py as a user would call them, so that no change within the program needs a change here.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

sys.path.append(str(Path(__file__).parent / "support"))
from local_head import RAY_ON_THIS_MACHINE, LocalHead

ROOT = Path(__file__).parents[1]
# of the environment that runs this
RAYPIPE = str(Path(sys.executable).parent / "raypipe")
NUM, CLASSES = 90, "abcde"


def image(index: int, kind: str = ".jpg") -> bytes:
    rng = np.random.default_rng(index)
    height, width = 40 + index % 23, 52 - index % 17
    pixels = cv2.resize(rng.integers(0, 256, (5, 6, 3), np.uint8), (width, height))
    return cv2.imencode(kind, pixels)[1].tobytes()


def make_stores(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """Name → address: one store of each kind."""
    images = folder / "images"
    for index in range(NUM):
        kind = ".png" if index % 9 == 0 else ".jpg"
        path = images / CLASSES[index % 5] / f"{index:03}{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(index, kind))
    subprocess.run(
        ["tar", "cf", folder / "images.tar", "--sort=name", "-C", images, "."],
        check=True,
    )
    masks = [np.full((40 + i % 23, 52 - i % 17), i % 7, np.uint8) for i in range(NUM)]
    boxes = [
        [[2.0 + i % 5, 3, 20, 25, i % 5], [1, 1, 9, 9, 1]][: 1 + i % 2]
        for i in range(NUM)
    ]
    columns = {
        "image": [image(i) for i in range(NUM)],
        "label": [i % 5 for i in range(NUM)],
        "mask": [cv2.imencode(".png", mask)[1].tobytes() for mask in masks],
        "boxes": pa.array(boxes, pa.list_(pa.list_(pa.float32()))),
    }
    pyarrow.parquet.write_table(
        pa.table(columns), folder / "targets.parquet", row_group_size=16
    )

    def convert(source: Path, name: str, *options: str) -> str:
        command = [RAYPIPE, "convert", str(source), str(folder / name), *options]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return str(folder / name)

    return {
        "folder": str(images),
        "tar": str(folder / "images.tar"),
        "lmdb": convert(images, "images.lmdb"),
        "lmdb-shards": convert(images, "shards.lmdb", "--shards=3"),
        "parquet": convert(images, "images.parquet"),
        "webdataset": webdataset(images, folder / "webdataset.tar"),
        "short-side": convert(images, "short.lmdb", "--short_side=32"),
        "targets": str(folder / "targets.parquet"),
    }


def webdataset(images: Path, tar: Path) -> str:
    """A tar of key.jpg beside key.cls, in the order of the classes."""
    with tarfile.open(tar, "w") as file:
        for index, path in enumerate(sorted(images.rglob("*.*"))):
            label = b"%d" % CLASSES.index(path.parent.name)
            for suffix, content in (
                ("cls", label),
                (path.suffix[1:], path.read_bytes()),
            ):
                member = tarfile.TarInfo(f"{index:09d}.{suffix}")
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
    return str(tar)


FORMER = '''
"""`raypipe digest` with the hash of a micro-batch that it once had, to compare any two states."""
import hashlib, sys
from itertools import islice
import numpy as np
from raypipe.streaming import digest
from raypipe.transform.fields import COLUMN, IMAGE, LABEL, VIEW, Ragged, in_group

def former(batch):
    fields, index = batch.arrays(), batch.index
    image, label = fields.get(IMAGE, np.empty(0, np.uint8)), fields[LABEL]
    found = hashlib.blake2b(f"{batch.position} {image.shape}".encode(), digest_size=16)
    arrays = [index, label, batch.weight, image]
    if image.dtype != np.uint8:
        found.update(f"image\\0{image.dtype}".encode())
    arrays += [fields[name] for name in ("mask", "boxes") if name in fields]
    if label.dtype != np.int64 or label.ndim != 1:
        found.update(f"label\\0{label.dtype}\\0{label.shape}".encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.digest()

def digested(batches):
    for batch in batches:
        num = int((batch.weight > 0).sum())
        yield digest.MicroBatchDigest(str(batch.position), former(batch), num)

def consume(iterator):
    digests = digested(digest.host_batches(iterator))
    while chunk := list(islice(digests, 16)):
        yield chunk

digest._consume = consume
from raypipe.commands.cli import main
main(sys.argv[1:])
'''


def cases(stores: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of `raypipe digest`: what the actors make."""
    usual = [
        "--plan.epochs=2",
        "--plan.micro_batch_size=8",
        "--plan.global_batch_size=16",
        "--plan.seed=3",
    ]
    usual += ["--transform.size=24"]
    for name, address in stores.items():
        yield name, [address, *usual]
    lmdb, parquet = stores["lmdb"], stores["parquet"]
    for name in ("heavy", "light", "small", "resize", "center"):
        yield f"transform {name}", [lmdb, *usual, f"--transform.train={name}"]
    for name in ("global", "window", "off"):
        yield f"shuffle {name}", [parquet, *usual, f"--plan.shuffle={name}"]
    both = [lmdb, "--store.val", parquet, *usual]
    yield "train and val", both
    yield "two actors", [*both, "--pool.max_actors=2"]
    yield "two workers", [*both, "--train.num_workers=2"]
    yield "resume", [*both, "--from_step=4"]
    yield "masks", [stores["targets"], *usual, "--transform.targets={mask: mask}"]
    yield "boxes", [stores["targets"], *usual, "--transform.targets={boxes: boxes}"]


FED = """
import hashlib, json, sys
import numpy as np, ray, raypipe
store, transform, augment = sys.argv[1], *map(json.loads, sys.argv[2:])
ray.init(logging_level="ERROR")
spec = raypipe.open_stream(
    store, store, plan=raypipe.PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=3),
    transform=raypipe.TransformConfig(size=24, **transform), pool=raypipe.PoolConfig(cpus_per_actor=0.5),
)
found = hashlib.blake2b(digest_size=16)
for epoch in raypipe.loader(spec, augment=raypipe.AugmentConfig(**augment) if augment else None).epochs():
    for batch in [*epoch.train, *epoch.val]:
        for values in (batch.index, batch.target_host, batch.weight, batch.image):
            found.update(np.asarray(values).tobytes())
print(found.hexdigest())
"""


def fed(stores: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Name and arguments of FED: what the device gets, on the CPU."""
    yield "fed", [stores["lmdb"], "{}", "{}"]
    mixing = (
        '{"preset": "strong", "mixup_alpha": [0.4, 0.45], "cutmix_alpha": [1.0, 0.45]}'
    )
    yield "fed, augmented", [stores["lmdb"], "{}", mixing]


def last_line(arguments: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{arguments} ended with exit code {done.returncode}: {done.stderr[-2000:]}"
        )
    return done.stdout.strip().splitlines()[-1]


def weights(folder: Path, environment: dict[str, str]) -> str:
    """Of a run on the CPU with the embedded digits: a hash over its model's tensors."""
    command = [
        sys.executable,
        str(ROOT / "jobs" / "train.py"),
        "--storage_path",
        str(folder / "runs"),
        "--name=fixed",
    ]
    command += ["--plan.epochs=2", "--plan.seed=7"]
    subprocess.run(
        command,
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    newest = max((folder / "runs" / "fixed").glob("checkpoint_*"))
    state = torch.load(newest / "state.pt", weights_only=True, map_location="cpu")
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(state["model"].items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", nargs="?", help="a JSON file to write")
    parser.add_argument("--against", help="a JSON file that was written before")
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    found: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="hashes-") as name,
        LocalHead(num_cpus=4) as head,
    ):
        folder = Path(name)
        own = {
            "RAY_ADDRESS": head.gcs_address,
            "RAYPIPE_CACHE": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        environment = {**os.environ, **head.environment, **RAY_ON_THIS_MACHINE, **own}
        stores = make_stores(folder, environment)
        commands = [
            (case, [sys.executable, "-c", FORMER, "digest", *arguments])
            for case, arguments in cases(stores)
        ]
        commands += [
            (case, [sys.executable, "-c", FED, *arguments])
            for case, arguments in fed(stores)
        ]
        for case, arguments in commands:
            if options.only in case:
                # Without the store's address: its folder has another name in each run.
                found[case] = last_line(arguments, environment).replace(name, "")
                print(f"{case:24}{found[case]}", flush=True)
        if options.only in "weights":
            found["weights"] = weights(folder, environment)
            print(f"{'weights':24}{found['weights']}", flush=True)
    if options.output:
        Path(options.output).write_text(json.dumps(found, indent=1) + "\n")
    if not options.against:
        return 0
    before = json.loads(Path(options.against).read_text())
    changed = [case for case, value in found.items() if before.get(case) != value]
    print(
        f"{len(found) - len(changed)} of {len(found)} are as before; changed: {', '.join(changed) or 'none'}"
    )
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
