"""Fixtures of stores in the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # relative paths lead to it
    monkeypatch.chdir(tmp_path)
