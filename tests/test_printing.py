from __future__ import annotations

import logging
import math
import os
import sys
from pathlib import Path

import pytest
from pictures import picture
from tars import write_members

from raypipe.commands.cli import main
from raypipe.commands.parser import printing
from raypipe.printing import number, printable
from raypipe.progress import print_progress


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("naïve 日本\U0001f600 [b]", "naïve 日本\U0001f600 [b]"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[2J\x07\r\x9b1m", r"\x1b[2J\x07\r\x9b1m"),
        (os.fsdecode(b"caf\xe9"), r"caf\udce9"),
        ("a\u202egpj.exe", r"a\u202egpj.exe"),
    ],
)
def test_what_is_no_character_is_printed_as_an_escape(text: str, expected: str) -> None:
    assert printable(text) == expected


def tar(path: Path, *names: bytes) -> str:
    contents = [
        b"0" if name.endswith(b".cls") else picture(len(name)) for name in names
    ]
    members = zip(map(os.fsdecode, names), contents, strict=True)
    return str(write_members(path, members))


@pytest.mark.parametrize("has_handler", [False, True])
def test_no_log_line_or_output_commands_the_terminal(
    has_handler: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with no handler but Python's last one, which still gets warnings and no more."""
    handlers = [logging.StreamHandler(sys.stderr)] * has_handler
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    evil = "\x1b]0;owned\x07\x9b31m\u202e\udcff"
    ours = logging.getLogger("raypipe.stores.any")
    ours.warning("left out: %s", evil)
    ours.debug("%s", evil)
    try:
        raise ValueError(evil)
    except ValueError:
        ours.exception("it failed")
    print_progress(ours, evil)
    with printing():
        print(evil)
    out, err = capfd.readouterr()
    assert err.count("left out: ") == err.count("it failed") == 1
    assert f"ValueError: {printable(evil)}" in err
    assert out.splitlines() == [printable(evil)] * 2
    assert printable(out + err) == out + err


def test_a_name_that_is_no_utf_8_breaks_no_table_and_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.commands.cli._is_terminal", lambda: True)
    names = [b"\xe9t\xe9\x1b[31m/1.jpg", b"b/2.jpg"]
    members = [
        name.replace(b"jpg", suffix) for name in names for suffix in (b"jpg", b"cls")
    ]
    for store in (
        tar(tmp_path / "a.tar", *members),
        str(tmp_path / os.fsdecode(b"folder\xff")),
    ):
        if not Path(store).exists():
            for name in names:
                file = Path(store, os.fsdecode(name))
                file.parent.mkdir(parents=True)
                file.write_bytes(picture(1))
        main(["inspect", store])
        assert "\x1b" not in capsys.readouterr().out
    main(
        [
            "preview",
            store,
            "-o",
            str(tmp_path / "grid.png"),
            "--transform.train",
            "none",
            "--samples",
            "2",
        ]
    )
    assert (tmp_path / "grid.png").stat().st_size > 1000


def test_figures_are_short() -> None:
    assert [number(v) for v in (0, 3.0, 1234.5, 0.123456, 1e-5, math.nan)] == [
        *("0", "3", "1,234", "0.1235", "1e-05", "none")
    ]
