"""That the file system of the tests is a real one, and fills."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from full_disk import fill, make_room


def test_a_full_disk_takes_no_more_and_takes_again_when_there_is_room(
    full_disk: Path,
) -> None:
    (full_disk / "before").write_bytes(b"x" * 5000)
    fill(full_disk)
    with pytest.raises(OSError) as failure:
        (full_disk / "new").write_bytes(b"x" * 4096)
    assert failure.value.errno == errno.ENOSPC
    make_room(full_disk)
    fill(full_disk, leave_bytes=8192)
    (full_disk / "new").write_bytes(b"x" * 8192)
    assert (full_disk / "before").read_bytes() == b"x" * 5000
