"""The first processes of a cluster import a run's modules, and no others do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypipe.rayext.early_imports import environment, import_early


def test_as_many_processes_as_were_asked_for_import_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needed_by_trainers.py").write_text("")
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    modules = ("broken_module", "needed_by_trainers", "no_such_module")
    (asked,) = environment(2, modules).values()
    for _ in range(2):
        assert import_early(asked, tmp_path) == ["needed_by_trainers"]
    assert import_early(asked, tmp_path) == []
    assert sys.modules.pop("needed_by_trainers")
