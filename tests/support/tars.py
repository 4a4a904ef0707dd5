"""Tars of WebDataset's layout, local and in a bucket."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

from raypipe.storage.filesystem import open_filesystem


def write_tar(
    path: Path, samples: Sequence[tuple[bytes, int]], first: int = 0, mode: str = "w"
) -> Path:
    """Write images with their classes, under numbers from `first` on."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for number, (image, label) in enumerate(samples, first):
            for suffix, content in (("jpg", image), ("cls", b"%d" % label)):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def put(file: Path, address: str) -> str:
    """Copy a local file to an address, which is returned."""
    filesystem, path = open_filesystem(address)
    with filesystem.open_output_stream(path, compression=None) as target:
        target.write(file.read_bytes())
    return address
