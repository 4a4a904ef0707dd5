"""A stream whose images stay on the device is the stream of actors: same order, same draws, mostly same pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import without_ray
from raypipe.streaming.resident import ResidentStream, check_resident
from small_runs import small_run
from without_ray import every_batch

import raypipe
from raypipe.config import AugmentConfig, PlanConfig, PoolConfig, RunConfig, TransformConfig
from raypipe.device.prefetcher import on_device
from raypipe.errors import BadSamplesError, ConfigError, CursorError, SampleError
from raypipe.plan.cursor import Cursor
from raypipe.stores.base import MemoryStore
from raypipe.stores.record import write_bad_list
from raypipe.streaming.digest import batch_digest
from raypipe.streaming.pipeline import stream
from raypipe.streaming.spec import StreamSpec

from conftest import picture  # isort: skip

CPU = torch.device("cpu")
INLINE, DEVICE = PoolConfig(engine="inline"), PoolConfig(cache="device")
PLAN = PlanConfig(epochs=3, micro_batch_size=4, global_batch_size=16, seed=5)
CONFIG = TransformConfig(train="flip-crop", val="none", size=16)
NUM, NUM_VAL = 70, 11


def image(index: int, side: int = 16) -> bytes:
    pixels = np.random.default_rng(index).integers(0, 256, (side, side, 3), np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def store(num: int = NUM, first: int = 0, **options: Any) -> MemoryStore:
    images: list[bytes | None] = [image(first + i) for i in range(num)]
    for index in options.pop("bad", ()):
        images[index] = b"\x89PNG damaged"
    return MemoryStore(images, [i % 5 for i in range(num)], **options)


def spec(train: Any = None, pool: PoolConfig = DEVICE, **options: Any) -> StreamSpec:
    options = {"plan": PLAN, "transform": CONFIG, "val": store(NUM_VAL, 1000), **options}
    return StreamSpec(train or store(), options.pop("val"), pool=pool, **options)


def digests(resident: StreamSpec, from_step: int = 0, rank: int = 0, world_size: int = 1) -> list[bytes]:
    made = ResidentStream(resident, CPU, rank, world_size)
    return [batch_digest(batch) for batch in made.whole_batches(resident.plan.cursor_at(from_step))]


def streamed(resident: StreamSpec, **options: Any) -> StreamSpec:
    """The same, made by the CPU's transform as actors do."""
    return resident.replace(pool=INLINE, **options)


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "left out and filtered": {"train": store(columns={"n": range(NUM)}), "exclude": "LIST", "filter": "n < 50"},
    "a mixture, weighted by epochs": {
        "train": {"a": store(30), "b": store(45, 500)},
        "plan": dataclasses.replace(PLAN, mixture={0: {"a": 1.0, "b": 3.0}, 2: {"a": 1.0, "b": 1.0}}),
    },
    "classes in balance": {"plan": dataclasses.replace(PLAN, class_balance=1.0)},
    "repeats": {"plan": dataclasses.replace(PLAN, repeats=2)},
    "in groups": {"train": store(group_size=9), "plan": dataclasses.replace(PLAN, shuffle="window")},
    "bad samples": {
        "train": store(bad=(3, 40, 41)),
        "val": store(NUM_VAL, 1000, bad=(2,)),
        "transform": dataclasses.replace(CONFIG, bad_grace=100),
    },
}


@pytest.mark.parametrize("name", STREAMS)
def test_crops_and_flips_give_the_digest_of_the_stream_through_all_epochs(name: str, tmp_path: Path) -> None:
    options = dict(STREAMS[name])
    if "exclude" in options:
        options["exclude"] = str(tmp_path / "bad.json")
        write_bad_list(options["exclude"], options["train"], [{"index": index} for index in (0, 7, 49)])
    options["quarantine"] = tmp_path.as_uri()
    kept = spec(**options)
    assert kept.plan.fingerprint == spec(pool=INLINE, **options).plan.fingerprint
    assert digests(kept) == without_ray.digests(streamed(kept))
    records = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    assert bool(records) is (name == "bad samples")
    without_ray.digests(streamed(kept, quarantine=(tmp_path / "streamed").as_uri()))
    found = {path.name: path.read_text() for path in (tmp_path / "streamed").glob("*.jsonl")}
    assert found == records, "the same substitutes, for the same reasons"


def test_it_goes_on_at_any_step_of_an_epoch() -> None:
    resident = ResidentStream(spec(), CPU)
    plan = spec().plan
    whole = {batch.at: batch_digest(batch) for batch in resident.whole_batches(plan.start())}
    for step in range(3 * plan.steps_per_epoch):
        rest = {batch.at: batch_digest(batch) for batch in resident.whole_batches(plan.cursor_at(step))}
        assert list(rest) == list(plan.micro_batches(plan.cursor_at(step)))
        assert rest == {at: whole[at] for at in rest}


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_what_one_has(world_size: int) -> None:
    ranks = [digests(spec(), 1, rank, world_size) for rank in range(world_size)]
    assert [one for each in zip(*ranks, strict=True) for one in each] == digests(spec(), 1)


