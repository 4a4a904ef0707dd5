"""Folders of classes, drawn and by hand, and their tars."""

from __future__ import annotations

import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.errors import StoreError
from raypipe.stores import Store
from raypipe.stores.base import is_class

Build = Callable[[Path], None]


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def build(
    *names: str, folders: str = "", links: dict[str, str] | None = None, hard: str = ""
) -> Build:
    """Names of files, each with its name as content; of empty folders; links; and `FILE=OTHER`, hard links."""

    def make(root: Path) -> None:
        write(root, *names)
        for folder in folders.split():
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name, target in (links or {}).items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).symlink_to(target)
        for pair in hard.split():
            name, target = pair.split("=")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(root / target, root / name)

    return make


def with_holes(root: Path) -> None:
    write(root, "a/1.png", "b/2.png")
    with (root / "a" / "holes.png").open("wb") as file:
        for place in (100_000, 700_000):
            file.seek(place)
            file.write(b"end" * 2000)
        file.truncate(900_000)


TWO = "cat/1.png", "dog/2.png"

SUFFIXES = (
    "a/1.JPG",
    "a/2.jfif",
    "b/3.jpe",
    "b/4.WebP",
    "b/5.dib",
    "c/6.hif",
    "c/7.ppm",
    "c/notes.txt",
)

OF_SYSTEMS = (
    *(
        "__MACOSX/cat/1.png",
        "__MACOSX/._cat",
        "cat/._1.png",
        "cat/.DS_Store",
        "lost+found/3.png",
        ".hidden/6.png",
    ),
    *(
        "cat/@eaDir/4.png",
        "$RECYCLE.BIN/5.png",
        "cat/.cache/7.png",
        "dog/__MACOSX/8.png",
    ),
)

TREES: dict[str, Build] = {
    "plain": build(*TWO),
    "nested": build(
        "cat/x/1.png", "cat/x-1/2.png", "cat/x.png", "cat/z/y/3.png", "dog/1.png"
    ),
    "suffixes": build(*SUFFIXES),
    "classes with _": build("_a/1.png", "__b__/1.png", "c_d/1.png", "_/1.png"),
    "only classes with _": build("_a/1.png", "_b/2.png"),
    "odd letters": build(
        "a b/1.png", "é/2.png", "a+b/3.png", "a-b/4.png", "A/5.png", "#/6.png"
    ),
    "an empty class": build(*TWO, folders="bird ant"),
    "a class of hidden files": build(*TWO, "bird/.gitkeep"),
    "a class of other files": build(*TWO, "bird/notes.txt"),
    "one top folder": build("train/cat/1.png", "train/dog/2.png"),
    "several top folders": build("data/train/cat/1.png", "data/train/dog/x/2.png"),
    "one top folder, and an empty class": build(
        "train/cat/1.png", "train/dog/2.png", folders="train/bird"
    ),
    "one top folder, and a hidden one": build(
        "train/cat/1.png", "train/dog/2.png", ".git/3.png"
    ),
    "one top folder beside documents": build(
        "data/cat/1.png", "data/dog/2.png", "docs/readme.txt", "LICENSE"
    ),
    "one class": build("cat/1.png", "cat/2.png"),
    "one class, deeper": build("cat/2020/1.png", "cat/2021/2.png"),
    "one class, deeper, beside an empty one": build(
        "cat/2020/1.png", "cat/2021/2.png", folders="dog"
    ),
    "files of systems": build(*TWO, *OF_SYSTEMS),
    "files at the top": build(*TWO, "3.png", "labels.csv", "Thumbs.db"),
    "arrays": build("a/1.npy", "b/2.npy"),
    "arrays beside images": build("a/1.npy", "b/2.npy", "b/3.png"),
    "hard links": build(
        *TWO,
        "z/0.png",
        hard="dog/as.png=cat/1.png ant/as.png=z/0.png zoo/x/1.png=cat/1.png",
    ),
    "hard links to hidden files": build(
        ".x/1.png", ".x/2.png", hard="cat/1.png=.x/1.png dog/2.png=.x/2.png"
    ),
    "links": build(
        *TWO,
        links={
            "dog/as.png": "../cat/1.png",
            "dog/b.png": "as.png",
            "ant/1.png": "../dog/2.png",
        },
    ),
    "links that lead nowhere": build(
        *TWO, links={"dog/3.png": "no.png", "dog/4.png": "4.png", "dog/x": "../y"}
    ),
    "links to folders": build(
        *TWO, links={"bird": "cat", "dog/more": "../cat", "dog/other": "../bird"}
    ),
    "links in a ring": build(
        *TWO, links={"cat/up": "..", "cat/self": ".", "dog/cat": "../cat"}
    ),
    "links to hidden folders": build(
        ".all/1.png", ".all/x/2.png", links={"cat": ".all", "dog": ".all/x"}
    ),
    "sparse files": with_holes,
}


def random_tree(seed: int) -> Build:
    """A tree of what stands above, by chance."""

    def make(root: Path) -> None:
        draw = random.Random(seed)
        names = [
            "a",
            "b",
            "_c",
            "d-1",
            "d",
            "e e",
            ".h",
            "__MACOSX",
            "lost+found",
            "train",
            "x.png",
        ]
        folders, files = [Path()], list[Path]()
        for _ in range(draw.randint(3, 25)):
            kind = draw.choice(["folder"] * 2 + ["file"] * 4 + ["hard", "link"])
            suffix = (
                ""
                if kind == "folder"
                else draw.choice([".png", ".png", ".JPG", ".npy", ".md"])
            )
            path = draw.choice(folders) / f"{draw.choice(names)}{suffix}"
            if (root / path).is_symlink() or (root / path).exists():
                continue
            if kind == "folder":
                (root / path).mkdir()
                folders.append(path)
            elif kind == "hard" and files:
                os.link(root / draw.choice(files), root / path)
            elif kind == "link":
                target = draw.choice([*folders, *files, Path("absent.png")])
                (root / path).symlink_to(
                    os.path.relpath(root / target, (root / path).parent)
                )
            else:
                (root / path).write_bytes(str(path).encode())
                files.append(path)

    return make


def contents(make: Callable[..., Store], path: Path) -> Any:
    """All that a stream gets of a store; the error of one that cannot be opened."""
    store = make(path, target_column="folder")
    try:
        read = store.read(np.arange(len(store)), ("image", "label"))
    except StoreError as error:
        return str(error)
    return (
        read["image"],
        read["label"].tolist(),
        store.classes,
        tuple(store.schema.names),
        is_class(store),
    )


def in_tar(root: Path, path: Path, form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for child in sorted(root.iterdir()):
            tar.add(child, child.name)
    return path


GNU_TAR = """
for tree in trees/*; do
    for format in gnu pax; do
        tar --sparse --format=$format -C "$tree" -cf "$(basename "$tree").$format.tar" . || exit 1
    done
done
"""


def sparse_header(name: str, parts: list[tuple[int, int]], num_bytes: int) -> bytes:
    """A header of GNU tar's old form, for up to four parts."""
    info = tarfile.TarInfo(name)
    info.size = sum(length for _, length in parts)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[156:157] = b"S"
    for number, part in enumerate(parts):
        block[386 + 24 * number : 410 + 24 * number] = b"".join(
            b"%011o\0" % value for value in part
        )
    block[483:495], block[148:156] = b"%011o\0" % num_bytes, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)
