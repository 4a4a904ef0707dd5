"""`raypipe convert` of what others wrote, by its command, and of samples and Datasets from Python."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from PIL import Image

import raypipe
from raypipe.commands import cli, ordered_samples
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.stores.sources import open_source
from raypipe.transform.decode.rgb import decode

from pictures import picture  # isort: skip

DATA = Path(__file__).parents[1] / "stores" / "data"
IMAGES = [picture(i, 8, 8) for i in range(30)]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


def converted(
    capsys: pytest.CaptureFixture[str], src: str | Path, dst: Path, *options: str
) -> Store:
    cli.main(["convert", str(src), str(dst), *options])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    store = open_store(dst)
    assert found["samples"] == len(store)
    return store


def contents(store: Store) -> dict[str, list[Any]]:
    """All columns but the sizes, which a conversion adds."""
    columns = tuple(
        name for name in store.schema.names if name not in ("width", "height")
    )
    return {
        name: list(values)
        for name, values in store.read(np.arange(len(store)), columns).items()
    }


def test_a_split_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = DATA / "hugging-face" / "train-*.parquet"
    store = converted(capsys, src, tmp_path / "train.lmdb")
    assert contents(store) == contents(open_store(src)) and store.classes == (
        "cat",
        "dog",
        "owl",
    )


# From Python: samples, and a Dataset


def labelled(num: int = 150) -> list[dict[str, Any]]:
    return [
        {"image": IMAGES[i % 30], "label": i % 5, "name": f"n{i}", "boxes": [[i, 1.5]]}
        for i in range(num)
    ]


def expected_of(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    columns = {
        name: [sample[name] for sample in samples]
        for name in ("image", "label", "name")
    }
    return {**columns, "boxes": [json.dumps(sample["boxes"]) for sample in samples]}


@pytest.mark.parametrize("suffix", ["lmdb", "parquet"])
def test_any_iterable_of_samples(tmp_path: Path, suffix: str) -> None:
    address, samples = tmp_path / f"a.{suffix}", labelled()
    found = raypipe.convert(iter(samples), address, classes=tuple("abcde"), shards=2)
    num_bytes = sum(len(s["image"]) for s in samples)
    assert found == {
        "samples": 150,
        "classes": 5,
        "bytes": num_bytes,
        "skipped": 0,
        "without_size": 0,
    }
    store = open_store(address)
    assert contents(store) == expected_of(samples) and store.classes == tuple("abcde")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))


def test_any_dataset_in_its_order(tmp_path: Path) -> None:
    import ray.data

    samples = labelled()
    rows = ray.data.from_items([{"i": i} for i in range(150)], override_num_blocks=6)
    images = IMAGES

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        i = int(row["i"])
        return {
            "image": images[i % 30],
            "label": i % 5,
            "name": f"n{i}",
            "boxes": [[float(i), 1.5]],
        }

    raypipe.convert(rows.map(sample), str(tmp_path / "a.lmdb"))
    found = contents(open_store(tmp_path / "a.lmdb"))
    assert [json.loads(boxes) for boxes in found.pop("boxes")] == [
        sample["boxes"] for sample in samples
    ]
    expected = expected_of(samples)
    assert found == {name: expected[name] for name in found} and len(found) == 3


@pytest.mark.parametrize(("shards", "suffix"), [(0, "lmdb"), (3, "parquet")])
def test_a_dataset_s_shards_have_its_rows_in_order(
    tmp_path: Path, shards: int, suffix: str
) -> None:
    import ray.data

    dataset = ray.data.from_items(labelled(), override_num_blocks=7)
    found = raypipe.convert(
        dataset, tmp_path / f"a.{suffix}", shards=shards, classes=tuple("abcde")
    )
    assert found["samples"] == 150 and found["bytes"] == sum(
        len(s["image"]) for s in labelled()
    )
    store = open_store(tmp_path / f"a.{suffix}")
    assert store.read(np.arange(150), ("image",))["image"] == [
        s["image"] for s in labelled()
    ]
    assert (
        store.classes == tuple("abcde")
        and store.read(np.arange(150), ("width",))["width"].tolist() == [8] * 150
    )
    names = [f"{n:05d}.{suffix}" for n in range(shards)]
    assert [file.name for file in tmp_path.iterdir()] == [f"a.{suffix}"]
    assert (
        not shards
        or sorted(file.name for file in (tmp_path / f"a.{suffix}").iterdir()) == names
    )
    with pytest.raises(
        ConfigError,
        match=r"raypipe\.convert\(dataset, 'train\.lmdb'\) writes it as a store",
    ):
        raypipe.open_stream(dataset)


def test_several_tasks_write_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of 20 samples: the same store as of one."""
    import ray.data

    pixels = [
        np.random.default_rng(i).integers(0, 256, (6, 7, 3), np.uint8)
        for i in range(60)
    ]
    dataset = ray.data.from_items([{"i": i} for i in range(60)], override_num_blocks=12)
    rows = dataset.map(lambda row: {"image": pixels[row["i"]], "label": row["i"]})
    raypipe.convert(rows, tmp_path / "one.lmdb")
    record = len(open_store(tmp_path / "one.lmdb").read([0])["image"][0]) + 40
    monkeypatch.setattr(ordered_samples, "DATASET_SHARD_BYTES", 20 * record)
    raypipe.convert(rows, tmp_path / "several.lmdb", short_side=0)
    assert (tmp_path / "one.lmdb").is_file() and len(
        list((tmp_path / "several.lmdb").iterdir())
    ) > 1
    assert contents(open_store(tmp_path / "several.lmdb")) == contents(
        open_store(tmp_path / "one.lmdb")
    )
    assert contents(open_store(tmp_path / "one.lmdb"))["label"] == list(range(60))


