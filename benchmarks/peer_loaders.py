"""Each loader, set up as its documentation advises, tuned as far as it lets one.

A loader is a function of the Work. It imports what it needs, which is not timed, and returns a function that, when
called, starts it and yields an iterator of batches for each epoch. A batch is (image uint8 (B, size, size, 3) or
(B, 3, size, size), label (B,)). All shuffle; all use as many
workers; all that let one choose decode with simplejpeg (libjpeg-turbo) and transform with Albumentations, by the
same pipelines.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from peer_data import Work

Epochs = Iterator[Iterator[tuple[Any, Any]]]
Start = Callable[[], Epochs]

_SHUFFLE = 1000  # samples of the buffer of those that shuffle by one
_BLOCK_BYTES = 1 << 20  # Ray Data's own least size of a block


class DecodeTransform:
    """Encoded bytes → uint8 HWC, in every loader that takes a function of one's own. Pickles as its settings."""

    def __init__(self, work: Work) -> None:
        self._name = work.transform
        self._size = work.size

    def __getstate__(self) -> dict[str, Any]:
        return {"_name": self._name, "_size": self._size}

    @cached_property
    def _pipeline(self) -> Any:
        import cv2

        from raypipe.transform.presets import _STEPS
        from raypipe.transform.transform_steps import build_steps

        cv2.setNumThreads(0)
        return build_steps(_STEPS[self._name](self._size))

    def __call__(self, data: bytes) -> np.ndarray:
        import simplejpeg

        return self._pipeline(image=simplejpeg.decode_jpeg(data))["image"]


def _spec(work: Work, store: str = "train.lmdb", **transform: Any) -> Any:
    """The stream of one rank."""
    from raypipe.config import PlanConfig, PoolConfig, TransformConfig
    from raypipe.streaming.opening import open_stream

    return open_stream(
        work.folder / store,
        # One epoch more than is consumed: what is measured is not helped by actors that have no more to do.
        plan=PlanConfig(epochs=work.epochs + 1, micro_batch_size=work.batch),
        transform=TransformConfig(train=work.transform, size=work.size, **transform),
        pool=PoolConfig(min_actors=work.workers, max_actors=work.workers),
    )


def raypipe_exact(work: Work, **options: Any) -> Start:
    from raypipe.streaming import ray_stream  # noqa: F401  imported, as the other loaders are
    from raypipe.streaming.handover import loader

    def start() -> Epochs:
        stream = loader(_spec(work, **options), max_actors=work.workers)
        for epoch in stream.epochs():
            yield ((batch.image, batch.target) for batch in epoch.train)

    return start


