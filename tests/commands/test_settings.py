"""The settings of a run that is resumed, and whose code is imported: a downloaded data set runs nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from pictures import CLASSES, picture
from small_runs import parse_run

from raypipe.commands.cli import main
from raypipe.commands.settings import parse_command
from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_folder import CONFIG_HEAD

ROOT = Path(__file__).parents[2]
PLANTED = ("planted", "cv2", "lmdb", "albumentations", "pickle", "struct")
"""Modules in the folder: one that its settings name, and some that raypipe and Python themselves import."""


def look(run: RunConfig, target: str = "") -> dict[str, Any]:
    """A command on a store."""
    return {"run": run}


def parse(*args: str) -> RunConfig:
    return parse_command("look", look, list(args))["run"]


def write_run(folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(CONFIG_HEAD + yaml.safe_dump(settings))
    return folder


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what a command may leave."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # remembered
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A data set with a configuration, and modules that leave their names in the file `ran` beside it."""
    folder = tmp_path / "downloaded"
    for i in range(16):
        place = folder / CLASSES[i % 2] / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture(i))
    for name in PLANTED:
        code = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\nmake = None\n"
        (folder / f"{name}.py").write_text(code)
    return folder


# What a run is


def test_a_data_set_with_a_config_yaml_of_another_program_is_a_store(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (downloaded / "config.yaml").write_text(
        "model: {name: vit}\ntransform: planted:make\n"
    )
    assert parse(str(downloaded)).store.train == str(downloaded)
    monkeypatch.chdir(downloaded)
    main(["inspect", "."])


def test_a_resume_of_what_is_no_run_says_which_line_a_run_has(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("plan: {epochs: 3}\n")
    with pytest.raises(
        ConfigError,
        match=r"config\.yaml is not a run's: its first line must be '# A run of",
    ):
        parse_run([f"--resume={tmp_path}"], None)


def test_a_store_with_a_config_of_a_run_beside_its_images_is_a_store(
    downloaded: Path,
) -> None:
    write_run(downloaded, transform={"train": "planted:make"}, plan={"epochs": 7})
    run = parse(str(downloaded))
    assert (run.store.train, run.plan.epochs) == (
        str(downloaded),
        RunConfig().plan.epochs,
    )


# Whose code it names


PROGRAM = (
    "from raypipe.commands.cli import main\nif __name__ == '__main__':\n    main()\n"
)


def test_a_resume_runs_code_by_the_word_or_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(
        tmp_path / "run", transform={"train": "mine:make"}, train={"model": "mine:net"}
    )
    with pytest.raises(
        ConfigError,
        match=r"names the code 'mine:net' \(train\.model\), which would run .*: read that code, then add "
        r"--trust-run-code .*, or name it yourself",
    ):
        parse_run([f"--resume={folder}"], None)
    named = ["--transform.train=mine:make", "--train.model=mine:net"]
    for given in (["--trust-run-code"], named):
        run = parse_run([f"--resume={folder}", *given], None)
        assert (run.transform.train, run.train.model) == ("mine:make", "mine:net")
    assert "names 'mine:net' (train.model): a module mine" in caplog.text


# Where it is


SMALL = ["--plan.micro_batch_size=4"]
COMMANDS = [
    ["train", "--resume", "."],
    ["train", "--resume", ".", "--trust-run-code"],
    [
        "digest",
        "--store.train=.",
        "--pool.engine=inline",
        "--transform.train=planted:make",
        *SMALL,
    ],
    pytest.param(["convert", ".", "../a.lmdb"], marks=pytest.mark.cluster),
]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_no_command_runs_code_of_the_folder_it_is_called_in(
    args: list[str],
    downloaded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = {"augment": {"module": "planted:make"}, "plan": {"micro_batch_size": 4}}
    transform = {"train": "planted:make", "val": "planted:make"}
    write_run(
        downloaded,
        store={"train": "."},
        transform=transform,
        train={"model": "planted:make"},
        **settings,
    )
    monkeypatch.chdir(downloaded)
    converts = args[0] == "convert"  # which copies the images that are there
    with contextlib.nullcontext() if converts else pytest.raises(SystemExit):
        main(args)
    shown = capfd.readouterr().err
    assert not (downloaded.parent / "ran").exists() and "planted" not in sys.modules
    assert "Traceback" not in shown
    assert converts or "planted:make" in shown, shown
    if args[0] == "digest":
        why = (
            "the current folder is not searched, since it contains the store or the run"
        )
        assert why in shown


@pytest.mark.parametrize("target", [".", "..", "../../downloaded"])
def test_a_folder_within_the_target_is_closed_as_well(
    target: str, downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (downloaded / "scripts").mkdir()
    monkeypatch.chdir(downloaded if target == "." else downloaded / "scripts")
    parse(target)
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_a_store_in_the_current_folder_leaves_that_folder_open(
    downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(downloaded.parent)
    parse("downloaded", "--store.val=other.lmdb")
    assert "PYTHONSAFEPATH" not in os.environ and str(downloaded.parent) not in sys.path
    parse("downloaded", "--transform.train=mine:make")
    assert str(downloaded.parent) in sys.path  # for Ray's workers, wherever they are


@pytest.mark.cluster
def test_no_process_of_a_command_imports_what_lies_in_a_downloaded_folder(
    downloaded: Path, tmp_path: Path
) -> None:
    """Neither Ray's workers nor processes of its own: Ray puts the current folder in front, Python does by -c."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "raypipe").write_text(PROGRAM)
    sizes = [
        "--transform.train=center",
        "--transform.size=16",
        "--plan.micro_batch_size=4",
        "--pool.max_actors=1",
    ]
    done = subprocess.run(
        [
            sys.executable,
            str(tmp_path / "bin" / "raypipe"),
            "bench",
            ".",
            "--seconds=0.05",
            *sizes,
        ],
        cwd=downloaded,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stderr


def test_the_folder_of_a_run_stands_for_its_settings(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", plan={"epochs": 7}, store={"train": "train.lmdb"}, name="run"
    )
    found = parse(str(run), "--plan.seed", "3")
    assert found.store.train == "train.lmdb" and found.resume == ""
    assert (found.plan.epochs, found.plan.seed) == (7, 3)