def test_bad_rows_of_a_dataset_are_named_or_skipped(tmp_path: Path) -> None:
    import ray.data

    rows = labelled(90)
    rows[70]["image"] = b"no image"
    dataset = ray.data.from_items(rows, override_num_blocks=3)
    with pytest.raises(
        SampleError, match=r"the Dataset: sample 70: .*--on-bad-sample skip"
    ):
        raypipe.convert(dataset, tmp_path / "a.lmdb", shards=3)
    assert not (tmp_path / "a.lmdb").exists()
    assert (
        raypipe.convert(dataset, tmp_path / "a.lmdb", shards=3, on_bad_sample="skip")[
            "skipped"
        ]
        == 1
    )
    labels = open_store(tmp_path / "a.lmdb").read(np.arange(89))["label"].tolist()
    assert labels == [i % 5 for i in range(90) if i != 70]
    with pytest.raises(StoreError, match="the Dataset has no samples"):
        raypipe.convert(dataset.limit(0), tmp_path / "b.lmdb")


def test_pixels_become_png_and_come_out_equal(tmp_path: Path) -> None:
    pixels = [
        np.random.default_rng(i).integers(0, 256, (6, 5 + i, 3), np.uint8)
        for i in range(4)
    ]
    grey = [{"image": each[..., 0], "label": np.int32(7)} for each in pixels]
    raypipe.convert(({"image": each} for each in pixels), str(tmp_path / "a.lmdb"))
    raypipe.convert(grey, str(tmp_path / "b.lmdb"))
    palette = [{"image": Image.fromarray(each).quantize(4)} for each in pixels]
    raypipe.convert(palette, str(tmp_path / "c.lmdb"))
    image = contents(open_store(tmp_path / "c.lmdb"))["image"][0]
    assert np.array_equal(decode(image), np.asarray(palette[0]["image"].convert("RGB")))
    images = contents(open_store(tmp_path / "a.lmdb"))["image"]
    assert all(
        np.array_equal(decode(image), each)
        for image, each in zip(images, pixels, strict=True)
    )
    found = contents(open_store(tmp_path / "b.lmdb"))
    assert (
        np.array_equal(decode(found["image"][3])[..., 2], pixels[3][..., 0])
        and found["label"] == [7] * 4
    )


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], StoreError, "the source has no samples"),
        (
            [{"label": 1}],
            StoreError,
            "a sample is a mapping of columns, `image` among them, not {'label': 1}",
        ),
        ([(b"x", 1)], StoreError, "a sample is a mapping"),
        (
            [{"image": np.zeros((2, 2), np.float32)}],
            StoreError,
            r"an image is float32 of \(2, 2\)",
        ),
        (
            [{"image": np.zeros((0, 2), np.uint8)}],
            StoreError,
            r"an image is uint8 of \(0, 2\)",
        ),
        (
            [{"image": picture(0), "label": 1}, {"image": picture(0)}],
            StoreError,
            "the source: sample 1: .*columns",
        ),
        (
            [{"image": picture(0), "text": "\ud800"}],
            StoreError,
            "column 'text' has text that is not Unicode",
        ),
        (
            [{"image": picture(0)}, {"image": None}],
            SampleError,
            "sample 1: it has no bytes",
        ),
    ],
)
def test_samples_that_are_none(
    tmp_path: Path, samples: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        raypipe.convert(samples, str(tmp_path / "a.lmdb"))
    assert list(tmp_path.glob("*a.lmdb*")) == []


def test_an_iterable_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    def samples() -> Any:
        yield from labelled(100)
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        raypipe.convert(samples(), str(tmp_path / "a.lmdb"))
    assert list(tmp_path.glob("*a.lmdb*")) == []


# From other formats


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("tensorflow-train.tfrecord", 1),
        ("mxnet/one-label.rec", 0),
        ("mds-zstd", 0),
        ("arrow", 0),
    ],
)
def test_another_format_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, label: int
) -> None:
    store = converted(capsys, DATA / name, tmp_path / "a.lmdb", "--json")
    found = contents(store)
    hashes = [hashlib.sha256(image).hexdigest() for image in found["image"]]
    assert hashes == json.loads((DATA / "jpegs.json").read_text())
    assert found["label"] == [label + i % 4 for i in range(8)]