def raypipe_logged(work: Work) -> Start:
    """With the record of hashes, whose own CPU time, microseconds per image, goes to the folder's hash_cost.json.

    Of the hash that is the time once the pixels have been read, as a consumer reads them in any case.
    """
    import json
    import shutil
    import time

    from raypipe.streaming import (
        hashes,
        ray_stream,  # noqa: F401
    )
    from raypipe.streaming.handover import loader
    from raypipe.streaming.record import digest_log

    spent = {"read": 0.0, "hash": 0.0, "record": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.thread_time()
            result = function(*arguments)
            spent[name] += time.thread_time() - started
            return result

        return call

    read = timed("read", lambda batch: batch["image"].max())
    hash_of = timed("hash", hashes.batch_hash)

    def read_and_hashed(batch: Any) -> bytes:
        read(batch)
        return hash_of(batch)

    hashes.batch_hash = read_and_hashed
    digest_log.DigestLog.add = timed("record", digest_log.DigestLog.add)  # type: ignore[method-assign]
    run = work.folder / "logged"
    shutil.rmtree(run, ignore_errors=True)

    def start() -> Epochs:
        stream = loader(
            _spec(work), max_actors=work.workers, run_dir=run, log_digest=True
        )
        for epoch in stream.epochs():
            yield ((batch.image, batch.target) for batch in epoch.train)
            num = (epoch.number + 1) * len(epoch.train) * work.batch
            micros = {name: 1e6 * seconds / num for name, seconds in spent.items()}
            (work.folder / "hash_cost.json").write_text(json.dumps(micros))

    return start


def raypipe_seekable(work: Work) -> Start:
    return raypipe_exact(work, store="seekable.lmdb")


def _ray_init() -> None:
    import logging

    import ray

    # Twice the CPUs: its actors take all, and its readers need some (FACTS: else it hangs, ray#44687).
    ray.init(
        num_cpus=2 * len(os.sched_getaffinity(0)),
        include_dashboard=False,
        logging_level=logging.ERROR,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False


def _ray_epochs(dataset: Any, work: Work, **options: Any) -> Epochs:
    for _ in range(work.epochs):
        batches = dataset.iter_batches(batch_size=work.batch, drop_last=True, **options)
        yield ((batch["image"], batch["label"]) for batch in batches)


def ray_data(work: Work) -> Start:
    """As its guides for images and for training have it: read, shuffle files, map rows, iterate."""
    import ray

    apply = DecodeTransform(work)

    def row(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": apply(row["image"]), "label": row["label"]}

    def start() -> Epochs:
        _ray_init()
        dataset = ray.data.read_parquet(
            str(work.folder / "parquet"), shuffle="files"
        ).map(row)
        yield from _ray_epochs(dataset, work)

    return start


class _Rows:
    """A stateful transform of a batch, for an actor pool."""

    def __init__(self, work: Work) -> None:
        self._apply = DecodeTransform(work)
        self._apply._pipeline  # noqa: B018  built while the actor starts

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            "image": np.stack([self._apply(data) for data in batch["image"]]),
            "label": batch["label"],
        }


def ray_data_tuned(work: Work) -> Start:
    """As its performance guide has it, and further: an actor pool that always has work, any order, prefetching.

    Blocks of one batch each, so that batches are neither cut nor put together, and read tasks of a few of them, so
    that the actors start before a whole file is read. `shuffle="files"` alone, since a local shuffle costs more.
    """
    import ray

    def start() -> Epochs:
        _ray_init()
        context = ray.data.DataContext.get_current()
        context.target_max_block_size = max(_BLOCK_BYTES, work.batch * work.size**2 * 3)
        context.execution_options.preserve_order = False
        context.execution_options.verbose_progress = False
        dataset = ray.data.read_parquet(
            str(work.folder / "parquet"), shuffle="files", num_cpus=0.1
        )
        dataset = dataset.map_batches(
            _Rows,
            fn_constructor_args=(work,),
            batch_size=work.batch,
            num_cpus=1,
            zero_copy_batch=True,
            compute=ray.data.ActorPoolStrategy(
                size=work.workers, max_tasks_in_flight_per_actor=4
            ),
        )
        yield from _ray_epochs(dataset, work, prefetch_batches=4)

    return start


def _files(folder: Path) -> tuple[list[str], list[int]]:
    classes = sorted(entry.name for entry in folder.iterdir())
    found = [
        (str(path), n)
        for n, name in enumerate(classes)
        for path in sorted((folder / name).iterdir())
    ]
    return [path for path, _ in found], [label for _, label in found]


class _StoreDataset:
    """Map-style, over the file that raypipe reads; a batch is fetched at once."""

    def __init__(self, work: Work) -> None:
        from raypipe.stores import open_store

        self._store = open_store(work.folder / "train.lmdb")
        self._apply = DecodeTransform(work)

    def __len__(self) -> int:
        return len(self._store)

    def __getitems__(self, indices: list[int]) -> list[tuple[np.ndarray, int]]:
        rows = self._store.read(np.array(indices))
        labels = rows["label"].tolist()
        return [
            (self._apply(data), label)
            for data, label in zip(rows["image"], labels, strict=True)
        ]


class _StoreSource(_StoreDataset):
    """The same for those that ask for one sample at a time."""

    def __getitem__(self, index: Any) -> tuple[np.ndarray, int]:
        return self.__getitems__([int(index)])[0]


def _collate(samples: list[tuple[np.ndarray, int]]) -> tuple[Any, Any]:
    import torch

    # Straight into shared memory, as torch's own collate does for tensors in a worker.
    first = samples[0][0]
    shape = (len(samples), *first.shape)
    storage = torch.UntypedStorage._new_shared(int(np.prod(shape)))
    image = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
    np.stack([pixels for pixels, _ in samples], out=image.numpy())
    return image, torch.tensor([label for _, label in samples])


def _loader_options(work: Work) -> dict[str, Any]:
    import torch

    return {
        "batch_size": work.batch,
        "num_workers": work.workers,
        "persistent_workers": True,
        "prefetch_factor": 4,
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": _collate,
        "drop_last": True,
    }


def _repeated(loader: Any, work: Work) -> Epochs:
    for _ in range(work.epochs):
        yield iter(loader)


def torch_dataloader(work: Work) -> Start:
    from torch.utils.data import DataLoader

    def start() -> Epochs:
        dataset: Any = _StoreDataset(work)
        yield from _repeated(
            DataLoader(dataset, shuffle=True, **_loader_options(work)), work
        )

    return start


class _Items:
    """A Dataset as articles write it, over the same file: an item is decoded and transformed in __getitem__."""

    def __init__(self, work: Work) -> None:
        from raypipe.stores import open_store

        self._store = open_store(work.folder / "train.lmdb")
        self._apply = DecodeTransform(work)

    def __len__(self) -> int:
        return len(self._store)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        row = self._store.read(np.array([index]))
        pixels = self._apply(row["image"][0])
        return torch.from_numpy(pixels), int(row["label"][0])


def torch_items(work: Work) -> Start:
    import albumentations  # noqa: F401  as a program that has such a Dataset
    from torch.utils.data import DataLoader

    def start() -> Epochs:
        options = _loader_options(work) | {"collate_fn": None}
        dataset: Any = _Items(work)
        yield from _repeated(DataLoader(dataset, shuffle=True, **options), work)

    return start


def raypipe_items(work: Work) -> Start:
    """With the Dataset, its collate function and the workers of the torch DataLoader."""
    import albumentations  # noqa: F401

    import raypipe
    from raypipe.streaming import open_items, ray_stream  # noqa: F401

    def start() -> Epochs:
        loader = raypipe.DataLoader(
            _Items(work),
            batch_size=work.batch,
            shuffle=True,
            num_workers=work.workers,
            drop_last=True,
        )
        yield from _repeated(loader, work)

    return start


def webdataset(work: Work) -> Start:
    import webdataset as wds

    apply = DecodeTransform(work)

    def start() -> Epochs:
        urls = sorted(map(str, (work.folder / "tar").iterdir()))
        dataset = (
            wds.WebDataset(urls, shardshuffle=len(urls), nodesplitter=wds.split_by_node)
            .shuffle(_SHUFFLE)
            .to_tuple("jpg", "cls")
            .map_tuple(apply, int)
            .batched(work.batch, collation_fn=_collate, partial=False)
        )
        options = {
            name: _loader_options(work)[name]
            for name in ("num_workers", "persistent_workers")
        }
        loader = wds.WebLoader(
            dataset, batch_size=None, shuffle=False, prefetch_factor=4, **options
        )
        yield from _repeated(loader, work)

    return start


def _decoding(base: Any, work: Work) -> Any:
    """A subclass of a dataset of samples with `image` and `label`, which decodes and transforms."""
    apply = DecodeTransform(work)

    class Images(base):
        def __getitem__(self, at: Any) -> Any:
            sample = super().__getitem__(at)
            return apply(sample["image"]), sample["label"]

    return Images


def mosaic_streaming(work: Work) -> Start:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    images = _decoding(StreamingDataset, work)

    def start() -> Epochs:
        clean_stale_shared_memory()
        dataset = images(
            local=str(work.folder / "mds"), shuffle=True, batch_size=work.batch
        )
        yield from _repeated(DataLoader(dataset, **_loader_options(work)), work)

    return start


def litdata(work: Work) -> Start:
    from litdata import StreamingDataLoader, StreamingDataset

    images = _decoding(StreamingDataset, work)

    def start() -> Epochs:
        dataset = images(str(work.folder / "litdata"), shuffle=True, drop_last=True)
        yield from _repeated(
            StreamingDataLoader(dataset, **_loader_options(work)), work
        )

    return start


def hf_datasets(work: Work) -> Start:
    import datasets
    from torch.utils.data import DataLoader

    apply = DecodeTransform(work)
    datasets.disable_progress_bars()
    files = sorted(map(str, (work.folder / "parquet").iterdir()))
    # Its own copy in Arrow files is part of its set-up, as the other formats are.
    cache = str(work.folder / "hf")
    dataset: Any = datasets.Dataset.from_parquet(files, cache_dir=cache)

    def transform(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "image": [apply(data) for data in rows["image"]],
            "label": rows["label"],
        }

    def collate(rows: list[dict[str, Any]]) -> tuple[Any, Any]:
        return _collate([(row["image"], row["label"]) for row in rows])

    def start() -> Epochs:
        options = _loader_options(work) | {"collate_fn": collate}
        yield from _repeated(
            DataLoader(dataset.with_transform(transform), shuffle=True, **options), work
        )

    return start


def dali_cpu(work: Work) -> Start:
    """The fused decode of the crop; operators of its own, since Python ones would be slower."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    paths, labels = _files(work.folder / "folder")

    @pipeline_def(enable_conditionals=True)
    def pipeline() -> Any:
        data, label = fn.readers.file(
            files=paths,
            labels=labels,
            random_shuffle=True,
            initial_fill=_SHUFFLE,
            name="r",
        )
        size = (work.size, work.size)
        if work.transform == "flip-crop":
            image = fn.decoders.image(data, device="cpu", output_type=types.RGB)
            # A crop of the image with 4 pixels of padding around it.
            start = fn.random.uniform(
                values=list(range(-4, 5)), shape=(2,), dtype=types.INT32
            )
            image = fn.slice(
                image,
                start=start,
                shape=size,
                axis_names="HW",
                out_of_bounds_policy="pad",
            )
        else:
            image = fn.decoders.image_random_crop(
                data,
                device="cpu",
                output_type=types.RGB,
                random_area=[0.08, 1.0],
                random_aspect_ratio=[3 / 4, 4 / 3],
            )
            image = fn.resize(
                image, size=size, interp_type=types.INTERP_LINEAR, antialias=False
            )
        image = fn.flip(image, horizontal=fn.random.coin_flip())
        if work.transform == "heavy":
            if fn.random.coin_flip(probability=0.2, dtype=types.BOOL):
                # A horizontal blur: the kernels of a motion blur in all directions are not among its operators.
                image = fn.gaussian_blur(image, window_size=[1, 5])
            image = fn.color_twist(
                image,
                brightness=fn.random.uniform(range=[0.8, 1.2]),
                contrast=fn.random.uniform(range=[0.8, 1.2]),
                saturation=fn.random.uniform(range=[0.8, 1.2]),
                hue=fn.random.uniform(range=[-36.0, 36.0]),
            )
        return image, label

    def start() -> Epochs:
        pipe = pipeline(
            batch_size=work.batch, num_threads=work.workers, device_id=None, seed=1
        )
        loader = DALIGenericIterator(
            [pipe],
            ["image", "label"],
            reader_name="r",
            last_batch_policy=LastBatchPolicy.DROP,
            auto_reset=True,
        )
        for _ in range(work.epochs):
            yield ((batch[0]["image"], batch[0]["label"]) for batch in loader)

    return start


def spdl(work: Work) -> Start:
    """Threads, as it advises: decode and transform let go of the interpreter's lock for most of their time.

    A batch for each call, since its event loop takes longer to make a call than some images take.
    """
    import random
    import threading

    from spdl.pipeline import PipelineBuilder

    paths, labels = _files(work.folder / "folder")
    local = threading.local()

    def batch(indices: list[int]) -> tuple[np.ndarray, np.ndarray]:
        if not hasattr(local, "apply"):
            local.apply = DecodeTransform(work)
        pixels = [local.apply(Path(paths[index]).read_bytes()) for index in indices]
        return np.stack(pixels), np.array([labels[index] for index in indices])

    def start() -> Epochs:
        for _ in range(work.epochs):
            order = random.sample(range(len(paths)), len(paths))
            pipeline = (
                PipelineBuilder()
                .add_source(order)
                .aggregate(work.batch, drop_last=True)
                .pipe(batch, concurrency=work.workers)
                .add_sink(2)
                .build(num_threads=work.workers)
            )
            with pipeline.auto_stop():
                yield iter(pipeline.get_iterator())

    return start


def grain(work: Work) -> Start:
    """Processes, each of which makes whole batches; one iterator over all epochs, so that they start once."""

    import grain

    def batch(samples: Any) -> tuple[np.ndarray, np.ndarray]:
        return np.stack([image for image, _ in samples]), np.array(
            [label for _, label in samples]
        )

    def start() -> Epochs:
        source: Any = _StoreSource(work)
        dataset = grain.MapDataset.source(source).seed(1).shuffle()
        dataset = dataset.batch(work.batch, drop_remainder=True, batch_fn=batch)
        num_batches = len(dataset)
        # A thread for each process: more would wait for each other's interpreter.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        processes = grain.MultiprocessingOptions(
            num_workers=work.workers, per_worker_buffer_size=4
        )
        iterator = iter(
            dataset.repeat(work.epochs).to_iter_dataset(options).mp_prefetch(processes)
        )
        for _ in range(work.epochs):
            yield itertools.islice(iterator, num_batches)
        iterator.close()

    return start


def lancedb(work: Work) -> Start:
    """Its StreamingDataset, with the transform in threads of its own, as it is made for."""
    import threading

    import lancedb
    from lancedb.streaming import StreamingDataset
    from torch.utils.data import DataLoader

    local = threading.local()

    def rows(batch: Any) -> list[tuple[np.ndarray, int]]:
        if not hasattr(local, "apply"):
            local.apply = DecodeTransform(work)
        images = batch.column("image").to_pylist()
        labels = batch.column("label").to_pylist()
        return [
            (local.apply(data), label)
            for data, label in zip(images, labels, strict=True)
        ]

    def start() -> Epochs:
        table = lancedb.connect(str(work.folder / "lance")).open_table("train")
        for epoch in range(work.epochs):
            dataset = StreamingDataset(
                table,
                epoch=epoch,
                transform=rows,
                transform_parallelism=work.workers,
                transform_queue_depth=8,
            )
            yield iter(
                DataLoader(
                    dataset, batch_size=work.batch, collate_fn=_collate, drop_last=True
                )
            )

    return start


LOADERS: dict[str, Callable[[Work], Start]] = {
    "raypipe": raypipe_exact,
    "raypipe, seekable": raypipe_seekable,
    "raypipe, log_digest": raypipe_logged,
    "raypipe, any Dataset": raypipe_items,
    "torch DataLoader": torch_dataloader,
    "torch DataLoader, the same Dataset": torch_items,
    "WebDataset": webdataset,
    "MosaicML Streaming": mosaic_streaming,
    "LitData": litdata,
    "Hugging Face datasets": hf_datasets,
    "DALI on CPU": dali_cpu,
    "SPDL": spdl,
    "Grain": grain,
    "LanceDB": lancedb,
    "Ray Data, tuned": ray_data_tuned,
    "Ray Data, as documented": ray_data,
}

FORMATS = {
    "raypipe, seekable": "seekable.lmdb",
    "WebDataset": "tar",
    "MosaicML Streaming": "mds",
    "LitData": "litdata",
    "Hugging Face datasets": "parquet",
    "DALI on CPU": "folder",
    "SPDL": "folder",
    "LanceDB": "lance",
    "Ray Data, tuned": "parquet",
    "Ray Data, as documented": "parquet",
}
"""What each reads, by its name in `Work.folder`; the others read raypipe's own, train.lmdb."""
