from __future__ import annotations

import gc
import io
import itertools
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import without_ray
from PIL import Image

from raypipe.config import Cache, PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.stores import open_store
from raypipe.stores.base import MemoryStore
from raypipe.stores.folder import FolderStore
from raypipe.streaming.digest import batch_digest, combine, iterate_digests
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.opening import open_stream
from raypipe.streaming.pipeline import splits
from raypipe.streaming.spec import StreamSpec
from raypipe.transform import sample_cache
from raypipe.transform.decode import decode, encode_jpeg
from raypipe.transform.sample_cache import SampleCache, open_caches
from raypipe.transform.samples import Decoded

from pictures import picture  # isort: skip

LIMIT = 32 << 20


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of caches, in memory: empty, and nobody else's."""
    folder = Path("/dev/shm") / f"raypipe-test-{os.getpid()}"
    monkeypatch.setenv("RAYPIPE_CACHE", str(folder))
    yield folder / "samples"
    shutil.rmtree(folder, ignore_errors=True)


def numbered(num: int, shape: tuple[int, int] = (8, 9)) -> MemoryStore:
    """Its images need not be decodable: these tests put pixels."""
    return MemoryStore([b"%d %d %d" % (i, *shape) for i in range(num)], list(range(num)))


def pixels_of(index: int, shape: tuple[int, int] = (8, 9)) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (*shape, 3), np.uint8)


def opened(store: Any, cache: Cache = LIMIT, **transform: Any) -> SampleCache:
    pool = PoolConfig(cache=cache)
    return open_caches(pool, {"train": store}, TransformConfig(**transform))["train"]


def fill(cache: SampleCache, num: int, shape: tuple[int, int] = (8, 9)) -> None:
    for index in range(num):
        cache.put(index, index * 10, pixels_of(index, shape))


def check(found: dict[int, Decoded], shape: tuple[int, int] = (8, 9)) -> None:
    """Whatever was found at position i is sample i."""
    for index, sample in found.items():
        assert np.array_equal(sample.pixels, pixels_of(index, shape)) and sample.label == index * 10


def files(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.name != ".lock"}


# What is kept


def test_what_one_has_put_another_finds_and_cannot_change() -> None:
    store = numbered(50)
    one, other = opened(store), opened(store)
    fill(one, 30)
    found = other.find(np.array([3, -1, 40, 29, 3]))
    assert set(found) == {0, 3, 4}
    check({3: found[0], 29: found[3]})
    with pytest.raises(ValueError, match="read-only"):
        found[0].pixels[:] = 0


