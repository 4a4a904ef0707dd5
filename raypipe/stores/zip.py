"""Class folders inside a zip: members `class/name.jpg`, stored or deflated, read by position, never extracted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.stores.archive import ArchiveStore, OpenFile
from raypipe.stores.members import Index, Members, index_class_folders
from raypipe.stores.zip_index import content_of, member_at, scan


class ZipStore(ArchiveStore[Members]):
    """A store in one zip, or in several, `NAME-{0000..0099}.zip`; see `ArchiveStore`.

    Classes and samples are those of a tar of class folders, see `raypipe.stores.tar.TarStore`; the folder
    `__MACOSX` does not count. A member that does not have its checksum is an image None.
    """

    suffix = ".zip"
    index_file = "zip-1.json"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.address, self._files)

    def _scan(self, path: Path, name: str) -> Members:
        return scan(path, name)

    def _index(self, names: Sequence[str], scans: Sequence[Members]) -> Index:
        return index_class_folders(self.address, scans, 5)

    def _content(self, file: OpenFile, name: str, place: list[int]) -> bytes | None:
        return content_of(file.descriptor, name, place)

    def _member(self, file: OpenFile, place: list[int]) -> str:
        return member_at(file.descriptor, place[0])

    def _to_json(self, scan: Members) -> dict[str, Any]:
        return {"members": scan}

    def _of_json(self, content: dict[str, Any]) -> Members:
        return {name: tuple(place) for name, place in content["members"].items()}
