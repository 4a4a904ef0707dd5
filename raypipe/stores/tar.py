"""Tars as stores: WebDataset's, or of class folders.

A tar is scanned once, see `raypipe.stores.tar_scan`, and samples are then read by position. In a bucket, samples
are read in groups: runs of about 8 MiB, which one request fetches into the node's cache.

    tar     | 0 1 2 3 4 | 5 6 7 8 9 | 10 11 |     samples, in groups
    part      ^^^^^^^^^ bytes of one group, headers and small members between them included
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import StoreError
from raypipe.storage.files import RemoteFile, look_up, open_object
from raypipe.storage.filesystem import is_remote, join_address
from raypipe.storage.local_cache import Unpacked, shared_cache
from raypipe.storage.local_file import OpenFile, open_regular
from raypipe.storage.retries import in_threads
from raypipe.stores.addresses import list_files
from raypipe.stores.base import FileStore, hash_of_facts
from raypipe.stores.class_folders import tell_left_out
from raypipe.stores.kept import kept, path_of
from raypipe.stores.kinds import COMPRESSED
from raypipe.stores.tar_index import (
    SUFFIX,
    VERSION,
    Tar,
    find_in_run,
    find_scan,
    keep_in_run,
    keep_scan,
)
from raypipe.stores.tar_jumps import Jumps
from raypipe.stores.tar_layouts import index_tars
from raypipe.stores.tar_samples import GROUP_BYTES, TarSamples
from raypipe.stores.tar_scan import UnfitError, scan_tar
from raypipe.stores.webdataset import Indexed, Scan

logger = logging.getLogger(__name__)

_NUM_FETCHES = 4  # tars that are fetched and scanned at a time
# A scan takes about 80 us per member: at most a few seconds for a local tar below this size.
_SMALL_BYTES = 64 << 20
# a remote tar below this size is fetched whole, within a second
_SMALL_REMOTE_BYTES = 32 << 20


class TarStore(FileStore[TarSamples]):
    """A store in one tar, in several, `NAME-{0000..0099}.tar`, or in a folder of `*.tar`, local or remote.

    Members are `key.jpg`, `key.cls`, … , in the order of the tars and of their members, see
    `raypipe.stores.webdataset`; or `class/image.jpg`, in the order of the tars and of their names, see
    `raypipe.stores.class_folders`. Links lead to members of their tar. Hidden files, absolute names and names with
    `..` do not count.

    Remote tars are scanned once: the index is next to them (`raypipe index`), in the folder of the run, or in the
    node's cache, where the scans of large local tars are too. Compressed tars, `.tar.gz`, `.tar.bz2` or
    `.tar.xz`, are unpacked whole into the node's cache, see `storage.local_cache`. The fingerprint is a hash over
    the members' names, sizes and modification times. A member over 512 MiB is None.

    Args:
        address: see above, or a URI; a relative path is made absolute, since processes differ in their working
            folder.
        image_column: the suffix of the images; "image" = any image suffix.
        target_column: the suffix of the labels, or their field in the JSON; "label" = `cls`, the field `label`, or
            the suffix `label`; "folder" = the class folders in any case; empty = no label is needed.
        groups: whether samples are read in groups, and so shuffled in windows: runs of about 8 MiB, or whole
            compressed tars. False = whole remote tars are fetched. None = where tars are remote or compressed.
    """

    def __init__(
        self,
        address: str | Path,
        image_column: str = "image",
        target_column: str = "label",
        groups: bool | None = None,
    ) -> None:
        super().__init__(address, image_column, target_column, groups)
        self._run_folder = ""

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, state = super().__reduce__()
        return make, arguments, {**state, "_run_folder": self._run_folder}

    def adapted(self, shuffle: str, run_folder: str = "") -> TarStore:
        """Return this store for a run.

        Args:
            shuffle: see `PlanConfig`: "window" needs groups, and "global" is faster without.
            run_folder: address of a folder for the index; empty = none.
        """
        image_column, target_column, groups = self._options
        in_groups = {"window": True, "global": False}.get(shuffle, groups)
        store = TarStore(self.address, image_column, target_column, in_groups)
        store._run_folder = run_folder
        return store

    def close(self) -> None:
        super().close()
        if self._listing:
            shared_cache().close(self._listing)

    def _open(self) -> TarSamples:
        tars = self._listing
        if tars is None:
            tars = in_threads(_find, list_tars(self.address))
            if any(not isinstance(tar, OpenFile) for tar in tars):
                self._listing = tars
        indexed = self._indexed(tars)
        groups = self._options[2]
        is_whole = [isinstance(tar, Unpacked) for tar in tars]
        if groups is None:
            groups = is_remote(self.address) or any(is_whole)
        opened = TarSamples(tars, indexed, groups)
        if not self._identity:
            # other processes were sent the store by one that said so
            tell_left_out(self.address, len(opened), indexed.left_out, *indexed.told)
            if any(is_whole):
                tell_compressed(self.address, tars)
        return opened

    def _indexed(self, tars: Sequence[Tar]) -> Indexed:
        """Return the samples of the tars, which the node keeps of remote and large ones."""
        columns = self._options[:2]
        names = [tar.address for tar in tars]
        facts = [(type(tar).__name__, tar.written) for tar in tars]
        in_run = ""
        if self._run_folder and is_remote(self.address):
            name = hash_of_facts((names, facts, columns))
            in_run = join_address(self._run_folder, f"{name}{SUFFIX}")

        def make() -> Indexed:
            found = find_in_run(in_run) if in_run else None
            return found or index_tars(names, self._scans(tars), columns[1])

        path = None
        are_local = all(isinstance(tar, OpenFile) for tar in tars)
        if not are_local or _num_bytes(tars) >= _SMALL_BYTES:
            path = path_of("tars", names, facts, columns, VERSION)
        indexed = kept(path, Indexed, make)
        if in_run and not self._identity:  # this process opened the store first
            keep_in_run(in_run, indexed)
        return indexed

    def _scans(self, tars: Sequence[Tar]) -> list[Scan]:
        """Return the scan of each tar, from its index if there is one."""
        columns = self._options[:2]
        found = in_threads(lambda tar: find_scan(tar, columns), tars)
        missing = [tar for tar, scan in zip(tars, found, strict=True) if scan is None]
        if is_remote(self.address) and any(
            tar.written[0] > GROUP_BYTES for tar in missing
        ):
            logger.info(
                "%s: scanning %d tars, which have no index: `raypipe index` keeps one next to them",
                *(self.address, len(missing)),
            )
        made = iter(in_threads(lambda tar: _scan(tar, *columns), missing, _NUM_FETCHES))
        return [next(made) if scan is None else scan for scan in found]

    def write_index(self) -> dict[str, Any]:
        """Write the index of each tar next to it.

        Returns:
            `tars`, `samples`, and `indexes`, the folders of the indexes.

        Raises:
            StoreError: a tar is damaged; ConfigError: an index cannot be written.
        """
        tars = self._listing or in_threads(_find, list_tars(self.address))
        pairs = zip(tars, self._scans(tars), strict=True)
        written = in_threads(
            lambda pair: keep_scan(pair[0], self._options[:2], pair[1]), pairs
        )
        folders = sorted({address.rpartition("/")[0] for address in written})
        return {
            "tars": len(tars),
            "bytes": _num_bytes(tars),
            "samples": len(self),
            "indexes": folders,
        }


def list_tars(address: str) -> list[RemoteFile]:
    """Return the tars at an address; compressed ones only if there are no others."""
    files = list_files(
        address,
        lambda name: name.endswith(".tar") or _is_compressed(name),
        "*.tar",
    )
    return [file for file in files if not _is_compressed(file.address)] or files


def _is_compressed(name: str) -> bool:
    return name.lower().endswith(COMPRESSED)


def tell_compressed(address: str, tars: Sequence[Tar]) -> None:
    """Say in one line what compressed tars cost."""
    compressed = [tar for tar in tars if isinstance(tar, Unpacked)]
    logger.warning(
        "%s: %d compressed tars of %.1f GB cannot be entered: each is unpacked whole into the node's cache before "
        "its first sample is read, and again once it was evicted. Unpack them to *.tar, or `raypipe convert` them",
        *(address, len(compressed), _num_bytes(compressed) / 1e9),
    )


def _num_bytes(tars: Sequence[Tar]) -> int:
    return sum(tar.written[0] for tar in tars)


def _find(listed: RemoteFile) -> Tar:
    address = listed.address
    is_compressed = _is_compressed(address)
    if is_remote(address):
        remote = listed.checked(look_up(address))
        return Unpacked(remote) if is_compressed else remote
    try:
        file = OpenFile(address)
    except OSError as error:
        raise StoreError(
            f"{address} cannot be read as tar: {error}; check the path"
        ) from error
    if not is_compressed:
        return file
    num_bytes, *version = file.written
    return Unpacked(RemoteFile(address, num_bytes, "-".join(map(str, version))))


def _scan(tar: Tar, image_column: str, target_column: str) -> Scan:
    """Scan a tar; a remote one is fetched whole unless its members are large."""
    columns = image_column, target_column
    file: OpenFile | None = tar if isinstance(tar, OpenFile) else None
    if isinstance(tar, RemoteFile):
        file = shared_cache().find(tar, OpenFile)
        if file is None and tar.num_bytes > _SMALL_REMOTE_BYTES:
            try:
                with open_object(tar.address) as (source, current):
                    tar.check_same(current)
                    jumps = Jumps(source, tar.num_bytes)
                    return scan_tar(jumps, jumps.read_at, tar.address, *columns)
            except UnfitError:
                logger.info("%s has small members", tar.address)
    if file is None:
        assert not isinstance(tar, OpenFile), "it is open"
        file = shared_cache().get(tar, OpenFile)
    with io.FileIO(file.path, opener=open_regular) as content:
        return scan_tar(content, file.pread, tar.address, *columns)
