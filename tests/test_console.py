from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from raypipe.commands.cli import main
from raypipe.console import printable

from conftest import picture  # isort: skip


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
    with tarfile.open(path, "w") as made:
        for name in names:
            member = tarfile.TarInfo(os.fsdecode(name))
            content = b"0" if name.endswith(b".cls") else picture(len(name))
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    return str(path)


def test_names_from_an_archive_neither_command_the_terminal_nor_break_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = b"\x1b]0;owned\x07\xff"
    columns = tar(tmp_path / "a.tar", b"0.jpg", b"0.cls", b"0." + evil)
    with pytest.raises(SystemExit):
        main(
            ["inspect", tar(tmp_path / "b.tar", evil + b".jpg", evil + b".cls", b"1.jpg"), "--image-column", "jpg"]
        )
    main(["inspect", columns])
    found = capsys.readouterr()
    assert r"\x1b]0;owned\x07\udcff" in found.out and "\x1b" not in found.out + found.err
    (tmp_path / os.fsdecode(b"c\x1b[2J\xff")).mkdir()
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / os.fsdecode(b"c\x1b[2J\xff"))])
    assert r"c\x1b[2J\udcff holds no store" in capsys.readouterr().err


def test_a_name_that_is_no_utf_8_breaks_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [b"\xe9t\xe9\x1b[31m/1.jpg", b"b/2.jpg"]
    for store in (tar(tmp_path / "a.tar", *names), str(tmp_path / os.fsdecode(b"folder\xff"))):
        if not Path(store).exists():
            for name in names:
                file = Path(store, os.fsdecode(name))
                file.parent.mkdir(parents=True)
                file.write_bytes(picture(1))
        main(["inspect", store, "--html", str(tmp_path / "page.html")])
        page = (tmp_path / "page.html").read_text()
        assert r"\udce9t\udce9\x1b[31m" in page and "\x1b" not in page
        assert "\x1b" not in capsys.readouterr().out
    main(["preview", store, "-o", str(tmp_path / "grid.png"), "--transform", "none", "--samples", "2"])
    assert (tmp_path / "grid.png").stat().st_size > 1000
