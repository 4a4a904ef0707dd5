"""What raypipe is for: one small test for each thing that a user comes for, by the public API or the command line.

Read this file first: each test is the shortest use of one capability. Other files test the same parts in depth.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import albumentations as A  # noqa: N812
import cv2
import kornia.augmentation as K  # noqa: N812
import launched_stream
import numpy as np
import pytest
import ray
import torch
import watched_net
import without_ray
from albumentations.pytorch import ToTensorV2
from documented import ROOT
from noisy_dataset import Noisy
from patience import until
from pictures import samples
from small_runs import Capture, Patch, final_weights, parse_run, run_command, small_run
from small_streams import (
    FIXED,
    INLINE,
    LMDBS,
    NUM,
    PLAN,
    CountingStore,
    as_on_arrays,
    assert_ends_on_device,
    assert_equal,
    assert_trains_on,
    batches_of,
    images,
    kornia_module,
    labels_of,
    shares_changed,
    spec_of,
    store_of,
)
from tars import put
from torchvision.transforms import v2

import raypipe
from raypipe.commands import cli
from raypipe.launch.run import launch
from raypipe.metrics.timing import Situation, StageTimes, diagnose
from raypipe.stores.sources import open_source

# `raypipe.convert` and the actors use the cluster that all tests share.
pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """An LMDB of 48 JPEGs in 5 classes."""
    return store_of("lmdb", tmp_path)


def test_lmdb(store: Path, tmp_path: Path) -> None:
    """raypipe's own, and those that others wrote, in place."""
    assert_trains_on(store)
    for kind in set(LMDBS) - {"texts", "pickle"}:
        assert_trains_on(store_of(kind, tmp_path))
    text = spec_of(store_of("texts", tmp_path), target_column="", columns=["text"])
    words = [word for batch in batches_of(text) for word in batch.columns["text"]]
    assert sorted(words) == sorted(2 * [f"word {i % 5}" for i in range(NUM)])
    pickles = store_of("pickle", tmp_path)
    with pytest.raises(raypipe.RaypipeError, match=r"--store\.trust-pickles true"):
        spec_of(pickles)
    assert_trains_on(pickles, trust_pickles=True)


def test_parquet(tmp_path: Path, bucket: str) -> None:
    for kind in ("hugging face", "parquet", "many parquet"):
        assert_trains_on(store_of(kind, tmp_path))
    raypipe.convert(store_of("parquet", tmp_path), f"{bucket}/train.parquet")
    assert_trains_on(f"{bucket}/train.parquet")


def test_webdataset(tmp_path: Path, bucket: str, capsys: Capture) -> None:
    assert_trains_on(store_of("tar.gz", tmp_path))
    local = store_of("tar", tmp_path)
    assert_trains_on(local)
    for path in tmp_path.glob("*.tar"):
        put(path, f"{bucket}/{path.name}")
    remote = f"{bucket}/{local.name}"
    assert run_command(capsys, "index", remote)["samples"] == NUM
    assert_trains_on(remote)


def test_other_stores(tmp_path: Path, capsys: Capture) -> None:
    """One command makes a store of each; files of MXNet, TensorFlow, MosaicML, LitData and datasets are theirs."""
    kinds = [store_of(kind, tmp_path) for kind in ("hdf5", "zip")]
    for number, source in enumerate([*kinds, "small_streams:rows"]):
        made = tmp_path / f"{number}.lmdb"
        assert run_command(capsys, "convert", source, made)["samples"] == NUM
        assert_trains_on(made)
    records = ("mxnet/one-label.rec", "tensorflow-train.tfrecord")
    for name in (*records, "mds", "litdata", "arrow"):
        found = open_source(ROOT / "tests" / "stores" / "data" / name)
        assert found is not None and len(list(found.samples)) == 8
    raypipe.convert(iter(samples(NUM)), tmp_path / "iterable.lmdb")
    assert_trains_on(tmp_path / "iterable.lmdb")


def test_lists_of_files(tmp_path: Path, bucket: str, capsys: Capture) -> None:
    """A table names files on disk, in a bucket, or both."""
    for kind in ("csv", "tsv", "jsonl", "paths"):
        assert_trains_on(store_of(kind, tmp_path))
    table = tmp_path / "train.csv"
    for path in (table, *tmp_path.glob("photos/*.jpg")):
        put(path, f"{bucket}/{path.relative_to(tmp_path)}")
    assert_equal(batches_of(spec_of(table)), batches_of(spec_of(f"{bucket}/train.csv")))
    assert run_command(capsys, "convert", table, tmp_path / "t.lmdb")["samples"] == NUM


