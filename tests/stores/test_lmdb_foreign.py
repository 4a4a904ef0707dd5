"""LMDB files that others wrote, in each layout, as the lmdb library writes them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_source, open_store
from raypipe.stores.lmdb_pages import LMDBFile

NUM = 300
# Short ones stand in the leaves of the tree, long ones on pages of their own.
IMAGES = [b"\xff\xd8\xff" + i.to_bytes(2, "big") * (20 + 13 * i) for i in range(NUM)]


def write(path: Path, entries: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]], **options: Any) -> Path:
    with (
        lmdb.open(str(path), subdir=options.pop("subdir", False), lock=False, map_size=64 << 20, **options) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in dict(entries).items():
            txn.put(key, value)
    return path


def write_lsun(path: Path, images: list[bytes] = IMAGES, **options: Any) -> Path:
    """As LSUN's own tool: keys of 40 hex digits."""
    return write(path, {hashlib.sha1(image).hexdigest().encode(): image for image in images}, **options)


def read(path: Path, layout: str = "auto") -> list[dict[str, Any]]:
    source = open_source(path, **({} if layout == "auto" else {"layout": layout}))
    assert isinstance(source, Iterator)
    return list(source)


def images(path: Path, layout: str = "auto") -> list[bytes | None]:
    return [sample["image"] for sample in read(path, layout)]


def test_lsun_is_converted_and_not_opened(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "church_outdoor_train.lmdb")
    by_key = sorted(IMAGES, key=lambda image: hashlib.sha1(image).hexdigest())
    assert read(path) == [{"image": image} for image in by_key]
    with pytest.raises(StoreError, match=r"train\.lmdb is LMDB from another program: .*`raypipe convert`"):
        len(open_store(path))


def test_a_folder_as_lsun_has_it(tmp_path: Path) -> None:
    write_lsun(tmp_path / "bedroom_val_lmdb", subdir=True)
    assert len(read(tmp_path / "bedroom_val_lmdb")) == NUM


def test_files_of_a_folder_come_one_after_the_other(tmp_path: Path) -> None:
    write_lsun(tmp_path / "a.lmdb", IMAGES[:100])
    write_lsun(tmp_path / "b.lmdb", IMAGES[100:])
    assert images(tmp_path) == images(tmp_path / "a.lmdb") + images(tmp_path / "b.lmdb")
    assert sorted(images(tmp_path)) == sorted(IMAGES)


@pytest.mark.parametrize("width", [1, 8])
def test_numbered_images_are_in_the_order_of_their_keys(tmp_path: Path, width: int) -> None:
    keys = {b"%0*d" % (width, i): i for i in range(NUM)}
    about = {b"__len__": b"%d" % NUM, b"length": b"300", b"meta_info.txt": b"0.png (1,1,3) 1"}
    path = write(tmp_path / "a.lmdb", {key: IMAGES[i] for key, i in keys.items()} | about)
    assert images(path) == [IMAGES[keys[key]] for key in sorted(keys)]


def own(key: bytes, value: bytes) -> dict[str, Any]:
    """A layout of a user's: a label, a name, and the image behind them."""
    label, name, image = value.split(b"|", 2)
    if name == b"broken":
        raise RuntimeError("a function of the user's")
    return {"image": image, "label": int(label), "key": key.decode(), "name": name.decode(), "weight": 0.5}


def write_own(path: Path, **others: bytes) -> Path:
    entries = {b"k%03d" % i: b"%d|n%d|" % (i % 3, i) + image for i, image in enumerate(IMAGES)}
    return write(path, entries | {key.encode(): value for key, value in others.items()})


def test_a_function_of_the_user_s(tmp_path: Path) -> None:
    path = write_own(tmp_path / "a.lmdb", k007=b"1|broken|x", k008=b"damaged")
    with pytest.raises(
        StoreError, match=r"no __raypipe__ record, and its values are not images \(b'k000': b'0\|n0"
    ):
        read(path)
    found = read(path, f"{__name__}:own")
    assert [i for i, sample in enumerate(found) if sample == {"image": None}] == [7, 8]
    assert found[299] == {"image": IMAGES[299], "label": 2, "key": "k299", "name": "n299", "weight": 0.5}


def nothing(key: bytes, value: bytes) -> Any:
    return None


def raising(key: bytes, value: bytes) -> Any:
    raise LookupError("of all")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "must return a dict with an image, got None"),
        ("raising", "raising raised LookupError: of all"),
    ],
)
def test_a_function_that_makes_no_samples_is_told_why(tmp_path: Path, name: str, message: str) -> None:
    path = write_own(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match=rf"not in the layout {__name__}:{name}: at key b'k[0-9]+': .*{message}"):
        read(path, f"{__name__}:{name}")


def test_layouts_that_are_not_there(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match="layout must be auto, image or module:function, got 'lsun'"):
        read(path, "lsun")
    with pytest.raises(ConfigError, match="layout 'no_such:thing' cannot be imported"):
        read(path, "no_such:thing")
    with pytest.raises(StoreError, match="has no samples: 1 keys"):
        read(write(tmp_path / "b.lmdb", {b"__len__": b"0"}))


def test_raypipe_s_own_is_a_store_and_has_no_layout(stores: dict[str, Path]) -> None:
    assert len(open_source(stores["train"])) > 0  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="was written by raypipe: convert it without a layout"):
        read(stores["train"], "image")


def test_entries_are_those_of_liblmdb(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    keys = {rng.bytes(int(rng.integers(1, 60))) for _ in range(2000)} | {b"image-%04d" % i for i in range(500)}
    path = write(tmp_path / "a.lmdb", {key: key[::-1] * 20 for key in keys})
    assert [(key, bytes(value or b"")) for key, value in LMDBFile(path).entries()] == [
        (key, key[::-1] * 20) for key in sorted(keys)
    ]


def test_a_damaged_sample_is_a_bad_one_and_a_damaged_index_an_error(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "a.lmdb")
    whole = path.read_bytes()
    # The last page but one of a long value.
    os.truncate(path, len(whole) - 3 * 4096)
    try:
        assert None in images(path)
    except StoreError as error:
        assert "a.lmdb is damaged" in str(error)
    os.truncate(path, len(whole) // 10)
    with pytest.raises(StoreError, match=r"a\.lmdb (is damaged|is truncated)"):
        images(path)
