from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pytest
from patience import PATIENCE_S, until
from small_runs import parse_run

from raypipe.commands.cli import _finish
from raypipe.config import RunConfig
from raypipe.errors import ConfigError
from raypipe.launch.run import launch
from raypipe.launch.run_folder import store_config
from raypipe.storage.filesystem import join_address, open_filesystem
from raypipe.storage.lease import RunExistsError, check_owner, is_held, lease


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of the module, in tenths of seconds instead of seconds."""
    for name, seconds in (
        ("_RENEW_S", 0.5),
        ("_LOOK_S", 0.1),
        ("_RACE_S", 0.5),
        ("_EXPIRES_S", 2.5),
    ):
        monkeypatch.setattr(f"raypipe.storage.lease.{name}", seconds)


@contextlib.contextmanager
def child_with_lease(run_uri: str) -> Iterator[int]:
    """The id of another process that has a run's folder until it is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), lease(run_uri):
            os.write(writing, b"x")
            signal.pause()
        os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"x"
        yield child
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_second_start_is_refused_at_once_and_told_who_has_the_folder(
    tmp_path: Path,
) -> None:
    run_uri = (tmp_path / "runs" / "mine").as_uri()
    with child_with_lease(run_uri) as child:
        message = rf"runs/mine is in use by process {child} on .*, since 20.* UTC: .*`raypipe stop`.*--name"
        with pytest.raises(RunExistsError, match=message), lease(run_uri):
            pass
        assert len(list(Path(tmp_path, "runs/mine/lease").iterdir())) == 1


def test_a_process_that_was_killed_loses_the_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uri = tmp_path.as_uri()
    with child_with_lease(run_uri) as child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        # another machine's would be waited for longer than a test may take
        monkeypatch.setattr("raypipe.storage.lease._EXPIRES_S", 10_000.0)
        with lease(run_uri) as mine:
            assert [path.stem for path in (tmp_path / "lease").iterdir()] == [mine]


def test_a_folder_that_was_given_back_is_as_before(tmp_path: Path) -> None:
    with lease((tmp_path / "new").as_uri()) as mine:
        assert is_held((tmp_path / "new").as_uri(), mine)
    assert not (tmp_path / "new").exists() and not is_held(
        (tmp_path / "new").as_uri(), mine
    )
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    with pytest.raises(KeyError), lease((tmp_path / "old").as_uri()):
        raise KeyError
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["config.yaml"]


@pytest.mark.system
@pytest.mark.usefixtures("impatient")
def test_of_many_that_start_at_one_time_exactly_one_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.storage.lease._RACE_S", 10.0)  # on a busy machine, too
    go, had, children = tmp_path / "go", tmp_path / "had", []
    had.mkdir()
    for number in range(6):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                while not go.exists():
                    time.sleep(0.001)
                with lease((tmp_path / "run").as_uri()):
                    (had / str(number)).touch()
                    while len(list(had.glob("*.refused"))) < 5:
                        time.sleep(0.01)
                os._exit(0)
            (had / f"{number}.refused").touch()
            os._exit(0)
        children.append(child)
    go.touch()
    for child in children:
        os.waitpid(child, 0)
    names = [path.name for path in had.iterdir()]
    assert (
        len([name for name in names if name.endswith(".refused")]) == 5
        and len(names) == 6
    )


