"""Remote tars of large members: their headers are read one by one, and the members are skipped."""

from __future__ import annotations

from typing import Any

from raypipe.storage.retrying_filesystem import RangeInput
from raypipe.stores.tar_scan import UnfitError

# A read around a header also brings the small members after it, such as a label.
_BLOCK_BYTES = 64 << 10
_NUM_TRIED = 8
# Below this distance of headers on average a tar is fetched whole: a request takes as long as half a MiB or more.
_LEAST_STRIDE = 1 << 20


class Jumps(RangeInput):
    """A remote tar for `tarfile`, read in blocks, which are kept for its small members.

    Args:
        source: an object with `read_at`, open for reading.
        num_bytes: its size.
    """

    def __init__(self, source: Any, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._source = source
        self._blocks: dict[int, bytes] = {}
        self._furthest = 0

    def read_at(self, num_bytes: int, start: int) -> bytes:
        """Return bytes, fewer at the end.

        Raises:
            UnfitError: most of the tar would be read, by many requests.
        """
        end = min(start + num_bytes, self._size)
        first, begin = divmod(start, _BLOCK_BYTES)
        blocks = map(self._block, range(first, -(-end // _BLOCK_BYTES)))
        return b"".join(blocks)[begin : begin + max(0, end - start)]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._furthest = max(self._furthest, number * _BLOCK_BYTES)
            num_read = len(self._blocks)
            if num_read >= _NUM_TRIED and self._furthest < num_read * _LEAST_STRIDE:
                raise UnfitError
            self._blocks[number] = self._source.read_at(
                _BLOCK_BYTES, number * _BLOCK_BYTES
            )
        return self._blocks[number]
