"""HDF5 files as h5py writes them: pixels and encoded images, and what leads out of the file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from raypipe.errors import StoreError
from raypipe.stores import hdf5, open_source, open_store

NUM = 30
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (NUM, 9, 7, 3), np.uint8)
LABELS = RNG.integers(0, 5, NUM)
ENCODED = [b"\xff\xd8\xff" + bytes([i]) * (i * 40 + 1) for i in range(NUM)]


def read(address: str | Path, **options: str) -> dict[str, Any]:
    """The columns of a source, numbers as arrays."""
    samples = list(open_source(address, **options))
    found = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: values if isinstance(values[0], bytes) else np.array(values) for name, values in found.items()}


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
    found = read(path)
    assert list(found) == ["image", "label"]
    assert np.array_equal(found["image"], PIXELS) and np.array_equal(found["label"], LABELS)


@pytest.mark.parametrize("shape", [(NUM, 9, 7), (NUM, 9, 7, 1)])
def test_grey_pixels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    grey = PIXELS[..., 0].reshape(shape)
    assert np.array_equal(read(write(tmp_path / "a.h5", images=grey))["image"], grey)


def test_more_rows_than_are_read_at_a_time_are_in_order(tmp_path: Path) -> None:
    path, images = tmp_path / "a.h5", [bytes([i]) * (i + 1) for i in range(150)]
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("images", (150,), h5py.vlen_dtype(np.uint8))
        for i, image in enumerate(images):
            rows[i] = np.frombuffer(image, np.uint8)
        file["labels"] = np.arange(150)
    found = read(path)
    assert found["image"] == images and found["label"].tolist() == list(range(150))


def test_as_pcam_has_them(tmp_path: Path) -> None:
    """camelyonpatch_level_2_split_valid_x.h5 and …_y.h5 put together: y is (N, 1, 1, 1)."""
    path = write(tmp_path / "a.h5", x=PIXELS, y=LABELS.astype(np.uint8).reshape(NUM, 1, 1, 1))
    assert np.array_equal(read(path)["label"], LABELS)


def test_encoded_images_of_any_length(tmp_path: Path) -> None:
    found = read(write_encoded(tmp_path / "a.hdf5"))
    assert found["image"] == ENCODED and np.array_equal(found["label"], LABELS)


def test_it_is_no_store_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is read once, in order: copy it by `raypipe convert .*a\.h5 NEW"):
        open_store(write_encoded(tmp_path / "a.h5"))


def test_other_names_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["train/pictures"], file["train/target"], file["label"] = PIXELS, LABELS, np.zeros(3)
    with pytest.raises(
        StoreError, match=r"a\.h5 has no dataset 'images or .* image_column; its datasets are label, train"
    ):
        read(path)
    found = read(path, image_column="train/pictures", label_column="train/target")
    assert np.array_equal(found["label"], LABELS)
    with pytest.raises(StoreError, match="labels are one integer for each of the 30 images; set label_column"):
        read(path, image_column="train/pictures")
    with pytest.raises(StoreError, match="no dataset 'train' for image"):
        read(path, image_column="train")


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
            read(path, image_column=name)
    for name in ("folder/images", "raw"):  # the same for labels
        with pytest.raises(StoreError, match=r"is a link|are in other files"):
            read(write_label(tmp_path / "b.h5", path), image_column="own", label_column=name)


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
        read(write(tmp_path / "a.h5", images=images))


def test_a_file_that_is_none_or_truncated(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", images=PIXELS, labels=LABELS)
    data = path.read_bytes()
    for content in (b"", b"no HDF5" * 200, data[: len(data) // 2]):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"a\.h5 cannot be opened as HDF5"):
            read(path)


def test_without_its_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.h5", images=PIXELS)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(StoreError, match=r"pip install 'raypipe-data\[hdf5\]'"):
        read(path)


def test_a_chunk_that_unpacks_to_more_than_it_should_is_one_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.h5", {"chunks": (1, 9, 7, 3), "compression": "gzip"}, images=PIXELS)
    squeeze, zeros = zlib.compressobj(1), bytes(1 << 24)
    bomb = b"".join(squeeze.compress(zeros) for _ in range(100)) + squeeze.flush()
    with h5py.File(path, "a") as file:
        file["images"].id.write_direct_chunk((3, 0, 0, 0), bomb)
    samples = iter(open_source(path))
    with pytest.raises(StoreError, match=r"a\.h5 cannot be read (at row|as HDF5: libhdf5 died)"):
        list(samples)


class Reader:
    """Keeps the process that reads, or ends it by a signal as soon as it has started."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.process = POPEN(*args, **options)
        if self.number is not None:
            os.kill(self.process.pid, self.number)
        return self.process


POPEN = subprocess.Popen


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSEGV, "died"), (signal.SIGPROF, "more than 10 s of CPU")]
)
def test_a_reader_that_dies_is_one_error(
    tmp_path: Path, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hdf5.subprocess, "Popen", Reader(number))
    with pytest.raises(StoreError, match=rf"a\.h5 cannot be read as HDF5: libhdf5 .*{reason}.* at its start"):
        read(write(tmp_path / "a.h5", images=PIXELS))


def test_a_file_that_takes_for_ever_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "_READER_CPU_S", 0.01)
    zeros = np.zeros((9, 2000, 2000, 3), np.uint8)
    path = write(tmp_path / "a.h5", {"chunks": (1, 2000, 2000, 3), "compression": "gzip"}, images=zeros)
    with pytest.raises(StoreError, match=r"libhdf5 took more than 0\.01 s of CPU"):
        read(path)


def test_no_reader_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5.subprocess, "Popen", reader := Reader())
    path = write(tmp_path / "a.h5", images=PIXELS)
    read(path)
    assert reader.process.poll() is not None
    samples = open_source(path)
    next(samples)
    samples.close()
    assert reader.process.poll() is not None
