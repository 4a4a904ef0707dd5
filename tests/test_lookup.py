from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.lookup import import_name


def test_a_module_is_found_in_the_current_folder_after_all_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "lies_here.py").write_text("class Outer:\n    inner = 7\n")
    (tmp_path / "json.py").write_text("loads = None\n")
    assert import_name("lies_here:Outer.inner", "transform.train") == 7
    assert import_name("json:loads", "transform.train")("3") == 3
    del sys.modules["lies_here"]


@pytest.mark.parametrize("address", ["no_such_module:name", "json:no_such_name", "json", ":loads"])
def test_what_is_not_there_is_one_error_with_its_setting(address: str) -> None:
    with pytest.raises(ConfigError, match=f"store.layout '{address}' cannot be imported"):
        import_name(address, "store.layout")
