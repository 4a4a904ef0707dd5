"""Samples in uncompressed tars: class folders, as ImageFolder has them, or the WebDataset layout.

One scan of the headers makes an index, see `raypipe.stores.tar_index`; samples are then read by position.
Nothing is ever extracted, so what the members' names say has no effect on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.remote_file import RemoteFile
from raypipe.stores.archive import ArchiveStore, OpenFile
from raypipe.stores.base import MAX_SAMPLE_BYTES
from raypipe.stores.members import Index, Members, index_class_folders
from raypipe.stores.tar_index import member_at, scan
from raypipe.stores.tar_writer import TarWriter
from raypipe.stores.webdataset import Samples, index_samples

__all__ = ["TarStore", "TarWriter"]


class TarStore(ArchiveStore["Members | Samples"]):
    """A store in one tar, in several, `NAME-{0000..0099}.tar`, or in a folder of `*.tar`; see `ArchiveStore`.

    Class folders: members `class/image.jpg`. Classes are the folders that hold images, in the order of their
    names; samples are sorted by shard, by class, then by member name. Of members of a tar with one name, the last
    counts, as in extraction. Links, hidden files, absolute names and names with `..` do not count.

    WebDataset: members `key.jpg`, `key.cls`, … , see `raypipe.stores.webdataset`. Samples are in the order of the
    tars and of their members. Class names are known where raypipe wrote the tars. A tar is of this layout if any
    sample has a label as it has them, if raypipe wrote it, or if text or JSON stands beside every image.

    Args:
        address: see `ArchiveStore`.
        image_column: of WebDataset: the suffix of the images; "image" = any that is one of images.
        label_column: of WebDataset: the suffix of the labels, or their field in the JSON; "label" = `cls`, or the
            field `label`.
        files: see `ArchiveStore`.
    """

    suffix = ".tar"
    index_file = "tar-2.json"

    def __init__(
        self,
        address: str | Path,
        image_column: str = "image",
        label_column: str = "label",
        files: list[RemoteFile] | None = None,
    ) -> None:
        super().__init__(address, files)
        self._options = (image_column, label_column)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, *self._options, self._files)

    def _scan(self, path: Path, name: str) -> Members | Samples:
        return scan(path, name, *self._options)

    def _index(self, names: Sequence[str], scans: Sequence[Members | Samples]) -> Index:
        samples = [found for found in scans if isinstance(found, Samples)]
        folders = [found for found in scans if not isinstance(found, Samples)]
        if not samples:
            if self._options != ("image", "label"):
                raise StoreError(f"{self.address} is not of the WebDataset layout, so it has no {self._options}")
            hint = ", or that of WebDataset, key.jpg beside key.cls"
            return index_class_folders(self.address, folders, 2, hint)
        if folders:
            other = next(name for name, found in zip(names, scans, strict=True) if not isinstance(found, Samples))
            first = next(name for name, found in zip(names, scans, strict=True) if isinstance(found, Samples))
            raise StoreError(
                f"{first} has the WebDataset layout, and {other} has not, or no labels: all tars of one store "
                "have one layout"
            )
        return index_samples(names, samples)

    def _content(self, file: OpenFile, name: str, place: list[int]) -> bytes | None:
        offset, num_bytes = place[:2]
        if not 0 <= num_bytes <= MAX_SAMPLE_BYTES:
            return None
        # pread leaves the file's position alone, so threads and forks may share the file.
        content = os.pread(file.descriptor, num_bytes, offset)
        if len(content) < num_bytes:
            raise StoreError(f"{name} has become shorter than {offset + num_bytes} bytes; copy it again")
        return content

    def _member(self, file: OpenFile, place: list[int]) -> str:
        return member_at(file.descriptor, place[0])

    def _to_json(self, scan: Members | Samples) -> dict[str, Any]:
        if isinstance(scan, Samples):
            return {"options": self._options, "samples": scan.to_json()}
        return {"options": self._options, "members": scan}

    def _of_json(self, content: dict[str, Any]) -> Members | Samples:
        if tuple(content["options"]) != self._options:
            raise ValueError("of a store with other options")
        if "samples" in content:
            return Samples.of_json(content["samples"])
        return {name: tuple(place) for name, place in content["members"].items()}
