"""LMDB files that others wrote, in each layout, as the lmdb library writes them."""

from __future__ import annotations

import hashlib
import os
import pickle
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
NUMBERED = sorted(b"%d" % i for i in range(NUM))


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


def write_scene_text(path: Path) -> Path:
    """As create_lmdb_dataset.py of CRNN, ASTER and PARSeq: from 1."""
    entries = {b"num-samples": b"%d" % NUM}
    for i, image in enumerate(IMAGES, 1):
        entries |= {b"image-%09d" % i: image, b"label-%09d" % i: f"wörd {i}".encode()}
    return write(path, entries)


def write_efficient_pytorch(path: Path, protocol: int = 4) -> Path:
    """As folder2lmdb.py of Efficient-PyTorch."""
    entries = {b"%d" % i: pickle.dumps((image, i % 7), protocol) for i, image in enumerate(IMAGES)}
    entries[b"__keys__"] = pickle.dumps([b"%d" % i for i in range(NUM)], protocol)
    entries[b"__len__"] = pickle.dumps(NUM, protocol)
    return write(path, entries)


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
    with pytest.raises(StoreError, match=r"train\.lmdb is LMDB that raypipe did not write: .*`raypipe convert`"):
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


def test_scene_text(tmp_path: Path) -> None:
    path = write_scene_text(tmp_path / "a.lmdb")
    assert read(path) == [{"image": image, "text": f"wörd {i}"} for i, image in enumerate(IMAGES, 1)]
    write(path, {b"label-000000002": b"\xff"})
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.delete(b"label-000000003")
    assert [sample["text"] for sample in read(path)[:4]] == ["wörd 1", None, None, "wörd 4"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_efficient_pytorch_is_unpickled_where_it_is_asked_for(tmp_path: Path, protocol: int) -> None:
    path = write_efficient_pytorch(tmp_path / "train.lmdb", protocol)
    with pytest.raises(StoreError, match=r"train\.lmdb has no __raypipe__ record.*b'\\x80.*--layout pickle"):
        read(path)
    assert read(path, "pickle") == [{"image": IMAGES[int(key)], "label": int(key) % 7} for key in NUMBERED]


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_runs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    touched = tmp_path / "touched"
    bad = pickle.dumps((IMAGES[0], Malicious(touched)))
    all_bad = write(tmp_path / "all.lmdb", {b"%d" % i: bad for i in range(20)})
    with pytest.raises(StoreError, match=r"all\.lmdb is not in the layout pickle: .*no pickle of plain data"):
        read(all_bad, "pickle")
    entries = {b"%04d" % i: pickle.dumps((image, 1)) for i, image in enumerate(IMAGES)}
    one_bad = write(tmp_path / "one.lmdb", entries | {b"0005": bad, b"__keys__": bad, b"__len__": bad})
    caplog.clear()
    found = read(one_bad, "pickle")
    assert [i for i, sample in enumerate(found) if sample["image"] is None] == [5] and len(found) == NUM
    assert "one.lmdb has a bad sample at key b'0005': it is no pickle of plain data" in caplog.text
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (pickle.dumps(IMAGES[0]), r"a pickled bytes of \[\], not"),
        (pickle.dumps((1, 2, 3)), r"a pickled tuple of \['int', 'int', 'int'\], not"),
        (pickle.dumps((IMAGES[0], "cat")), r"a pickled tuple of \['bytes', 'str'\], not"),
        (pickle.dumps((IMAGES[0], 1 << 63)), r"a pickled tuple of \['bytes', 'int'\], not"),
        (pickle.dumps(("path", 3)), r"a pickled tuple of \['str', 'int'\], not"),
        (pickle.dumps({"label": 3}), r"a pickled dict of \['NoneType', 'int'\], not"),
        (b"no pickle", "not in the layout pickle"),
    ],
)
def test_other_pickles_say_what_they_are(tmp_path: Path, value: bytes, reason: str) -> None:
    path = write(tmp_path / "a.lmdb", {b"%d" % i: value for i in range(20)})
    with pytest.raises(StoreError, match=reason):
        read(path, "pickle")


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
        StoreError, match=r"no __raypipe__ record, and its values are no images \(b'k000': b'0\|n0"
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
        ("nothing", "it returned no sample with an image, but None"),
        ("raising", "raising raised LookupError: of all"),
    ],
)
def test_a_function_that_makes_no_samples_is_told_why(tmp_path: Path, name: str, message: str) -> None:
    path = write_own(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match=rf"not in the layout {__name__}:{name}: at key b'k[0-9]+': .*{message}"):
        read(path, f"{__name__}:{name}")


def test_layouts_that_are_not_there(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match="layout 'lsun' is none of: auto, image, scene-text, pickle, module:func"):
        read(path, "lsun")
    with pytest.raises(ConfigError, match="layout 'no_such:thing' cannot be imported"):
        read(path, "no_such:thing")
    with pytest.raises(StoreError, match="300 keys, none that begins with image-"):
        read(path, "scene-text")
    with pytest.raises(StoreError, match="holds no samples: 1 keys"):
        read(write(tmp_path / "b.lmdb", {b"__len__": b"0"}))


def test_raypipe_s_own_is_a_store_and_has_no_layout(stores: dict[str, Path]) -> None:
    assert len(open_source(stores["train"])) > 0  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="is raypipe's own: convert it without a layout"):
        read(stores["train"], "pickle")


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
