"""`raypipe convert` of what others wrote, by its command, and of samples and Datasets from Python."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
from PIL import Image

import raypipe
from raypipe.commands import copied_samples
from raypipe.errors import ConfigError, SampleError, StoreError
from raypipe.storage.filesystem import open_filesystem
from raypipe.stores import open_store
from raypipe.stores.base import Store
from raypipe.stores.sources import open_source
from raypipe.transform.decode.rgb import decode

from pictures import picture  # isort: skip
from small_runs import run_command  # isort: skip

DATA = Path(__file__).parents[1] / "stores" / "data"
IMAGES = [picture(i, 8, 8) for i in range(30)]

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]


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
    found = run_command(capsys, "convert", src, tmp_path / "train.lmdb")
    store = open_store(tmp_path / "train.lmdb")
    assert found["samples"] == len(store)
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


@pytest.mark.parametrize(("shards", "suffix"), [(0, "lmdb"), (3, "parquet")])
def test_a_dataset_is_copied_in_its_order(
    tmp_path: Path, shards: int, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.data

    # several tasks write it, unless the number of shards is given
    monkeypatch.setattr(copied_samples, "DATASET_SHARD_BYTES", 60 * len(IMAGES[0]))
    samples = labelled()
    rows = ray.data.from_items(samples, override_num_blocks=7)
    dst = tmp_path / f"a.{suffix}"
    found = raypipe.convert(
        rows.map(lambda row: row),
        dst,
        shards=shards,
        classes=tuple("abcde"),
        sizes=False,
    )
    assert (found["samples"], found["classes"]) == (150, 5)
    store = open_store(dst)
    copied, expected = contents(store), expected_of(samples)
    assert [json.loads(boxes) for boxes in copied.pop("boxes")] == [
        json.loads(boxes) for boxes in expected.pop("boxes")
    ]
    assert copied == expected and store.classes == tuple("abcde")
    files = sorted(file.name for file in dst.iterdir())
    assert files == [f"{n:05d}.{suffix}" for n in range(shards or len(files))]
    assert len(files) > 1 and [file.name for file in tmp_path.iterdir()] == [dst.name]
    with pytest.raises(ConfigError, match=r"raypipe\.convert\(dataset, 'train\.lmdb'"):
        raypipe.open_stream(rows)


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
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)
    palette = Image.fromarray(pixels).quantize(4)
    images = [pixels, pixels[..., 0], palette]
    raypipe.convert(({"image": image} for image in images), tmp_path / "a.lmdb")
    found = contents(open_store(tmp_path / "a.lmdb"))["image"]
    gray = np.repeat(pixels[..., :1], 3, axis=2)
    expected = [pixels, gray, np.asarray(palette.convert("RGB"))]
    assert all(map(np.array_equal, map(decode, found), expected))


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


@pytest.mark.parametrize("name", ["tensorflow-train.tfrecord", "mds"])
def test_a_source_in_a_bucket(bucket: str, name: str) -> None:
    filesystem, path = open_filesystem(bucket)
    pyarrow.fs.copy_files(
        str(DATA / name), f"{path}/{name}", destination_filesystem=filesystem
    )
    source = open_source(f"{bucket}/{name}")
    assert source is not None
    hashes = [hashlib.sha256(row["image"]).hexdigest() for row in source.samples]
    assert hashes == json.loads((DATA / "jpegs.json").read_text())


def test_columns_are_named_for_an_address_only() -> None:
    with pytest.raises(
        ConfigError, match=r"target_column='y' are for an address, not for a list"
    ):
        raypipe.convert(labelled(2), "a.lmdb", target_column="y")