@pytest.mark.usefixtures("two_cpus")
def test_any_dataset() -> None:
    def loader(**options: int) -> raypipe.DataLoader:
        torch.manual_seed(7)
        return raypipe.DataLoader(Noisy(NUM), 8, shuffle=True, **options)

    def taken(loader: raypipe.DataLoader) -> torch.Tensor:
        batches = [batch for _ in range(2) for batch in loader]
        for items, about in batches:
            assert torch.equal(items.long()[:, 0], about["index"])
        return torch.cat([items for items, _ in batches])

    here = taken(loader())
    assert torch.equal(taken(loader(num_workers=2)), here)
    stopped = loader()
    for _ in zip(range(3), stopped, strict=False):
        state = stopped.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert torch.equal(taken(resumed), here[24:])
    spec = raypipe.open_stream(Noisy(NUM), plan=PLAN, pool=INLINE)
    assert len(torch.cat([batch.collated[0] for batch in batches_of(spec)])) == 2 * NUM


def test_splits(store: Path) -> None:
    """A part of each class is held out for validation, or a share is trained on, without files of one's own."""
    spec = spec_of(store, take={"val": "25% by class"})
    for epoch in raypipe.loader(spec).epochs():
        trained = {index for batch in epoch.train for index in batch.index.tolist()}
        held_out = {index for batch in epoch.val for index in batch.index.tolist()}
        assert len(trained) == 32 and len(held_out - {-1}) == 12
        assert not trained & held_out
    assert spec_of(store, take="first 16").plan.num_train == 16


def test_ray_data(tmp_path: Path) -> None:
    made = tmp_path / "dataset.lmdb"
    raypipe.convert(ray.data.from_items(samples(NUM)), made)
    assert_trains_on(made)
    spec = spec_of(made)
    second = batches_of(spec)[NUM // 8 :]
    epoch = raypipe.dataset(spec, epoch=1, channels_first=True)
    found = epoch.iter_torch_batches(batch_size=8)
    for ours, batch in zip(found, second, strict=True):
        assert torch.equal(ours["image"], batch.image)
        assert torch.equal(ours["label"], batch.target)
    dataset = raypipe.read_lmdb(made, columns=["label", "image"], override_num_blocks=4)
    # Ray Data takes blocks as they come, unless it is told to preserve their order.
    threes = sorted(row["image"] for row in dataset.take_all() if row["label"] == 3)
    assert threes == sorted(images()[3::5])


# The CPU half


@pytest.mark.usefixtures("two_cpus")
def test_actors(store: Path) -> None:
    spec = spec_of(store, pool=raypipe.PoolConfig(max_actors=2))
    assert_equal(batches_of(spec), batches_of(spec_of(store)))


def test_albumentations(store: Path) -> None:
    """A pipeline as it stands in a training script: what its last steps make, the device makes."""
    steps = [A.RandomCrop(16, 16), A.HorizontalFlip(), A.RandomBrightnessContrast()]
    last = [A.Normalize((0.5, 0.4, 0.3), (0.3, 0.2, 0.1)), ToTensorV2()]
    ended = as_on_arrays(A.Compose(last))
    assert_ends_on_device(store, A.Compose, steps, last, ended)


def test_torchvision_v2(store: Path) -> None:
    crop = [v2.ToImage(), v2.RandomResizedCrop(16), v2.RandomHorizontalFlip()]
    normalize = v2.Normalize((0.5, 0.4, 0.3), (0.3, 0.2, 0.1))
    last = [v2.ToDtype(torch.float32, scale=True), normalize]
    steps = [*crop, v2.ColorJitter(0.4)]
    assert_ends_on_device(store, v2.Compose, steps, last, v2.Compose(last))


def test_fast_decode(store: Path) -> None:
    """The crop alone is decoded, with the pixels of the whole image, cropped: those of libjpeg-turbo."""
    center = A.Compose([A.CenterCrop(16, 16)])
    batch = batches_of(spec_of(store, train_transform=center))[0]
    encoded = raypipe.open_store(store).read(batch.index)["image"]
    for image, jpeg in zip(batch.image, encoded, strict=True):
        whole = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR_RGB)
        top = (whole.shape[0] - 16) // 2
        left = (whole.shape[1] - 16) // 2
        cropped = whole[top : top + 16, left : left + 16]
        assert np.array_equal(image.permute(1, 2, 0), cropped)


def test_decode_once(store: Path, tmp_path: Path) -> None:
    raypipe.convert(store, tmp_path / "short.lmdb", short_side=20)
    assert len(raypipe.open_store(tmp_path / "short.lmdb")) == NUM
    assert_trains_on(tmp_path / "short.lmdb")


