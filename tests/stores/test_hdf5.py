"""HDF5 files as h5py writes them: pixels and encoded images, and what leads out of the file."""

from __future__ import annotations

import gc
import io
import os
import pickle
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from raypipe.errors import StoreError
from raypipe.stores import open_store
from raypipe.stores.base import name_of
from raypipe.stores.hdf5 import HDF5Store
from raypipe.transform.decode import decode

NUM = 30
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (NUM, 9, 7, 3), np.uint8)
LABELS = RNG.integers(0, 5, NUM)
ENCODED = [b"\xff\xd8\xff" + bytes([i]) * (i * 40 + 1) for i in range(NUM)]


def write(path: Path, options: dict[str, Any] | None = None, **datasets: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in datasets.items():
            file.create_dataset(name, data=values, **(options or {}))
    return path


def write_encoded(path: Path) -> Path:
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (NUM,), h5py.vlen_dtype(np.uint8))
        for i, image in enumerate(ENCODED):
            images[i] = np.frombuffer(image, np.uint8)
        file["labels"] = LABELS
    return path


@pytest.mark.parametrize("options", [{}, {"chunks": (4, 9, 7, 3), "compression": "gzip", "shuffle": True}])
def test_pixels_come_out_equal(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write(tmp_path / "a.h5", options, images=PIXELS)
    with h5py.File(path, "a") as file:
        file["labels"] = LABELS
    store = open_store(path)
    assert (len(store), store.columns, store.classes, store.groups) == (NUM, ("image", "label"), None, None)
    order = np.concatenate([RNG.permutation(NUM), [3, 3, 4, 5, 0]])
    batch = store.read(order)
    assert all(image.startswith(b"\x89PNG") for image in batch["image"])
    assert np.array_equal([decode(image) for image in batch["image"]], PIXELS[order])
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(batch["image"][0]))), PIXELS[order[0]])
    assert batch["label"].tolist() == LABELS[order].tolist()


@pytest.mark.parametrize("shape", [(NUM, 9, 7), (NUM, 9, 7, 1)])
def test_grey_pixels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    grey = PIXELS[..., 0]
    images = open_store(write(tmp_path / "a.h5", images=grey.reshape(shape))).read(np.arange(NUM), ("image",))
    assert np.array_equal([decode(image)[..., 1] for image in images["image"]], grey)


def test_as_pcam_has_them(tmp_path: Path) -> None:
    """camelyonpatch_level_2_split_valid_x.h5 and …_y.h5 put together: y is (N, 1, 1, 1)."""
    store = open_store(write(tmp_path / "a.h5", x=PIXELS, y=LABELS.astype(np.uint8).reshape(NUM, 1, 1, 1)))
    assert store.read(np.arange(NUM))["label"].tolist() == LABELS.tolist()


def test_encoded_images_of_any_length(tmp_path: Path) -> None:
    batch = open_store(write_encoded(tmp_path / "a.hdf5")).read(np.arange(NUM)[::-1])
    assert batch["image"] == ENCODED[::-1] and batch["label"].tolist() == LABELS[::-1].tolist()


def test_other_names_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["train/pictures"], file["train/target"], file["label"] = PIXELS, LABELS, np.zeros(3)
    with pytest.raises(StoreError, match=r"a\.h5 has no dataset 'images or .* for image, only: label, train"):
        len(open_store(path))
    store = open_store(path, image_column="train/pictures", label_column="train/target")
    assert store.read(np.array([5]))["label"].tolist() == [LABELS[5]]
    with pytest.raises(StoreError, match="labels are one integer for each of the 30 images; set label_column"):
        len(open_store(path, image_column="train/pictures"))
    with pytest.raises(StoreError, match="no dataset 'train' for image"):
        len(open_store(path, image_column="train"))


