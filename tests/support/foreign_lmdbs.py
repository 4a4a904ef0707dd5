"""LMDBs as other programs write them, by the library lmdb."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgpack


def write_entries(
    path: Path, entries: Mapping[bytes, bytes], *, folder: bool = False
) -> Path:
    """Write keys and values into one file, or into a folder with data.mdb."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        lmdb.open(str(path), subdir=folder, lock=False, map_size=1 << 26) as env,
        env.begin(write=True) as txn,
    ):
        for key, value in entries.items():
            txn.put(key, value)
    return path


# Layouts


def write_folders(
    path: Path, images: Sequence[bytes], labels: Sequence[int], classes: Sequence[str]
) -> Path:
    """Keys `class/name.jpg`."""
    keys = [
        f"{classes[label]}/{number:06d}.jpg".encode()
        for number, label in enumerate(labels)
    ]
    return write_entries(path, dict(zip(keys, images, strict=True)))


def write_lsun(
    folder: Path, images: Sequence[bytes], labels: Sequence[int], classes: Sequence[str]
) -> Path:
    """LSUN: one LMDB for each class, with keys that say nothing."""
    for label, name in enumerate(classes):
        of_class = [number for number in range(len(images)) if labels[number] == label]
        entries = {
            b"%040x" % (number * 0x9E3779B97F4A7C15): images[number]
            for number in of_class
        }
        write_entries(folder / f"{name}_train_lmdb", entries, folder=True)
    return folder


def write_texts(path: Path, images: Sequence[bytes], texts: Sequence[str]) -> Path:
    """Scene text, as CRNN's tool writes it."""
    entries = {b"num-samples": str(len(images)).encode()}
    for number, (image, text) in enumerate(zip(images, texts, strict=True), 1):
        entries |= {
            b"image-%09d" % number: image,
            b"label-%09d" % number: text.encode(),
        }
    return write_entries(path, entries)


def write_values(
    path: Path,
    images: Sequence[bytes],
    labels: Sequence[Any],
    dumps: Callable[[Any], bytes],
    make: Callable[[bytes, Any], Any] = lambda image, label: (image, label),
) -> Path:
    """Efficient-PyTorch's folder2lmdb: keys 0, 1, … , `__keys__` and `__len__`."""
    pairs = enumerate(zip(images, labels, strict=True))
    entries = {
        str(number).encode(): dumps(make(image, label))
        for number, (image, label) in pairs
    }
    about = {b"__keys__": dumps(list(entries)), b"__len__": dumps(len(entries))}
    return write_entries(path, {**entries, **about}, folder=True)


DUMPS: dict[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "msgpack": msgpack.packb,
}