# The device half


def test_kornia(store: Path) -> None:
    """A module makes the pixels of a call by hand, given as an object or by name."""
    augmented = batches_of(spec_of(store), augment=kornia_module())
    by_hand = kornia_module()
    for batch, raw in zip(augmented, batches_of(spec_of(store)), strict=True):
        torch.manual_seed(batch.seed)
        assert torch.equal(batch.image, by_hand(raw.image.float() * (1 / 255)))
    name = "small_streams:kornia_module"
    by_name = raypipe.AugmentConfig(module=name, mean=(0, 0, 0), std=(1, 1, 1))
    assert_equal(augmented, batches_of(spec_of(store), augment=by_name))


def test_kornia_moves_masks_and_boxes(tmp_path: Path) -> None:
    targets = raypipe.TransformConfig(
        train="none", targets={"mask": "mask", "boxes": "boxes", "max": 2}
    )
    keys = ["input", "mask", "bbox_xyxy"]
    moves = K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), data_keys=keys)
    boxes = store_of("boxes", tmp_path)
    spec = spec_of(boxes, transform=targets, target_column=None)
    for batch in batches_of(spec, augment=moves):
        x0 = batch.fields["boxes"][:, 0, 0]
        assert set(x0.tolist()) == {0, 16}
        assert torch.equal(batch.fields["mask"][:, 0, 0] == 1, x0 == 0)


def test_batch_transforms(store: Path) -> None:
    """Erasing, and MixUp and CutMix by their own shares."""
    shares = {"mixup_alpha": (0.4, 0.4), "cutmix_alpha": (1, 0.4)}
    augment = raypipe.AugmentConfig(ops=[{"op": "RandomErasing", "p": 1}], **shares)
    batches = batches_of(spec_of(store), augment=augment)
    kinds = [batch.mix and batch.mix.is_cutmix for batch in batches]
    assert set(kinds) == {None, False, True}


def test_differentiable(store: Path) -> None:
    """The gradient of a loss with respect to the CPU's pixels, and the same augmentation of changed pixels."""
    augment = raypipe.AugmentConfig(preset="strong", differentiable=True)
    for batch in batches_of(spec_of(store), augment=augment):
        (gradient,) = torch.autograd.grad(batch.image.square().mean(), batch.pixels)
        assert gradient.shape == batch.pixels.shape and gradient.any()
        brighter = batch.augment((batch.pixels + 0.1).detach())
        assert not torch.equal(brighter, batch.image)


def test_gpu_decode(store: Path) -> None:
    """Actors send encoded bytes; the rank's device decodes, crops and augments the same samples, seeded."""
    encoded = replace(FIXED, train="light", decode="device")
    augment = raypipe.AugmentConfig(preset="standard")
    spec = spec_of(store, transform=encoded)
    device = batches_of(spec, augment=augment)
    assert_equal(device, batches_of(spec, augment=augment))
    pixels = spec_of(store, transform=replace(encoded, decode="cpu"))
    host = batches_of(pixels, augment=augment)
    for ours, other in zip(device, host, strict=True):
        assert ours.index.tolist() == other.index.tolist()
        # the same crops, flips and augmentation
        assert (ours.image - other.image).abs().mean() < 0.1


def test_prefetch(store: Path, cuda_or_pretended: None) -> None:
    """Batches come by a CUDA stream of their own, into a ring of pinned memory, normalized there."""
    options = {"augment": raypipe.AugmentConfig(), "keep_batches": 9}
    batches = batches_of(spec_of(store), device="cuda", **options)
    assert {batch.image.dtype for batch in batches} == {torch.float32}
    assert {batch.image.device.type for batch in batches} == {"cuda"}


def test_cache() -> None:
    slow = CountingStore()
    kept = spec_of(slow, in_memory=True)
    before = slow.num_read
    assert_equal(batches_of(kept), batches_of(spec_of(CountingStore())))
    assert slow.num_read - before <= NUM  # in two epochs


def test_cache_on_the_device(store: Path, cuda_or_pretended: None) -> None:
    """A small set is decoded once, into the GPU's memory, and comes in the order of the stream."""
    data = raypipe.resident(store, "cuda", plan=PLAN, size=16, border=2, flip=0.5)
    streamed = batches_of(spec_of(store, transform=FIXED))
    found = [batch for number in range(PLAN.epochs) for batch in data.epoch(number)]
    for ours, other in zip(found, streamed, strict=True):
        assert ours.index.tolist() == other.index.tolist()
        assert (ours.image.device.type, *ours.image.shape) == ("cuda", 8, 3, 16, 16)


