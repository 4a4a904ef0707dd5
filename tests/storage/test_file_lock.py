from __future__ import annotations

import os
from pathlib import Path

import pytest

from raypipe.errors import StoreError
from raypipe.storage.file_lock import locked, open_lock, try_lock


def test_a_lock_is_one_process_s_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"):
        other = open_lock(tmp_path / "lock")
        assert not try_lock(other, exclusive=True) and not try_lock(other, exclusive=False)
    assert try_lock(other, exclusive=True)
    os.close(other)


@pytest.mark.parametrize("there", [True, False])
def test_a_planted_link_is_not_followed(there: bool, tmp_path: Path) -> None:
    if there:
        (tmp_path / "precious").write_bytes(b"content")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(StoreError, match="cannot be written to: lock: it is a link, not a regular file"):
        open_lock(tmp_path / "lock")
    assert (tmp_path / "precious").exists() == there


@pytest.mark.timeout(20)
def test_a_pipe_in_its_place_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(StoreError, match="it is a FIFO, not a regular file"), locked(tmp_path / "lock"):
        pass