def test_arrays_keep_their_shape_and_settings_name_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 6, 5, 3), np.uint8)
    np.savez(
        tmp_path / "a.npz", frames=pixels, kinds=np.arange(70) % 3, mask=pixels[..., 0]
    )
    options = ("--store.image-column", "frames", "--store.target-column", "kinds")
    store = converted(capsys, tmp_path / "a.npz", tmp_path / "a.lmdb", *options)
    found = contents(store)
    assert all(
        np.array_equal(decode(image), each)
        for image, each in zip(found["image"], pixels, strict=True)
    )
    assert found["label"] == [i % 3 for i in range(70)] and np.array_equal(
        np.stack(found["mask"]), pixels[..., 0]
    )


def test_a_source_in_a_bucket(tmp_path: Path, bucket: str) -> None:
    filesystem, path = open_filesystem(bucket)
    for name in (
        "tensorflow-train.tfrecord",
        "mds/index.json",
        "mds/shard.00000.mds",
        "mds/shard.00001.mds",
    ):
        with filesystem.open_output_stream(f"{path}/{name}") as file:
            file.write((DATA / name).read_bytes())
    for name in ("tensorflow-train.tfrecord", "mds"):
        source = open_source(f"{bucket}/{name}")
        assert source is not None
        hashes = [hashlib.sha256(row["image"]).hexdigest() for row in source.samples]
        assert hashes == json.loads((DATA / "jpegs.json").read_text())


def test_columns_are_named_for_an_address_only() -> None:
    with pytest.raises(
        ConfigError, match=r"target_column='y' are for an address, not for a list"
    ):
        raypipe.convert(labelled(2), "a.lmdb", target_column="y")


def test_webdataset_on_files_of_its_own_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as tar:
        for i, image in enumerate(IMAGES):
            tar.write({"__key__": f"{i:02}", "jpg": image, "cls": i % 3})
    store = converted(capsys, tmp_path / "w.tar", tmp_path / "w.lmdb")
    assert store.classes is None
    assert contents(store) == {
        "image": IMAGES,
        "label": [i % 3 for i in range(30)],
        "name": [f"{i:02}" for i in range(30)],
    }