def write_claim(run_uri: str) -> None:
    """Write a claim of another machine, which no process here can look behind."""
    owner = {
        "who": "process 1 of u on far",
        "since": 1767225600.0,
        "pid": 1,
        "started": 1,
        "machine": "elsewhere",
    }
    filesystem, folder = open_filesystem(join_address(run_uri, "lease"))
    filesystem.create_dir(folder, recursive=True)
    with filesystem.open_output_stream(f"{folder}/ab.json") as file:
        file.write(json.dumps(owner).encode())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_another_machines_silent_run_loses_the_folder(
    where: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_uri = (
        tmp_path.as_uri()
        if where == "disk"
        else request.getfixturevalue("bucket") + "/runs/mine"
    )
    write_claim(run_uri)
    with caplog.at_level("WARNING"), lease(run_uri) as mine:
        assert caplog.messages == [
            "the run's folder is held by process 1 of u on far; waiting up to a minute to see if it is alive"
        ]
        assert is_held(run_uri, mine) and not is_held(run_uri, "ab")


@pytest.mark.usefixtures("impatient")
def test_another_machines_run_that_is_heard_of_keeps_the_folder(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raypipe.storage.lease._EXPIRES_S", 10_000.0)
    run_uri = f"{bucket}/runs/mine"
    write_claim(run_uri)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(0.5):
            write_claim(run_uri)

    other = threading.Thread(target=renew)
    other.start()
    try:
        with (
            pytest.raises(RunExistsError, match="in use by process 1 of u on far"),
            lease(run_uri),
        ):
            pass
        assert is_held(run_uri, "ab")
    finally:
        ended.set()
        other.join()


@pytest.mark.usefixtures("impatient")
def test_a_lease_is_renewed_on_a_full_disk_and_stays_lost_once_lost(
    full_disk: Path,
) -> None:
    from full_disk import fill

    with lease(full_disk.as_uri()) as mine:
        file = full_disk / "lease" / f"{mine}.json"
        fill(full_disk)
        before = file.stat().st_mtime
        until(lambda: file.stat().st_mtime > before)
        file.unlink()  # another process took it for dead
        (renewing,) = (
            thread for thread in threading.enumerate() if thread.name == "raypipe-lease"
        )
        renewing.join()
        assert not is_held(full_disk.as_uri(), mine)


def test_a_lease_given_back_while_it_is_renewed_stays_given_back(
    bucket: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = threading.Event()

    def slow_look(run_uri: str, token: str) -> bool:
        found = is_held(run_uri, token)
        looked.set()
        time.sleep(0.3)  # in which it is given back, or would be
        return found

    monkeypatch.setattr("raypipe.storage.lease.is_held", slow_look)
    with lease(f"{bucket}/run"):
        assert looked.wait(PATIENCE_S)
    time.sleep(0.6)
    with lease(f"{bucket}/run") as mine:
        filesystem, folder = open_filesystem(f"{bucket}/run/lease")
        found = filesystem.get_file_info(pyarrow.fs.FileSelector(folder))
        assert [info.base_name for info in found] == [f"{mine}.json"]


def test_damaged_claims_count_as_those_of_processes_elsewhere(
    tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lease").mkdir()
    contents = [b"", b"[]", b"{}", b'{"since": "x", "who": 1}', b"\xff", b"1" * 70_000]
    claims = [tmp_path / "lease" / f"a{number}.json" for number in range(len(contents))]
    for claim, content in zip(claims, contents, strict=True):
        claim.write_bytes(content)
    with caplog.at_level("WARNING"), lease(tmp_path.as_uri()):
        assert not any(claim.exists() for claim in claims)
    assert len([text for text in caplog.messages if "/lease/a" in text]) == len(claims)


# Whose it is

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
    run = RunConfig(trust_run_code=True)
    run = dataclasses.replace(
        run, augment=dataclasses.replace(run.augment, module="planted:module")
    )
    store_config(run, (tmp_path / "run").as_uri())
    config = tmp_path / "run" / "config.yaml"
    assert "trust_run_code" not in config.read_text()
    config.write_text(config.read_text() + "trust_run_code: true\n")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "whose", [".", "config.yaml", "checkpoint_1/state.pt", "tune/link"]
)
def test_a_resume_from_another_users_run_needs_trust(
    whose: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name in ("checkpoint_1/state.pt", "tune/tuner.pkl"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"")
    (folder / "tune/link").symlink_to("tuner.pkl")
    resumes = [f"--resume={folder}", "--augment.module=planted:module"]
    parse_run(resumes, None)
    give_away(folder / whose, monkeypatch)
    with pytest.raises(SystemExit):
        _finish(lambda: launch(parse_run(resumes, None)))
    shown = capfd.readouterr().err
    assert (
        f"{folder}" in shown
        and "belongs to user" in shown
        and "add --trust-run-code" in shown
    )
    with pytest.raises(ConfigError, match="belongs to user"):
        launch(RunConfig(resume=str(folder)))
    assert not (folder.parent / "ran").exists()
    # The word is the user's, and then it goes on: to what the configuration names.
    with pytest.raises(SystemExit):
        _finish(
            lambda: launch(parse_run([f"--resume={folder}", "--trust-run-code"], None))
        )
    assert (
        folder.parent / "ran"
    ).exists() and "planted:module" in capfd.readouterr().err


def test_the_stored_configuration_is_not_even_parsed_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.yaml").write_text("no: [yaml")
    give_away(folder / "config.yaml", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"config\.yaml belongs to user|run belongs to user"
    ):
        parse_run([f"--resume={folder}"], None)


def test_ones_own_folder_roots_and_a_bucket_need_no_word(
    tmp_path: Path, bucket: str
) -> None:
    for run in (
        str(tmp_path),
        tmp_path.as_uri(),
        "/etc/ssl",
        f"{bucket}/runs/mine",
        str(tmp_path / "nowhere"),
    ):
        check_owner(run, trusted=False)
