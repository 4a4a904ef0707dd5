"""LMDB files that others wrote, in each layout, as the lmdb library writes them."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store
from raypipe.stores.base import name_of
from raypipe.stores.lmdb import LMDBStore
from raypipe.stores.lmdb_foreign import Entries
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


def test_lsun(tmp_path: Path) -> None:
    store = open_store(write_lsun(tmp_path / "church_outdoor_train.lmdb"))
    by_key = sorted(IMAGES, key=lambda image: hashlib.sha1(image).hexdigest())
    assert (len(store), store.columns, store.classes, store.groups) == (NUM, ("image",), None, None)
    order = np.random.default_rng(0).permutation(NUM)
    assert store.read(order, ("image",))["image"] == [by_key[i] for i in order]
    with pytest.raises(StoreError, match="no column 'label'; its columns are: image"):
        store.read(np.arange(3))


def test_a_sample_is_named_by_its_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.lmdb", {b"a": IMAGES[0], b"b\n\x1b[31m\xff": IMAGES[1]})
    assert name_of(open_store(path), 1) == f"{path}, key b\\n\\x1b[31m\\xff"


def test_a_folder_as_lsun_has_it(tmp_path: Path) -> None:
    write_lsun(tmp_path / "bedroom_val_lmdb", subdir=True)
    assert len(open_store(tmp_path / "bedroom_val_lmdb")) == NUM


def test_shards_of_another_s_are_one_store(tmp_path: Path) -> None:
    write_lsun(tmp_path / "a.lmdb", IMAGES[:100])
    write_lsun(tmp_path / "b.lmdb", IMAGES[100:])
    store = open_store(tmp_path)
    assert sorted(store.read(np.arange(len(store)), ("image",))["image"]) == sorted(IMAGES)


@pytest.mark.parametrize("width", [1, 8])
def test_numbered_images_are_in_the_order_of_their_keys(tmp_path: Path, width: int) -> None:
    keys = {b"%0*d" % (width, i): i for i in range(NUM)}
    about = {b"__len__": b"%d" % NUM, b"length": b"300", b"meta_info.txt": b"0.png (1,1,3) 1"}
    store = open_store(write(tmp_path / "a.lmdb", {key: IMAGES[i] for key, i in keys.items()} | about))
    assert len(store) == NUM
    assert store.read(np.arange(NUM), ("image",))["image"] == [IMAGES[keys[key]] for key in sorted(keys)]


def test_scene_text(tmp_path: Path) -> None:
    path = write_scene_text(tmp_path / "a.lmdb")
    store = open_store(path)
    assert (len(store), store.columns) == (NUM, ("image", "text"))
    batch = store.read(np.array([299, 0, 7]), ("image", "text"))
    assert batch == {"image": [IMAGES[299], IMAGES[0], IMAGES[7]], "text": ["wörd 300", "wörd 1", "wörd 8"]}
    write(path, {b"label-000000002": b"\xff"})
    with lmdb.open(str(path), subdir=False, lock=False) as env, env.begin(write=True) as txn:
        txn.delete(b"label-000000001")
    assert open_store(path).read(np.arange(3), ("text",))["text"] == [None, None, "wörd 3"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_efficient_pytorch_is_unpickled_where_it_is_asked_for(tmp_path: Path, protocol: int) -> None:
    path = write_efficient_pytorch(tmp_path / "train.lmdb", protocol)
    with pytest.raises(StoreError, match=r"train\.lmdb holds pickled values.*--store\.layout pickle"):
        len(open_store(path))
    store = open_store(path, layout="pickle")
    assert (len(store), store.columns) == (NUM, ("image", "label"))
    batch = store.read(np.arange(NUM))
    assert batch["image"] == [IMAGES[int(key)] for key in NUMBERED]
    assert batch["label"].tolist() == [int(key) % 7 for key in NUMBERED]


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    bad = pickle.dumps((IMAGES[0], Malicious(touched)))
    all_bad = write(tmp_path / "all.lmdb", {b"%d" % i: bad for i in range(20)})
    with pytest.raises(StoreError, match=r"all\.lmdb is not in the layout pickle: .*more than plain data"):
        len(open_store(all_bad, layout="pickle"))
    entries = {b"%04d" % i: pickle.dumps((image, 1)) for i, image in enumerate(IMAGES)}
    one_bad = write(tmp_path / "one.lmdb", entries | {b"0005": bad, b"__keys__": bad, b"__len__": bad})
    batch = open_store(one_bad, layout="pickle").read(np.arange(NUM))
    assert [i for i, image in enumerate(batch["image"]) if image is None] == [5]
    assert batch["label"][5] == 0
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (pickle.dumps(IMAGES[0]), "a pickled bytes, not"),
        (pickle.dumps((1, 2, 3)), "a pickled tuple, not"),
        (pickle.dumps((IMAGES[0], "cat")), "its label is str, not int64"),
        (pickle.dumps((IMAGES[0], 1 << 63)), "its label is int, not int64"),
        (pickle.dumps(("path", 3)), "its image is str, not binary"),
        (pickle.dumps({"image": IMAGES[0]}), "it has no label"),
        (b"no pickle", "not in the layout pickle"),
    ],
)
def test_other_pickles_say_what_they_are(tmp_path: Path, value: bytes, reason: str) -> None:
    path = write(tmp_path / "a.lmdb", {b"%d" % i: value for i in range(20)})
    with pytest.raises(StoreError, match=reason):
        len(open_store(path, layout="pickle"))


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
        len(open_store(path))
    store = open_store(path, layout=f"{__name__}:own")
    assert store.columns == ("image", "label", "key", "name", "weight")
    batch = store.read(np.array([2, 8, 7, 299]), store.columns)
    assert batch["image"] == [IMAGES[2], None, None, IMAGES[299]]
    assert batch["label"].tolist() == [2, 0, 0, 2] and batch["weight"].tolist() == [0.5, 0, 0, 0.5]
    assert batch["key"] == ["k002", None, None, "k299"]


def nothing(key: bytes, value: bytes) -> Any:
    return None


def textual(key: bytes, value: bytes) -> Any:
    return {"image": value, "label": "cat"}


def boxes(key: bytes, value: bytes) -> Any:
    return {"image": value, "boxes": [1, 2]}


def raising(key: bytes, value: bytes) -> Any:
    raise LookupError("of all")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "it returned no sample with an image, but None"),
        ("textual", "column 'label' has type 'string'; it must be int64"),
        ("boxes", r"column 'boxes' has type .*list.*types are: int64"),
        ("raising", "raising raised LookupError: of all"),
    ],
)
def test_a_function_that_makes_no_samples_is_told_why(tmp_path: Path, name: str, message: str) -> None:
    path = write_own(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match=rf"not in the layout {__name__}:{name}: at key b'k[0-9]+': .*{message}"):
        len(open_store(path, layout=f"{__name__}:{name}"))


def test_layouts_that_are_not_there(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "a.lmdb")
    with pytest.raises(StoreError, match="layout 'lsun' is none of: auto, image, scene-text, pickle, module:func"):
        len(open_store(path, layout="lsun"))
    with pytest.raises(ConfigError, match="layout 'no_such:thing' cannot be imported"):
        len(open_store(path, layout="no_such:thing"))
    with pytest.raises(StoreError, match="no key that begins with image-"):
        len(open_store(path, layout="scene-text"))
    with pytest.raises(StoreError, match="holds no samples: 1 keys"):
        len(open_store(write(tmp_path / "b.lmdb", {b"__len__": b"0"})))


def test_raypipe_s_own_are_read_as_such_whatever_the_layout(tmp_path: Path, stores: dict[str, Path]) -> None:
    assert open_store(stores["train"], layout="pickle").columns == ("image", "label")


@pytest.mark.parametrize("layout", ["auto", "pickle", "own"])
def test_pickles_with_its_layout(tmp_path: Path, layout: str) -> None:
    makers = {"auto": write_lsun, "pickle": write_efficient_pytorch, "own": write_own}
    name = f"{__name__}:own" if layout == "own" else layout
    store = open_store(makers[layout](tmp_path / "a.lmdb"), layout=name)
    (tmp_path / "store.pickle").write_bytes(pickle.dumps(store))
    program = (
        "import pathlib, pickle, sys, numpy as np\n"
        "store = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(store.fingerprint, len(store.read(np.array([9]), ('image',))['image'][0]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store.pickle")]
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60)
    assert done.stdout.split() == [store.fingerprint, str(len(store.read(np.array([9]), ("image",))["image"][0]))]


def test_the_fingerprint_is_of_the_contents(tmp_path: Path) -> None:
    store = LMDBStore(write_lsun(tmp_path / "a.lmdb"))
    assert re.fullmatch("[0-9a-f]{32}", store.fingerprint)
    # The same samples, written in another order, deleted and put again, compacted: another file.
    path = write_lsun(tmp_path / "b.lmdb", IMAGES[::-1])
    with lmdb.open(str(path), subdir=False, lock=False, map_size=64 << 20) as env:
        for image in IMAGES[:50]:
            key = hashlib.sha1(image).hexdigest().encode()
            for change in (lambda txn, key=key: txn.delete(key), lambda txn, k=key, v=image: txn.put(k, v)):
                with env.begin(write=True) as txn:
                    change(txn)
        env.copy(str(tmp_path / "c"), compact=True)
    assert (tmp_path / "a.lmdb").read_bytes() != path.read_bytes()
    for same in (path, tmp_path / "c"):
        assert LMDBStore(same).fingerprint == store.fingerprint
    others = [
        write_lsun(tmp_path / "d.lmdb", IMAGES[:-1]),
        write_lsun(tmp_path / "e.lmdb", [*IMAGES[:-1], IMAGES[-1] + b"!"]),
    ]
    assert len({LMDBStore(other).fingerprint for other in [path, *others]}) == 3
    assert LMDBStore(path, "image").fingerprint == store.fingerprint


def test_entries_are_those_of_liblmdb(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    keys = {rng.bytes(int(rng.integers(1, 60))) for _ in range(2000)} | {b"image-%04d" % i for i in range(500)}
    keys |= {b"image-", b"image.", b"image", b"image-\xff"}
    path = write(tmp_path / "a.lmdb", {key: key[::-1] * 20 for key in keys})
    file = LMDBFile(path)
    end = b"\xff" * 600
    for bounds in [
        (b"", end),
        (b"image-", b"image."),
        (b"", b"absent", b"absent\0", b"image-0000", b"image-0000\0", b"image-\xff", b"image-\xff\0", end),
        (min(keys) + b"\0", b"image", b"image\0", max(keys)),
        (b"image-0005", b"image-0005\0", b"image-0007", b"image-0007"),
        (b"nothing begins so", b"nothing begins sp"),
    ]:
        parts = list(zip(bounds[::2], bounds[1::2], strict=True))
        expected = [key for key in sorted(keys) if any(start <= key < stop for start, stop in parts)]
        entries = Entries(file, bounds)
        assert len(entries) == len(expected)
        found = [entries.at(index) for index in range(len(entries))]
        assert [key for key, _ in found] == expected
        assert all(bytes(value) == key[::-1] * 20 for key, value in found)


def test_a_damaged_sample_is_a_bad_one_and_a_damaged_index_an_error(tmp_path: Path) -> None:
    path = write_lsun(tmp_path / "a.lmdb")
    whole = path.read_bytes()
    # The last page but one of a long value.
    os.truncate(path, len(whole) - 3 * 4096)
    try:
        images = open_store(path).read(np.arange(NUM), ("image",))["image"]
        assert None in images
    except StoreError as error:
        assert "a.lmdb is damaged" in str(error)
    os.truncate(path, len(whole) // 10)
    with pytest.raises(StoreError, match=r"a\.lmdb (is damaged|is truncated)"):
        len(open_store(path))
