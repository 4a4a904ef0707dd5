from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from raypipe.commands.cli import _finish, parse_run
from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.storage.owner import check_owner
from raypipe.train.launch import train
from raypipe.train.run_folder import store_config

STRANGER = 12345


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file another user's."""
    if os.getuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
    else:  # nobody else may: then it is this process that is another user's
        monkeypatch.setattr(os, "getuid", lambda: STRANGER)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose configuration names code, which says that it was imported."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "planted", raising=False)  # of the test before
    run = RunConfig(trust=True)
    run = dataclasses.replace(run, augment=dataclasses.replace(run.augment, module="planted:module"))
    store_config(run, (tmp_path / "run").as_uri())
    config = tmp_path / "run" / "config.yaml"
    assert "trust" not in config.read_text()
    config.write_text(config.read_text() + "trust: true\n")
    return tmp_path / "run"


@pytest.mark.parametrize("whose", [".", "config.yaml", "checkpoint_1/state.pt", "tune/link"])
def test_a_resume_from_what_another_user_owns_runs_nothing_without_an_explicit_word(
    whose: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("checkpoint_1/state.pt", "tune/tuner.pkl"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"")
    (folder / "tune/link").symlink_to("tuner.pkl")
    parse_run([f"--resume={folder}"], None)
    give_away(folder / whose, monkeypatch)
    with pytest.raises(SystemExit):
        _finish(lambda: train(parse_run([f"--resume={folder}"], None)))
    shown = capfd.readouterr().err
    assert f"{folder}" in shown and "belongs to user" in shown and "add --trust=true" in shown
    with pytest.raises(ConfigError, match="belongs to user"):
        train(RunConfig(resume=str(folder)))
    assert not (folder.parent / "ran").exists()
    # The word is the user's, and then it goes on: to what the configuration names.
    with pytest.raises(SystemExit):
        _finish(lambda: train(parse_run([f"--resume={folder}", "--trust=true"], None)))
    assert (folder.parent / "ran").exists() and "planted:module" in capfd.readouterr().err


def test_the_stored_configuration_is_not_even_parsed_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.yaml").write_text("no: [yaml")
    give_away(folder / "config.yaml", monkeypatch)
    with pytest.raises(ConfigError, match=r"config\.yaml belongs to user|run belongs to user"):
        parse_run([f"--resume={folder}"], None)


def test_ones_own_folder_roots_and_a_bucket_need_no_word(tmp_path: Path, bucket: str) -> None:
    for run in (str(tmp_path), tmp_path.as_uri(), "/etc/ssl", f"{bucket}/runs/mine", str(tmp_path / "nowhere")):
        check_owner(run, trusted=False)
