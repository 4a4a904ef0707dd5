from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.importing import import_name, raised_at


def test_the_current_folder_is_searched_last_for_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "lies_here.py").write_text("class Outer:\n    inner = 7\n")
    (tmp_path / "json.py").write_text("loads = None\n")
    assert import_name("lies_here:Outer.inner", "transform.train", trusted=True) == 7
    assert import_name("json:loads", "transform.train", trusted=True)("3") == 3
    del sys.modules["lies_here"]


@pytest.mark.parametrize("address", ["json", ":loads", "json:", ""])
def test_an_address_without_both_parts_says_what_it_must_be(address: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"augment\.module must be module:name, such as my_package\.training:",
    ):
        import_name(address, "augment.module", trusted=True)


@pytest.mark.parametrize("address", ["no_such_module:name", "json:no_such_name"])
def test_what_is_not_there_is_one_error_with_its_setting(address: str) -> None:
    with pytest.raises(
        ConfigError, match=f"store.layout '{address}' cannot be imported"
    ):
        import_name(address, "store.layout", trusted=True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "first = 1\nsecond = frist",
            r"NameError: name 'frist' is not defined \(at fails_here\.py:2 in <module>\)",
        ),
        ("def f(x:", r"SyntaxError: .* \(fails_here\.py, line 1\)$"),
        (
            "import no_such_module",
            r"No module named 'no_such_module' \(at fails_here\.py:1 in <module>\)",
        ),
    ],
)
def test_a_module_that_fails_is_one_error_with_the_line(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "fails_here.py").write_text(code)
    with pytest.raises(
        ConfigError, match=rf"train.loss 'fails_here:f' cannot be imported: .*{reason}"
    ):
        import_name("fails_here:f", "train.loss", trusted=True)


def test_an_error_without_frames_of_others_has_a_place_all_the_same() -> None:
    assert raised_at(ValueError("never raised")) == "an unknown place"
    try:
        int("x")
    except ValueError as error:
        assert raised_at(error).startswith(__file__.removeprefix(f"{Path.cwd()}/"))