@pytest.mark.usefixtures("idle_cluster", "two_cpus")
def test_interleave_prefetch_parallel_map_autotune(tmp_path: Path) -> None:
    """Nothing is set: a batch mixes the files, and as many actors as there is room for work ahead of the loop."""

    def transform(image: np.ndarray) -> np.ndarray:
        (tmp_path / f"made by {os.getpid()}").touch()
        return image[:16, :16]

    def two_work() -> bool:
        next(batches)  # the first actor may have made all that is ahead of the loop
        made = {path.name for path in tmp_path.glob("made by *")}
        return len(made - {f"made by {os.getpid()}"}) >= 2

    train = store_of("many parquet", tmp_path)
    long = {"plan": replace(PLAN, epochs=100_000), "pool": raypipe.PoolConfig()}
    with raypipe.loader(spec_of(train, train_transform=transform, **long)) as loader:
        batches = (batch for epoch in loader.epochs() for batch in epoch.train)
        index = next(batches).index
        assert index.min() < NUM // 2 <= index.max()
        until(two_work)


def test_debug(store: Path) -> None:
    """A debugger stops in a transform, since it runs in this process."""
    seen: list[int] = []

    def transform(image: np.ndarray) -> np.ndarray:
        seen.append(os.getpid())
        return image[:16, :16]

    batches_of(spec_of(store, train_transform=transform, val_transform=transform))
    assert set(seen) == {os.getpid()}


@pytest.mark.usefixtures("two_cpus")
def test_seeds(store: Path, tmp_path: Path, capsys: Capture) -> None:
    written = tmp_path / "one.json"
    plan = ("--plan.micro-batch-size=8", "--plan.global-batch-size=16")
    digest = ("digest", store, *plan, "--plan.epochs=2", "--transform.size=16")
    inline = ("--pool.engine=inline", "--output", written)
    assert len(run_command(capsys, *digest, *inline)["digest"]) == 32
    elsewhere = ("--pool.max-actors=2", "--train.num-workers=2", "--from-step=1")
    assert run_command(capsys, *digest, *elsewhere, "--compare", written)["equal"]


@pytest.mark.usefixtures("one_cpu")
def test_persistent_workers(store: Path) -> None:
    """One actor makes every epoch and every validation."""

    def mark(image: np.ndarray) -> np.ndarray:
        return np.full((16, 16, 3), os.getpid() % 251, np.uint8)

    pool = raypipe.PoolConfig(max_actors=1)
    spec = spec_of(store, store, train_transform=mark, val_transform=mark, pool=pool)
    batches = without_ray.every_batch(raypipe.loader(spec))
    pids = {pid for batch in batches for pid in batch.image.flatten().tolist()}
    assert len(pids) == 1


# Training


def test_mesh(store: Path, tmp_path: Path) -> None:
    """Under torchrun, a tensor-parallel group gets the same batches; data ranks get a share each."""
    spec = launched_stream.spec_of(str(store), "inline")
    alone = [launched_stream.described(batch) for batch in batches_of(spec)]
    launched_stream.launch(store, tmp_path, "tensor")
    for rank in range(2):
        assert launched_stream.seen(tmp_path, rank) == alone
        loader = raypipe.loader(spec, rank=rank, world_size=2)
        share = map(launched_stream.described, without_ray.every_batch(loader))
        assert list(share) == alone[rank::2]


def test_ddp(store: Path, tmp_path: Path) -> None:
    """Two workers learn the weights that one learns."""
    run = small_run(tmp_path, store, store, 1, 2)
    alone = final_weights(without_ray.train(replace(run, name="alone")))
    two = replace(run.train, num_workers=2, cpus_per_worker=0.5)
    together = final_weights(launch(replace(run, name="two", train=two)))
    for name, value in alone.items():
        assert torch.equal(value, together[name]), name


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_precision(amp: str, store: Path, tmp_path: Path) -> None:
    """AMP and accumulated gradients; images are channels_last in memory on any device."""
    result = without_ray.train(watched_net.run_of(tmp_path, store, amp=amp))
    assert result["steps"] == NUM // 12
    assert all(value.isfinite().all() for value in final_weights(result).values())
    for dtype, _, layouts in watched_net.seen:
        assert dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]
        assert layouts["image"] and layouts["features"]


