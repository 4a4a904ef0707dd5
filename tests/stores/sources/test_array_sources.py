"""Arrays of a whole data set: HDF5 by h5py, .npz by numpy, .pt by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from refused import source_refused, source_rows
from torch.utils.data import TensorDataset

from raypipe.stores.sources import open_source

pytestmark = pytest.mark.usefixtures("in_own_folder")

NUM = 12
PIXELS = np.random.default_rng(0).integers(0, 256, (NUM, 6, 5, 3), np.uint8)
LABELS = np.arange(NUM) % 4


def write_hdf5(name: str, arrays: dict[str, Any]) -> str:
    with h5py.File(f"{name}.h5", "w") as file:
        for key, values in arrays.items():
            file[key] = values
    return f"{name}.h5"


def write_npz(name: str, arrays: dict[str, Any]) -> str:
    np.savez_compressed(f"{name}.npz", **arrays)
    return f"{name}.npz"


def write_pt(name: str, arrays: dict[str, Any]) -> str:
    tensors = {key: torch.from_numpy(values) for key, values in arrays.items()}
    torch.save(tensors, f"{name}.pt")
    return f"{name}.pt"


Write = Callable[[str, dict[str, Any]], str]
each_format = pytest.mark.parametrize("write", [write_hdf5, write_npz, write_pt])


def check(rows: list[dict[str, Any]], pixels: np.ndarray = PIXELS) -> None:
    assert all(
        np.array_equal(row["image"], each)
        for row, each in zip(rows, pixels, strict=True)
    )
    assert [row["label"] for row in rows] == LABELS.tolist()


@each_format
@pytest.mark.parametrize(
    ("image", "label"),
    [("images", "labels"), ("x", "y"), ("data", "label"), ("X_train", "y_train")],
)
def test_the_usual_names_are_found(write: Write, image: str, label: str) -> None:
    check(source_rows(write("a", {image: PIXELS, label: LABELS})))


@each_format
def test_channels_may_come_first_and_labels_in_a_column(write: Write) -> None:
    arrays = {
        "x": np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2)),
        "y": LABELS[:, None],
    }
    check(source_rows(write("a", arrays)))
    grey = {"x": np.ascontiguousarray(PIXELS[..., 0]), "y": LABELS}
    check(source_rows(write("b", grey)), PIXELS[..., 0])


@each_format
def test_arrays_of_as_many_rows_become_columns(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"mask": PIXELS[..., 0].copy(), "score": LABELS / 2, "mean": np.zeros(3)}
    address = write("a", {"images": PIXELS, "labels": LABELS, **others})
    source = open_source(address)
    assert source is not None and list(source.arrays) == ["mask"]
    row = list(source.samples)[5]
    assert row.keys() == {"image", "label", "mask", "score"} and row["score"] == 0.5
    assert np.array_equal(row["mask"], PIXELS[5, ..., 0])
    assert (
        "left out, as they have no row for each image: mean (float64 (3,))"
        in caplog.text
    )


@each_format
def test_several_that_may_be_the_images_are_listed(write: Write) -> None:
    splits = {
        "x_train": PIXELS,
        "y_train": LABELS,
        "x_test": PIXELS[:2],
        "y_test": LABELS[:2],
    }
    address = write("a", splits)
    source_refused(
        r"several .* set store\.image_column; its .*x_test \(uint8 \(2, 6, ", address
    )
    assert [row["label"] for row in source_rows(address, "x_test")] == [0, 1]
    source_refused(r"has no .* 'z' for image_column; its .*x_train", address, "z")


@each_format
@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (
            PIXELS / np.float32(255),
            LABELS,
            r"'x' is float32 \(12, 6, 5, 3\); images are encoded bytes",
        ),
        (PIXELS.reshape(NUM, -1), LABELS, r"'x' is uint8 \(12, 90\)"),
        (
            PIXELS,
            LABELS[:5],
            r"'y' is int64 \(5,\); labels are numbers, one row for each of the 12 images",
        ),
        (PIXELS[:0], LABELS[:0], r"'x' is uint8 \(0, 6, 5, 3\)"),
    ],
)
def test_arrays_that_are_no_images_or_labels(
    write: Write, pixels: np.ndarray, labels: np.ndarray, message: str
) -> None:
    source_refused(message, write("a", {"x": pixels, "y": labels}))


def test_labels_of_several_numbers_are_arrays() -> None:
    one_hot = np.eye(4, dtype=np.float32)[LABELS]
    rows = source_rows(write_npz("a", {"x": PIXELS, "y": one_hot}))
    assert rows[2]["label"].tolist() == [0, 0, 1, 0]


# HDF5


def test_hdf5_of_encoded_images_in_all_ways() -> None:
    images = [b"\xff\xd8" + bytes([i]) * (i + 1) + b"\xff\xd9" for i in range(NUM)]
    with h5py.File("a.h5", "w") as file:
        file["labels"] = LABELS
        file["fixed"] = np.array(images, "S20")
        file["void"] = np.array([image.ljust(20, b"\0") for image in images], "V20")
        vlen = file.create_dataset("group/images", (NUM,), h5py.vlen_dtype(np.uint8))
        for number, image in enumerate(images):
            vlen[number] = np.frombuffer(image, np.uint8)
        file["names"] = [f"ä{i}" for i in range(NUM)]
    assert [row["image"] for row in source_rows("a.h5", "group/images")] == images
    rows = source_rows("a.h5", "fixed", "labels")
    assert [row["image"] for row in rows] == images and rows[3]["names"] == "ä3"
    assert [row["image"].rstrip(b"\0") for row in source_rows("a.h5", "void")] == images


def test_hdf5_follows_nothing_out_of_its_file() -> None:
    write_hdf5("other", {"x": PIXELS})
    with h5py.File("a.h5", "w") as file:
        file["x"] = h5py.ExternalLink("other.h5", "x")
        layout = h5py.VirtualLayout(PIXELS.shape, np.uint8)
        layout[:] = h5py.VirtualSource("other.h5", "x", PIXELS.shape)
        file.create_virtual_dataset("v", layout)
    source_refused(
        r"no column .image. for image_column; its .* are v \(in other files",
        "a.h5",
    )
    source_refused("'v' is in other files", "a.h5", "v")


def test_hdf5_of_two_data_sets_for_one_column_is_refused() -> None:
    file = write_hdf5("a", {"x": PIXELS, "a/b": LABELS, "a.b": LABELS})
    source_refused(r"two arrays would be the column 'a\.b'", file)


# Pickles


def test_npz_of_objects_is_not_unpickled() -> None:
    objects = np.array([b"a", None] * 6, object)
    np.savez("a.npz", images=objects, pixels=PIXELS, y=LABELS)
    source_refused(r"'images' is a pickle \(12,\)", "a.npz", "images")
    assert len(source_rows("a.npz", "pixels")) == NUM


def test_pt_of_a_pair_and_of_one_tensor() -> None:
    torch.save((torch.from_numpy(PIXELS), torch.from_numpy(LABELS)), "pair.pt")
    check(source_rows("pair.pt"))
    torch.save(
        torch.from_numpy(PIXELS),
        "one.pt",
        _use_new_zipfile_serialization=False,
    )
    assert [row.keys() for row in source_rows("one.pt")] == [{"image"}] * NUM


def test_pt_of_anything_else_runs_no_code() -> None:
    torch.save([1, 2, 3], "list.pt")
    source_refused("has a list; raypipe takes a dict of tensors, a pair", "list.pt")
    torch.save(TensorDataset(torch.from_numpy(PIXELS)), "object.pt")
    source_refused(r"object\.pt cannot be read: UnpicklingError", "object.pt")