def test_many_processes_share_samples_and_none_reads_a_wrong_one() -> None:
    store = numbered(300)
    cache = opened(store)
    context = multiprocessing.get_context("fork")

    def write_and_read() -> None:
        own = SampleCache(cache._path, TransformConfig())
        for index in range(300):
            own.put(index, index * 10, pixels_of(index))
            if index % 10 == 0:
                check(own.find(np.arange(300)))

    workers = [context.Process(target=write_and_read) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 4
    found = cache.find(np.arange(300))
    assert len(found) == 300
    check(found)


_WRITE = """
import sys
from pathlib import Path
import numpy as np
from raypipe.config import TransformConfig
from raypipe.transform.sample_cache import SampleCache
cache = SampleCache(Path(sys.argv[1]), TransformConfig())
pixels = np.random.default_rng(1).integers(0, 256, (6000, 9000, 3), np.uint8)
print("ready", flush=True)
cache.put(1, 10, pixels)
cache.put(0, 0, pixels)
"""


def test_a_process_killed_while_writing_leaves_nothing_that_is_read() -> None:
    shape = (6000, 9000)  # 162 MB: many milliseconds of writing
    cache = opened(numbered(3), cache=400 << 20)
    file = cache._path
    process = subprocess.Popen([sys.executable, "-c", _WRITE, str(file)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while file.stat().st_blocks * 512 < 1 << 20 and process.poll() is None:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert 1 << 20 <= file.stat().st_blocks * 512 < 160_000_000, "it was not in the midst of its writing"
    assert cache.find(np.arange(3)) == {}
    cache.put(1, 10, pixels_of(1, shape))
    found = cache.find(np.arange(3))
    assert set(found) == {1}
    check(found, shape)


def test_words_and_records_that_no_process_has_written_are_not_read() -> None:
    cache = opened(numbered(4))
    fill(cache, 2)
    cache._words[2] = cache._words[0]  # the record of another sample
    cache._words[3] = 1 << 63  # behind the file's end
    with cache._path.open("r+b") as file:
        file.seek(int(cache._words[1]) + 16)
        file.write(b"\xff\xff\xff\xff")  # a height that reaches beyond it
    check(cache.find(np.arange(4)))
    assert set(cache.find(np.arange(4))) == {0}


# The limit


def test_a_full_cache_keeps_to_its_limit_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    limit = 40_000
    store = numbered(500)
    one, other = opened(store, limit), opened(store, limit)
    fill(one, 500)
    fill(other, 500)
    kept = one.find(np.arange(500))
    assert one.full and other.full and 100 < len(kept) < 200
    check(kept)
    assert one._path.stat().st_size <= limit
    (record,) = caplog.records
    assert f"40,000 bytes hold {len(kept)} of 500 samples" in record.message
    needed = int(record.message.split("pool.cache=")[1].split()[0])
    larger = opened(store, needed)
    fill(larger, 500)
    assert len(larger.find(np.arange(500))) == 500


def test_an_image_larger_than_the_limit_names_the_limit_that_would_do(caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(numbered(4), cache=100_000)
    cache.put(1, 10, pixels_of(1, (200, 300)))
    assert cache.full
    needed = int(caplog.records[0].message.split("pool.cache=")[1].split()[0])
    larger = opened(numbered(4), cache=needed)
    fill(larger, 4, (200, 300))
    assert set(larger.find(np.arange(4))) == {0, 1, 2, 3}


def test_a_disk_that_is_full_ends_the_adding_and_not_the_process(caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(numbered(100))
    fill(cache, 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, before[1]))
    try:
        fill(cache, 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cache.full and set(cache.find(np.arange(100))) == {0, 1, 2}
    assert "nothing more goes into the cache" in caplog.records[0].message


def test_a_limit_over_what_is_free_is_lowered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(numbered(3), cache=1 << 50)
    free = os.statvfs("/dev/shm")
    assert cache._limit <= 0.9 * free.f_bavail * free.f_frsize * 1.01
    assert "pool.cache is 1,125,899,906,842,624" in caplog.records[0].message


def test_by_default_it_takes_a_quarter_of_what_is_free() -> None:
    free = os.statvfs("/dev/shm")
    limit = opened(numbered(3), cache="disk")._limit
    assert limit == pytest.approx(0.25 * free.f_bavail * free.f_frsize, rel=0.05)


def test_stores_share_the_limit_by_samples_and_each_has_one_cache() -> None:
    train, val = numbered(300), numbered(100)
    pool = PoolConfig(cache=4_000_000)
    caches = open_caches(pool, {"train": train, "val": val}, TransformConfig())
    assert [caches[split]._limit for split in ("train", "val")] == [3_000_000, 1_000_000]
    caches = open_caches(pool, {"train": train, "val": numbered(300)}, TransformConfig())
    assert caches["train"] is caches["val"] and caches["val"]._limit == 4_000_000


def test_a_limit_below_the_table_of_its_samples_keeps_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = opened(numbered(500), cache=1000)
    fill(cache, 500)
    assert cache.full and not cache.find(np.arange(500))
    assert "hold 0 of 500 samples" in caplog.records[0].message


# Which cache it is, and how long it is there


def test_another_store_finds_nothing_and_what_nobody_uses_is_removed(tmp_path: Path, root: Path) -> None:
    image = tmp_path / "store" / "class" / "a.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(picture(0))
    cache = opened(FolderStore(tmp_path / "store"))
    cache.put(0, 0, pixels_of(0))
    before = files(root)
    image.write_bytes(picture(1) + b"longer")
    other = opened(FolderStore(tmp_path / "store"))
    assert other.find(np.array([0])) == {}
    assert len(files(root)) == 2  # the first is still open
    del cache
    gc.collect()
    other = opened(FolderStore(tmp_path / "store"))
    assert len(files(root)) == 1 and not files(root) & before


@pytest.mark.parametrize("change", ["min_side", "exif", "limit", "version", "start of the machine", "time"])
def test_another_setting_version_or_boot_has_another_cache(
    change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = tmp_path / "store" / "class" / "a.jpg"
    image.parent.mkdir(parents=True)
    image.write_bytes(picture(0))
    store = FolderStore(tmp_path / "store")
    cache = opened(store)
    cache.put(0, 0, pixels_of(0))
    assert 0 in opened(store).find(np.array([0]))
    settings: dict[str, Any] = {}
    if change == "min_side":
        settings["decode_min_side"] = 8
    elif change == "exif":
        settings["apply_exif"] = True
    elif change == "limit":
        settings["cache"] = LIMIT + 1
    elif change == "version":
        monkeypatch.setattr(sample_cache, "version_of", lambda package: f"{package} 99")
    elif change == "start of the machine":
        monkeypatch.setattr(sample_cache.local_file, "boot_id", lambda: "another")
    else:
        os.utime(tmp_path / "store", (1, 1))
    assert opened(store, **settings).find(np.array([0])) == {}


def test_a_cache_that_is_removed_while_it_is_used_takes_no_more() -> None:
    cache = opened(numbered(100))
    other = opened(numbered(100))
    fill(cache, 3)
    cache._path.unlink()
    fill(other, 100)
    for one in (cache, other):
        assert set(one.find(np.arange(100))) == {0, 1, 2}
    assert other.full


def test_a_place_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=r"pool\.cache: .*/file/cache cannot be used: .*; set RAYPIPE_CACHE"):
        opened(numbered(1))
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path))
    (tmp_path / "samples").symlink_to("/dev/shm")
    with pytest.raises(ConfigError, match="another user, or is a link: remove it; set RAYPIPE_CACHE"):
        opened(numbered(1))


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (TransformConfig(crop_decode="scaled"), "each crop is decoded at a scale of its own"),
    ],
)
def test_a_cache_is_refused_if_decoding_differs_between_epochs(
    transform: TransformConfig, message: str, stores: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_stream(str(stores["train"]), transform=transform, pool=PoolConfig(cache="disk"))


# The stream


def by_pillow(index: int, kind: str, **options: Any) -> bytes:
    image = Image.fromarray(cv2.resize(pixels_of(index, (5, 6)), (90 + index, 70)))
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def turned(index: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return by_pillow(index, "JPEG", exif=exif)


def mixed() -> MemoryStore:
    """JPEG, upright and turned, large ones, PNG, GIF, and bad ones of several kinds."""
    images: list[bytes | None] = [picture(i) for i in range(20)]
    images += [turned(i) for i in range(6)]
    images += [by_pillow(i, kind) for i in range(4) for kind in ("PNG", "GIF")]
    images += [encode_jpeg(cv2.resize(pixels_of(i, (5, 6)), (400, 300))) for i in range(3)]
    images += [picture(50)[:-200], b"", None]
    return MemoryStore(images, list(range(len(images))))


BAD = {37, 38, 39}


def spec_of(store: Any, cache: Cache, transform: TransformConfig, **plan: Any) -> StreamSpec:
    return open_stream(
        store,
        store,
        plan=PlanConfig(**{"epochs": 2, "micro_batch_size": 6, "seed": 3} | plan),
        transform=transform,
        pool=PoolConfig(cache=cache),
    )


def digests_of(spec: StreamSpec, *workers: MicroBatchMaker, first: int = 0) -> list[bytes]:
    """Of every micro-batch; workers take turns."""
    turns = itertools.cycle(workers)
    places = list(spec.plan.micro_batches(spec.plan.start()))[first:]
    return [batch_digest(next(turns).batch(at)) for at in places]


def whole_side(image: np.ndarray) -> np.ndarray:
    image[::2] //= 2  # a transform may write into what it is given
    return image[:32, :32].copy()


@pytest.mark.parametrize(
    "settings",
    [
        {"train": "light"},
        {"train": "heavy", "apply_exif": True},
        {"train": "light", "crop_decode": "off"},
        {"train": "light", "decode_min_side": 60, "apply_exif": True},
        {"train": "flip-crop", "val": "resize"},
        {"train": f"{__name__}:whole_side_of"},
    ],
    ids=str,
)
def test_every_pixel_label_and_bad_sample_is_that_without_a_cache(settings: dict[str, Any]) -> None:
    transform = TransformConfig(**{"val": "center", "size": 32, "max_bad_fraction": 1.0} | settings)
    store = mixed()
    without = spec_of(store, "off", transform)
    spec = spec_of(store, LIMIT, transform)
    one, other = MicroBatchMaker(spec), MicroBatchMaker(spec)
    expected = digests_of(without, MicroBatchMaker(without))
    assert digests_of(spec, one, other) == expected
    found = one.caches["train"].find(np.arange(len(store)))
    assert set(found) == set(range(len(store))) - BAD
    for index, sample in found.items():
        data = store.read(np.array([index]))["image"][0]
        pixels = decode(data, min_side=transform.decode_min_side or None, exif=transform.apply_exif)
        assert np.array_equal(sample.pixels, pixels) and sample.label == index
    # All of it again, by a process that comes late.
    assert digests_of(spec, MicroBatchMaker(spec)) == expected


def whole_side_of(size: int) -> Any:
    return whole_side


def test_a_limit_that_holds_a_few_changes_no_pixel() -> None:
    store = MemoryStore([picture(i) for i in range(40)], [0] * 40)
    transform = TransformConfig(size=16)
    off = spec_of(store, "off", transform)
    small = spec_of(store, 30_000, transform)
    worker = MicroBatchMaker(small)
    assert digests_of(small, worker) == digests_of(off, MicroBatchMaker(off))
    assert 0 < len(worker.caches["train"].find(np.arange(40))) < 10 and worker.caches["train"].full


class Watched(MemoryStore):
    """Knows which samples were read."""

    def read(self, indices: np.ndarray, columns: tuple[str, ...] = ("image", "label")) -> Any:
        self.was_read = [*getattr(self, "was_read", []), *np.asarray(indices).tolist()]
        return super().read(indices, columns)


def test_what_is_kept_is_not_read_again_and_a_resume_goes_on_with_it() -> None:
    store = Watched([picture(i) for i in range(40)], list(range(40)))
    transform = TransformConfig(size=16)
    plan = {"epochs": 3, "val_interval": 0, "micro_batch_size": 8}
    spec, off = spec_of(store, LIMIT, transform, **plan), spec_of(store, "off", transform, **plan)
    whole = digests_of(off, MicroBatchMaker(off))
    store.was_read = []
    first = MicroBatchMaker(spec)
    places = list(spec.plan.micro_batches(spec.plan.start()))
    begun = [batch_digest(first.batch(at)) for at in places[:3]]
    assert len(store.was_read) == 24
    del first  # the run ends in mid-epoch, and goes on in another process
    gc.collect()
    second = MicroBatchMaker(spec)
    assert begun + digests_of(spec, second, first=3) == whole
    assert sorted(store.was_read) == list(range(40))


@pytest.mark.system
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("name", ["train", pytest.param("parquet", marks=pytest.mark.soak)])
def test_the_digest_is_the_same_with_any_cache_and_actors(
    name: str, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # actors are processes of the cluster, and know nothing of this test's places
    limit = (8 << 20) + os.getpid()  # another cache than the last session's
    spec = open_stream(
        str(stores[name]),
        str(stores["val"]),
        plan=PlanConfig(epochs=2, micro_batch_size=8, global_batch_size=16, seed=5),
        transform=TransformConfig(size=24),
        pool=PoolConfig(cpus_per_actor=0.5, cache=limit),
    )

    def digests(actors: int, from_step: int = 0) -> list[bytes]:
        pool = replace(spec.pool, min_actors=actors)
        cursor = spec.plan.cursor_at(from_step)
        found = iterate_digests(spec.plan, cursor, splits(replace(spec, pool=pool), cursor, max_actors=actors))
        return [one.digest for one in found]

    # Held open: between two of its streams, any other on this machine (of another test's) would remove it.
    caches = open_caches(
        PoolConfig(cache=limit),
        {"train": open_store(stores[name]), "val": open_store(stores["val"])},
        TransformConfig(size=24),
    )
    alone = without_ray.digests(replace(spec, pool=PoolConfig(cache="off")))
    assert combine(digests(2)) == combine(alone)
    with_another = digests(1, from_step=4)
    assert combine(with_another) == combine(alone[-len(with_another) :])
    # 96 of 100 in an epoch; which are left out differs.
    assert len(caches["train"].find(np.arange(100))) >= 96 and len(caches["val"].find(np.arange(22))) == 22


def test_only_caches_are_removed_from_the_folder_of_caches(root: Path) -> None:
    (root / "class").mkdir(parents=True)
    (root / "class" / "image.jpg").write_bytes(b"x")
    opened(numbered(1))
    assert [path.name for path in (root / "class").iterdir()] == ["image.jpg"]
