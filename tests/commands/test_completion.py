"""`raypipe completion`, in a real shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.commands import cli
from raypipe.commands.completion import completion_script
from raypipe.errors import ConfigError


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "made" / "raypipe"
    cli.completion("bash", output=str(file))
    return file


# As bash does when the tab key is pressed: the words so far, of which the last one is to be completed.
TAB = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_raypipe; echo "${COMPREPLY[*]}"'


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pre"], "preview"),
        (["digest", "--lea"], "--leave_out"),
        (["ingest", "a.tar", "b.lmdb", "--on_bad_sample", "s"], "skip"),
        (["ingest", "trai"], "train.lmdb"),
        (["report", "a", "--against", "trai"], "train.lmdb"),
    ],
)
def test_bash_completes_commands_options_choices_and_files(
    words: list[str], expected: str, script: Path, tmp_path: Path
) -> None:
    (tmp_path / "train.lmdb").touch()
    done = subprocess.run(
        ["bash", "-c", TAB, str(script), "raypipe", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [expected]


def test_the_command_writes_where_the_shell_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    places = {"bash": ".local/share/bash-completion/completions/raypipe", "zsh": ".zfunc/_raypipe"}
    for shell, place in places.items():
        cli.main(["completion", shell])
        assert json.loads(capsys.readouterr().out) == {"output": str(tmp_path / place)}
        assert "raypipe" in (tmp_path / place).read_text()
    assert (tmp_path / places["zsh"]).read_text().startswith("#compdef raypipe")


def test_without_shtab_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(ConfigError, match=r"pip install 'raypipe\[completion\]'"):
        completion_script(None, "bash")
