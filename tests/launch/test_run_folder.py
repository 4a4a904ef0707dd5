from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from small_runs import parse_run

from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run_folder import (
    check_run_folder,
    folder_to_resume,
    located,
    store_config,
)
from raypipe.plan.places import Cursor
from raypipe.streaming.saving.checkpoints import write_checkpoint

# The run's folder


def test_a_new_run_wants_no_run_and_a_resume_wants_one(tmp_path: Path) -> None:
    uri = (tmp_path / "mine").as_uri()
    check_run_folder(uri, resume=False)
    with pytest.raises(ConfigError, match=r"no run at .*/mine: pass the folder"):
        check_run_folder(uri, resume=True)
    store_config(RunConfig(), uri)
    check_run_folder(uri, resume=True)
    with pytest.raises(
        ConfigError,
        match=r"/mine already has a run: .*--resume, or choose another --name",
    ):
        check_run_folder(uri, resume=False)


def test_checkpoints_make_a_run_even_where_its_configuration_was_lost(
    tmp_path: Path,
) -> None:
    write_checkpoint(tmp_path.as_uri(), Cursor(0, 1, "f" * 16), b"x", {})
    check_run_folder(tmp_path.as_uri(), resume=True)
    with pytest.raises(ConfigError, match=r"already has a run"):
        check_run_folder(tmp_path.as_uri(), resume=False)


def test_auto_starts_under_a_name_and_goes_on_with_what_has_begun_there(
    tmp_path: Path,
) -> None:
    run = RunConfig(storage_path=str(tmp_path), name="mine", resume="auto")
    for _ in range(2):
        # one that was killed before it stored its configuration has left nothing
        with located(run) as (given, run_uri, _):
            assert (given.resume, given.name, run_uri) == (
                "",
                "mine",
                (tmp_path / "mine").as_uri(),
            )
    store_config(given, run_uri)
    with located(run) as (given, run_uri, _):
        assert (given.resume, given.name, given.storage_path) == (
            str(tmp_path / "mine"),
            "mine",
            str(tmp_path),
        )
    with pytest.raises(
        ConfigError, match=r"resume=auto finds the run by its name: set --name"
    ):
        folder_to_resume("auto", str(tmp_path), "")
    assert folder_to_resume("runs/auto", "", "") == "runs/auto"


def test_auto_takes_the_runs_settings_and_those_given_again(tmp_path: Path) -> None:
    command = [
        f"--storage_path={tmp_path}",
        "--name=mine",
        "--resume=auto",
        "--plan.seed=7",
    ]
    first = parse_run(command, None)
    assert (
        first.resume == "auto" and first.plan.seed == 7 and first.train.model == "small"
    )
    store_config(
        dataclasses.replace(first, log_format="json"), (tmp_path / "mine").as_uri()
    )
    again = parse_run([*command, "--train.log_interval=3"], None)
    assert again.resume == str(tmp_path / "mine") and (
        again.log_format,
        again.train.log_interval,
    ) == ("json", 3)


def test_starts_of_one_second_get_their_own_names(tmp_path: Path) -> None:
    run = RunConfig(storage_path=str(tmp_path / "runs"))
    with located(run) as (first, first_uri, _), located(run) as (second, second_uri, _):
        assert first_uri != second_uri and first.name != second.name
        assert all(
            (tmp_path / "runs" / each.name / "lease").is_dir()
            for each in (first, second)
        )
        with (
            pytest.raises(
                ConfigError,
                match=rf"{second.name} is in use by process {os.getpid()} on",
            ),
            located(dataclasses.replace(run, name=second.name)),
        ):
            pass
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("command", ["train", "search"])
def test_a_run_in_rays_copy_of_a_jobs_folder_is_refused_at_once(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = (
        tmp_path / "session" / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    )
    copy.mkdir(parents=True)
    monkeypatch.chdir(copy)
    with (
        pytest.raises(
            ConfigError,
            match=r"storage_path leads to .*temporary copy .* set storage_path to .*s3://bucket/runs",
        ),
        located(RunConfig(), "tune-" if command == "search" else ""),
    ):
        pass
    assert not list(copy.iterdir())


@pytest.mark.parametrize("name", ["..", ".", "a/../.."])
def test_a_name_that_leads_out_of_the_storage_path_is_refused(
    tmp_path: Path, name: str
) -> None:
    run = RunConfig(storage_path=str(tmp_path / "runs"), name=name)
    with (
        pytest.raises(ConfigError, match=r"--name .* leads out of .*runs"),
        located(run),
    ):
        pass
    assert not list(tmp_path.iterdir())