def same(batch: Any, expected: Any) -> None:
    assert batch.at == expected.at and batch.seed == expected.seed and batch.ends_step == expected.ends_step
    for name in ("image", "target", "weight"):
        found, wanted = getattr(batch, name), getattr(expected, name)
        assert torch.equal(found, wanted) and found.stride() == wanted.stride() and found.dtype == wanted.dtype
    assert np.array_equal(batch.index, expected.index) and np.array_equal(batch.label, expected.label)


@pytest.mark.parametrize(
    "augment", [None, AugmentConfig(preset="standard", mixup_alpha=0.4, cutmix_alpha=1.0, mean=(0.5,) * 3)]
)
def test_a_loader_has_the_batches_of_the_stream_and_goes_on_from_its_state(augment: AugmentConfig | None) -> None:
    kept = spec()
    loader = raypipe.loader(kept, augment=augment)
    expected = every_batch(raypipe.loader(streamed(kept), augment=augment))
    states = []
    for batch in every_batch(loader):
        same(batch, next(expected))
        states.append(loader.state_dict())
    assert next(expected, None) is None and loader.times().images == 3 * 64 and loader.first_batch_s > 0
    middle = Cursor.from_dict(states[len(states) // 2])
    loader.load_state_dict(states[len(states) // 2])
    rest = list(every_batch(loader))
    wanted = list(every_batch(raypipe.loader(streamed(kept), augment=augment, cursor=middle)))
    assert len(rest) == len(wanted) > 5
    for batch, one in zip(rest, wanted, strict=True):
        same(batch, one)


def test_a_batch_stays_as_it_is_when_the_next_one_has_come() -> None:
    batches = list(every_batch(raypipe.loader(spec())))
    for batch, host in zip(batches, without_ray.host_batches(streamed(spec())), strict=True):
        assert np.array_equal(batch.image.permute(0, 2, 3, 1).numpy(), host.image)


def test_draws_go_through_the_ring() -> None:
    made = ResidentStream(spec(), CPU)
    start = spec().plan.start()
    ring = on_device(made.batches(start), CPU, spec().plan.micro_batch_seed, ring=True, gather=made.gather)
    for batch, host in zip(ring, made.whole_batches(start), strict=True):
        assert np.array_equal(batch.image.permute(0, 2, 3, 1).numpy(), host.image)
        assert batch.target.tolist() == host.label.tolist() == batch.label.tolist()


def test_columns_and_targets_are_those_of_the_stream() -> None:
    captions = [f"image {index}" for index in range(NUM)]
    train = MemoryStore(
        [image(index) for index in range(NUM)],
        np.arange(NUM) / 2,
        columns={"caption": captions, "vector": np.arange(2 * NUM).reshape(NUM, 2)},
    )
    kept = spec(train, val=None, columns=["caption", "vector"])
    assert digests(kept) == without_ray.digests(streamed(kept))
    for batch in every_batch(raypipe.loader(kept)):
        assert batch.columns["caption"] == [captions[index] for index in batch.index]
        assert batch.columns["vector"][:, 0].tolist() == (2 * batch.index).tolist()
        assert batch.target.tolist() == (batch.index / 2).tolist()


@pytest.mark.parametrize(("train", "val"), [("light", "none"), ("small", "resize"), ("none", "light")])
def test_where_pixels_are_interpolated_the_fingerprint_says_so_and_all_else_is_the_same(
    train: str, val: str
) -> None:
    config = TransformConfig(train=train, val=val, size=16)
    kept, plain = spec(transform=config), spec(transform=config, pool=INLINE)
    assert kept.plan.fingerprint != plain.plan.fingerprint
    with pytest.raises(CursorError):
        kept.plan.check(plain.plan.start())
    expected = without_ray.host_batches(plain)
    for batch in ResidentStream(kept, CPU).whole_batches(kept.plan.start()):
        host = next(expected)
        assert np.array_equal(batch.index, host.index) and np.array_equal(batch.label, host.label)
        assert np.abs(batch.image.astype(int) - host.image).max() <= 1
    assert next(expected, None) is None
    assert digests(kept, 2) == digests(kept)[-len(digests(kept, 2)) :]


def test_images_of_several_sizes_go_where_the_transform_begins_with_a_resize() -> None:
    train = MemoryStore([picture(i, 20 + i % 3, 30) for i in range(NUM)], [0] * NUM)
    resized = spec(train, transform=TransformConfig(train="resize", val="center", size=12))
    assert digests(resized) == without_ray.digests(streamed(resized))
    with pytest.raises(ConfigError, match=r"sample 1 is 29 x 38, where the first one is 28 x 38 .*: begin the"):
        ResidentStream(spec(train), CPU)


def test_a_store_that_does_not_fit_is_refused_with_its_size_and_what_to_do(monkeypatch: Any) -> None:
    num_bytes = (NUM + 1) * 24 * 24 * 3 + (
        NUM_VAL + 1
    ) * 16 * 16 * 3  # the border is held as well, and a black image
    small = spec(pool=PoolConfig(cache="device", cache_bytes=num_bytes - 1))
    message = rf"take {num_bytes:,} bytes, and pool\.cache_bytes={num_bytes - 1} allows.*pool\.cache='disk'"
    for check in (check_resident, lambda spec: ResidentStream(spec, CPU)):
        with pytest.raises(ConfigError, match=message):
            check(small)
    enough = spec(pool=PoolConfig(cache="device", cache_bytes=num_bytes))
    check_resident(enough)
    for world_size, allowed in ((1, num_bytes), (2, num_bytes // 2)):
        monkeypatch.setattr("raypipe.streaming.resident.free_bytes", lambda device: 2 * num_bytes)
        check_resident(enough, CPU)
        if allowed < num_bytes:
            with pytest.raises(ConfigError, match=rf"25% of what is free on cpu allows {allowed:,}"):
                ResidentStream(spec(), CPU, 0, world_size)
        else:
            ResidentStream(spec(), CPU, 0, world_size)
    monkeypatch.setattr("raypipe.streaming.resident.free_bytes", lambda device: num_bytes - 1)
    with pytest.raises(ConfigError, match=r"100% of what is free on cpu"):
        ResidentStream(enough, CPU)


def test_bad_samples_end_a_run_as_they_do_in_a_stream() -> None:
    bad = store(bad=range(20, 36))
    for pool in (DEVICE, INLINE):
        with pytest.raises(BadSamplesError, match=r"samples are bad, more than"):
            list(every_batch(raypipe.loader(spec(bad, pool))))
        strict = spec(bad, pool, transform=dataclasses.replace(CONFIG, on_bad_sample="raise"))
        with pytest.raises(SampleError, match=r"memory:\w+ sample \d+: .*on_bad_sample='substitute'"):
            list(every_batch(raypipe.loader(strict)))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heavy": ({"train": "heavy"}, r"transform\.train=heavy has MotionBlur"),
    "validation": ({"val": "heavy"}, r"transform\.val=heavy has MotionBlur"),
    "sizes": ({"size": {0: 12, 1: 16}}, r"transform\.size has 12, 16"),
    "views": ({"train": "simclr"}, r"transform\.train makes views"),
    "gpu": ({"decode": "gpu", "train": "light", "val": "center"}, r"transform\.decode='gpu'"),
    "arrays": ({"decode_as": "array"}, r"transform\.decode_as='array'"),
    "masks": ({"mask_column": "mask"}, r"transform\.mask_column"),
    "crops": ({"crop_decode": "scaled"}, r"transform\.crop_decode='scaled'"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_with_it_is_refused_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"pool\.cache='device'.*{message}"):
        spec(transform=dataclasses.replace(CONFIG, **settings))


def test_buckets_and_ray_datasets_are_refused() -> None:
    sized = store(columns={"width": [16] * NUM, "height": [16] * NUM})
    with pytest.raises(ConfigError, match=r"pool\.cache='device' holds images of one size, and plan\.buckets"):
        spec(sized, plan=dataclasses.replace(PLAN, buckets=["16x16", "8x16"]))
    with pytest.raises(ConfigError, match=r"is a Dataset.*pool\.cache is 'device': raypipe\.loader"):
        stream(store(), plan=PLAN, transform=CONFIG, pool=DEVICE)
    with pytest.raises(ConfigError, match=r"no stream to measure"):
        raypipe.commands.bench.bench(RunConfig(pool=DEVICE))


def test_a_run_learns_what_the_stream_teaches(stores: dict[str, Path], tmp_path: Path) -> None:
    run = small_run(tmp_path, stores["train"], stores["val"], 2, 4)
    run = dataclasses.replace(run, transform=TransformConfig(train="flip-crop", val="resize", size=12))
    losses = {}
    for name, pool in (("streamed", INLINE), ("device", DEVICE)):
        done = without_ray.train(dataclasses.replace(run, name=name, pool=pool))
        state = torch.load(
            sorted(Path(done["run_dir"]).glob("checkpoint_*/state.pt"))[-1], weights_only=True, map_location="cpu"
        )
        losses[name] = state["model"]
    assert losses["device"].keys() == losses["streamed"].keys()
    for name, value in losses["device"].items():
        assert torch.equal(value, losses["streamed"][name]), name
