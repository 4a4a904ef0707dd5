from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.submit import check_size, sizes, submit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".gitignore").write_text("secret.txt\n")
    (tmp_path / ".rayignore").write_text("big/\n")
    for name in (
        "train.py",
        "secret.txt",
        "big/data.bin",
        "runs/one/state.pt",
        "train.lmdb",
        ".venv/bin/python",
        "package/__init__.py",
        "package/__pycache__/x.pyc",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(100))
    return tmp_path


def test_only_the_program_is_uploaded(folder: Path) -> None:
    found = sizes(folder)
    assert {name for name, size in found.items() if size == 100} == {"train.py", "package/__init__.py"}


def test_a_folder_that_is_too_large_is_refused_before_the_upload_by_its_largest_files(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(3 << 20))
    check_size(folder, 4)
    with pytest.raises(ConfigError, match=r"3 MiB to upload in 5 files.*--max-mib 2.*weights\.bin \(3 MiB\)"):
        check_size(folder, 2)


def test_what_cannot_be_submitted_is_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing to submit: raypipe submit -- python"):
        submit([])
    with pytest.raises(ConfigError, match="nowhere is no folder"):
        submit(["true"], working_dir=str(folder / "nowhere"))
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9.* Set --address http://HOST:8265"):
        submit(["true"], address="http://127.0.0.1:9", working_dir=str(folder))