def test_links_and_foreign_data_are_never_followed(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.h5", images=PIXELS)
    (tmp_path / "raw.bin").write_bytes(PIXELS.tobytes())
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["external"] = h5py.ExternalLink("secret.h5", "/images")
        file["folder"] = h5py.ExternalLink("secret.h5", "/")
        file["soft"] = h5py.SoftLink("/external")
        file.create_dataset("raw", PIXELS.shape, np.uint8, external=[(str(tmp_path / "raw.bin"), 0, PIXELS.size)])
        layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
        layout[...] = h5py.VirtualSource(str(secret), "images", PIXELS.shape)
        file.create_virtual_dataset("virtual", layout)
        file["references"] = np.array([file.ref, file.ref], h5py.ref_dtype)
        file["text"] = np.array(["a", "b"], h5py.string_dtype())
        assert file["external"].shape == file["raw"].shape == PIXELS.shape  # h5py itself would
    for name, message in [
        ("external", "'external' is a link .ExternalLink., which is not followed"),
        ("folder/images", "is a link .ExternalLink., which is not followed"),
        ("soft", "is a link .SoftLink., which is not followed"),
        ("raw", "the data of 'raw' are in other files, which are not read"),
        ("virtual", "the data of 'virtual' are in other files"),
        ("references", r"object of \(2,\); images are uint8"),
        ("text", r"object of \(2,\); images are uint8"),
    ]:
        with pytest.raises(StoreError, match=message):
            len(open_store(path, image_column=name))
        with pytest.raises(StoreError):
            len(open_store(write_label(tmp_path / "b.h5", path), image_column="own", label_column=name))


def write_label(path: Path, other: Path) -> Path:
    path.write_bytes(other.read_bytes())
    with h5py.File(path, "a") as file:
        file["own"] = PIXELS
    return path


@pytest.mark.parametrize(
    "images",
    [PIXELS.astype(np.float32), PIXELS[..., :2], PIXELS[:0], np.zeros((NUM, 4), np.uint8), np.uint8(3)],
    ids=["float", "two channels", "none", "flat", "a number"],
)
def test_what_are_no_images(tmp_path: Path, images: Any) -> None:
    with pytest.raises(StoreError, match=r"a\.h5, /images: .*(images are uint8|has no samples)|has no samples"):
        len(open_store(write(tmp_path / "a.h5", images=images)))


def test_a_file_that_is_none_or_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images=PIXELS, labels=LABELS)
    data = path.read_bytes()
    for content in (b"", b"no HDF5" * 200, data[: len(data) // 2]):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"a\.h5 cannot be opened as HDF5"):
            len(open_store(path))


def test_a_sample_is_named_by_its_row(tmp_path: Path) -> None:
    assert name_of(open_store(write_encoded(tmp_path / "x.h5")), 2) == f"{tmp_path}/x.h5, row 2"


def test_it_is_a_store(tmp_path: Path) -> None:
    store = HDF5Store(write_encoded(tmp_path / "a.h5"))
    copy = pickle.loads(pickle.dumps(store))
    assert store.fingerprint == copy.fingerprint == HDF5Store(write_encoded(tmp_path / "b.h5")).fingerprint
    assert HDF5Store(write(tmp_path / "c.h5", images=PIXELS, labels=LABELS)).fingerprint != store.fingerprint
    store.close()
    assert store.read(np.array([2, 2, 1]))["image"] == [ENCODED[2], ENCODED[2], ENCODED[1]]
    with pytest.raises(IndexError, match="30 is outside"):
        store.read(np.array([30]))


def test_without_its_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.h5", images=PIXELS)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(StoreError, match=r"pip install 'raypipe\[hdf5\]'"):
        len(HDF5Store(path))


def test_a_chunk_that_unpacks_to_more_than_it_should_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"chunks": (1, 9, 7, 3), "compression": "gzip"}, images=PIXELS)
    squeeze, zeros = zlib.compressobj(1), bytes(1 << 24)
    bomb = b"".join(squeeze.compress(zeros) for _ in range(100)) + squeeze.flush()
    with h5py.File(path, "a") as file:
        file["images"].id.write_direct_chunk((3, 0, 0, 0), bomb)
    store = open_store(path)
    with pytest.raises(StoreError, match=r"a\.h5 cannot be read (at row 3|as HDF5: .* at row 3)"):
        store.read(np.array([3]), ("image",))
    assert np.array_equal(decode(store.read(np.array([4]), ("image",))["image"][0]), PIXELS[4])


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSEGV, "died"), (signal.SIGPROF, "more than 10 s of CPU")]
)
def test_a_reader_that_dies_is_one_error_and_the_next_read_goes_on(
    tmp_path: Path, number: int, reason: str
) -> None:
    store = HDF5Store(write(tmp_path / "a.h5", images=PIXELS))
    before = store.read(np.array([4]), ("image",))
    os.kill(store._opened.process.pid, number)
    with pytest.raises(StoreError, match=rf"a\.h5 cannot be read as HDF5: libhdf5 .*{reason}.* at row 4"):
        store.read(np.array([4]), ("image",))
    assert store.read(np.array([4]), ("image",)) == before


def test_no_reader_is_left_behind(tmp_path: Path) -> None:
    store = HDF5Store(write(tmp_path / "a.h5", images=PIXELS))
    assert len(store) == NUM
    readers = [store._opened.process]
    store.close()
    assert store.fingerprint
    readers.append(store._opened.process)
    del store
    gc.collect()
    assert all(reader.poll() is not None for reader in readers)
