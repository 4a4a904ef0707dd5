"""Tars of WebDataset's layout, local and in a bucket."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from raypipe.storage.filesystem import open_filesystem


def write_members(
    path: Path, members: Iterable[tuple[str, bytes]], mode: str = "w"
) -> Path:
    """Write files by name."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def by_suffix(
    samples: Iterable[Mapping[str, bytes]], first: int = 0
) -> Iterator[tuple[str, bytes]]:
    """Yield the members of samples, suffix -> content, under numbers from `first` on."""
    for number, sample in enumerate(samples, first):
        for suffix, content in sample.items():
            yield f"{number:06d}.{suffix}", content


def write_tar(
    path: Path, samples: Sequence[tuple[bytes, int]], first: int = 0, mode: str = "w"
) -> Path:
    """Write images with their classes, under numbers from `first` on."""
    pairs = ({"jpg": image, "cls": b"%d" % label} for image, label in samples)
    return write_members(path, by_suffix(pairs, first), mode)


def put(file: Path, address: str) -> str:
    """Copy a local file to an address, which is returned."""
    filesystem, path = open_filesystem(address)
    with filesystem.open_output_stream(path, compression=None) as target:
        target.write(file.read_bytes())
    return address