def test_precision_on_the_device(
    store: Path, tmp_path: Path, cuda_or_pretended: None, monkeypatch: Patch
) -> None:
    """On CUDA, channels_last and cudnn.benchmark are on by themselves, for weights too."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    without_ray.train(watched_net.run_of(tmp_path, store), device="cuda")
    assert watched_net.seen
    for dtype, chooses, layouts in watched_net.seen:
        assert dtype == torch.bfloat16 and chooses and all(layouts.values())


def test_imbalance(tmp_path: Path) -> None:
    balanced = replace(PLAN, weights=1.0, epoch_samples=160)
    batches = batches_of(spec_of(store_of("rare", tmp_path), plan=balanced))
    shares = np.bincount(labels_of(batches)) / 320
    assert shares == pytest.approx([0.5, 0.5], abs=0.1)


@pytest.mark.system
def test_policy_search(store: Path, tmp_path: Path) -> None:
    """Ray Tune tries policies, compares the best with the run's own, and writes a config that trains."""
    search = runpy.run_path(str(ROOT / "jobs" / "tune.py"))["search"]
    run = small_run(tmp_path, store, store, 2, 2)
    result = search(replace(run, name="search", pool=INLINE), trials=2, seeds=2)
    assert len(result["best"]) == len(result["default"]) == 2
    winner = parse_run([f"--config={tmp_path}/search/best.yaml"], None)
    assert winner.plan == run.plan


def test_strength(store: Path) -> None:
    """No augmentation at the run's start and end, all of it in between, on the CPU and the device."""
    rise_and_fall = {"strength": (0.5, 1, 0.5)}
    heavy = replace(FIXED, train="heavy", val="center")
    weak = batches_of(spec_of(store, transform=replace(heavy, **rise_and_fall)))
    none = batches_of(spec_of(store, transform=replace(heavy, strength=0.0)))
    on_cpu = shares_changed(weak, none)
    assert on_cpu[:2] == [0, 0] and all(on_cpu[2:])
    spec = spec_of(store, transform=FIXED)
    ops = [{"op": "RandomHorizontalFlip", "p": 1.0}]
    plain = raypipe.AugmentConfig(ops=ops, mean=(0, 0, 0), std=(1, 1, 1))
    flips = batches_of(spec, augment=replace(plain, **rise_and_fall))
    on_device = shares_changed(flips, batches_of(spec), 255)
    assert on_device[0] == 0 and max(on_device) > on_device[-1]


def test_validation(store: Path) -> None:
    """Validation is the same in every epoch, not augmented, and counts each sample once."""
    strong = raypipe.AugmentConfig(preset="strong")
    loader = raypipe.loader(spec_of(store, store), augment=strong)
    epochs = [list(epoch.val) for epoch in loader.epochs()]
    assert_equal(*epochs)
    assert sum(float(batch.weight.sum()) for batch in epochs[0]) == NUM


def test_bottleneck(store: Path, tmp_path: Path) -> None:
    """The run says who waits for whom, the GPU's utilization, and what to change."""
    result = without_ray.train(small_run(tmp_path, store, store, 2, 2))
    records = (Path(result["run_dir"]) / "metrics.jsonl").read_text()
    assert "of a trainer is" in records
    fed = StageTimes(1000, 1, compute_s=99, utilization_sum=0.4, utilization_samples=1)
    advice = " ".join(diagnose(fed, Situation(1, 4, "cuda")))
    assert "it executes kernels for 40%" in advice
    assert "compile: true in train.model" in advice


def test_resume(store: Path, tmp_path: Path) -> None:
    """`kill -9`, then the same command: the next step, the same bits."""
    program = str(ROOT / "tests/support/resumed_stream.py")

    def steps(state: str) -> dict[str, str]:
        command = [sys.executable, program, str(store), str(tmp_path / state)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return dict(line.split() for line in done.stdout.splitlines())

    (tmp_path / "mine.kill").touch()
    killed = steps("mine")
    resumed = steps("mine")
    assert len(killed) == 5 and not resumed.keys() & killed.keys()
    assert killed | resumed == steps("unbroken")


def test_submit() -> None:
    """`ray job submit … python jobs/train.py`; tests/test_jobs.py submits it to a cluster."""
    job = runpy.run_path(str(ROOT / "jobs/train.py"))["train"]
    assert job is cli.COMMANDS["train"]


def test_container(store: Path, tmp_path: Path, capsys: Capture) -> None:
    """The image holds what `raypipe` needs, and a notebook looks at augmented images."""
    options = ("--transform.size=16", "--augment.preset=strong")
    run_command(capsys, "preview", store, "-o", tmp_path / "grid.png", *options)
    assert (tmp_path / "grid.png").stat().st_size > 1000
    assert "COPY raypipe raypipe" in (ROOT / "deploy" / "Dockerfile").read_text()
    assert "preview(" in (ROOT / "docs" / "preview.ipynb").read_text()
