from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pyarrow.fs
import pytest
from damaged_checkpoints import DAMAGE, flip, newest
from s3_server import FaultyProxy, first

from raypipe.errors import ConfigError, CursorError, OutageError
from raypipe.plan.places import Cursor
from raypipe.storage.filesystem import open_filesystem
from raypipe.streaming.saving.checkpoints import (
    find_newest,
    find_start,
    has_checkpoints,
    read_whole_checkpoint,
    write_checkpoint,
)

PLAN = "0123456789abcdef"


def check(cursor: Cursor) -> None:
    if cursor.fingerprint != PLAN:
        raise CursorError(f"made under plan {cursor.fingerprint}")


def content(cursor: Cursor) -> bytes:
    return random.Random(f"{cursor.epoch} {cursor.step}").randbytes(5000)


def write(run_uri: str, epoch: int, step: int, plan: str = PLAN) -> str:
    """As a run does that has gone on from the newest."""
    newest, _ = find_newest(run_uri, check, with_state=True)
    cursor, before = Cursor(epoch, step, plan), newest.name if newest else ""
    return write_checkpoint(run_uri, cursor, content(cursor), {"steps": step}, before)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """With two checkpoints."""
    for step in (3, 6):
        write(tmp_path.as_uri(), 1, step)
    return tmp_path


def step_of(run: Path | str) -> int | None:
    run_uri = run if isinstance(run, str) else run.as_uri()
    found, _ = find_newest(run_uri, check, with_state=True)
    if found is None:
        return None
    assert (
        found.state
        == content(found.cursor)
        == read_whole_checkpoint(open_filesystem(found.address)).state
    )
    return found.cursor.step


def test_a_checkpoint_is_written_and_read_through_outages(
    bucket: str, proxy: FaultyProxy
) -> None:
    run_uri = f"{bucket}/mine"
    write(run_uri, 1, 3)
    proxy.outage = first(9, after=12)  # while it is written
    write(run_uri, 1, 6)
    proxy.outage = first(3, 403, "ExpiredToken", after=4)
    assert step_of(run_uri) == 6 and proxy.faults == {"SlowDown": 9, "ExpiredToken": 3}


def test_an_outage_is_not_taken_for_damage(
    bucket: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_uri = f"{bucket}/mine"
    write(run_uri, 1, 3)
    monkeypatch.setenv("RAYPIPE_STORAGE_PATIENCE_S", "0")
    proxy.outage = first(10**6, after=1)
    with pytest.raises(OutageError, match="was unavailable"):
        find_newest(run_uri, check)


def test_the_newest_is_found_as_it_was_written_and_two_are_kept(run: Path) -> None:
    assert step_of(run) == 6
    write(run.as_uri(), 2, 0)
    assert step_of(run) == 0  # of the next epoch
    assert [path.name[:23] for path in sorted(run.iterdir())] == [
        "checkpoint_0001_0000006",
        "checkpoint_0002_0000000",
    ]
    assert not find_newest(run.as_uri(), check)[1] and has_checkpoints(run.as_uri())


def test_a_run_without_a_folder_starts_from_its_beginning(tmp_path: Path) -> None:
    assert step_of(tmp_path / "none") is None and not has_checkpoints(
        (tmp_path / "none").as_uri()
    )


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_nothing_is_removed(
    run: Path, damage: str
) -> None:
    # what Ray Train may leave
    (run / "checkpoint_manager_snapshot.json").write_text('{"checkpoint_resu')
    broken, (file, harm, reason) = newest(run), DAMAGE[damage]
    harm(broken / file)
    before = tree(run)
    _, passed_over = find_newest(run.as_uri(), check, with_state=True)
    assert [*passed_over] == [broken.name] and reason in passed_over[broken.name]
    assert step_of(run) == 3 and tree(run) == before
    # The run goes on, past the damaged one, which counts as none of the two that are kept.
    write(run.as_uri(), 1, 5)
    assert step_of(run) == 5 and step_of_each(run) == {3, 5, 6}
    write(run.as_uri(), 1, 7)
    assert step_of(run) == 7 and step_of_each(run) == {5, 7}


def step_of_each(run: Path) -> set[int]:
    return {int(path.name.split("_")[2]) for path in run.glob("checkpoint_*/")}


def test_a_cut_checkpoint_is_passed_over_and_later_removed(run: Path) -> None:
    (newest(run) / "checkpoint.json").unlink()
    _, passed_over = find_newest(run.as_uri(), check)
    assert list(passed_over.values()) == ["it was cut off while it was written"]
    assert step_of(run) == 3
    for step, left in ((6, {3, 6}), (7, {6, 7}), (8, {7, 8})):
        write(run.as_uri(), 1, step)
        assert step_of_each(run) == left


def test_if_none_can_be_read_one_error_has_all_the_reasons(run: Path) -> None:
    for path in run.glob("checkpoint_*"):
        (path / "state.pt").unlink()
    with pytest.raises(
        ConfigError,
        match=r"no checkpoint of .* can be read \(.*0006.*missing; .*0003.*missing\)",
    ):
        find_newest(run.as_uri(), check)


def test_without_the_state_only_manifest_cursor_and_size_are_looked_at(
    run: Path,
) -> None:
    path = newest(run) / "state.pt"
    flip(path)
    found, passed_over = find_newest(run.as_uri(), check)
    assert found and found.cursor.step == 6 and not found.state and not passed_over
    with pytest.raises(
        ConfigError,
        match=r"0006.*is damaged \(the content of its state\.pt has changed",
    ):
        read_whole_checkpoint(open_filesystem(found.address))


def test_a_new_run_starts_from_another_run_or_its_checkpoint(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    own, first = (
        (tmp_path_factory.mktemp("new") / "own").as_uri(),
        newest(run, before=1),
    )
    for start_from, step in ((str(run), 6), (run.as_uri(), 6), (str(first), 3)):
        found, _ = find_newest(own, check, with_state=True, start_from=start_from)
        assert (
            found
            and found.cursor.step == step
            and found.state == content(found.cursor)
            and not found.metrics
        )
    write(own, 1, 1)
    found, _ = find_newest(own, check, start_from=str(run))
    assert found and found.cursor.step == 1 and found.metrics
    for path in list(run.iterdir()):  # as Ray Train names them, one after the other
        path.rename(
            run
            / f"checkpoint_2026-11-25_04-29-30.00000{9 - int(path.name.split('_')[2])}"
        )
    assert find_start(str(run), check).cursor.step == 3 and not has_checkpoints(
        run.as_uri()
    )
    with pytest.raises(
        ConfigError, match=r"start_from: no raypipe checkpoint at .*/none"
    ):
        find_newest(f"{own}s", check, start_from=str(tmp_path_factory.mktemp("none")))


def test_a_run_starts_from_a_place_beside_what_a_user_saved(tmp_path: Path) -> None:
    own = tmp_path / "checkpoint_000003"  # as Ray Tune names it
    own.mkdir()
    (own / "state.pt").write_bytes(b"the user's")
    place = Cursor(1, 4, PLAN)
    (own / "cursor.json").write_text(place.to_json())
    for address in (str(own), own.as_uri()):
        found = find_start(address, check)
        assert found.cursor == place and not found.state
        with pytest.raises(ConfigError, match="restore it as you made it"):
            read_whole_checkpoint(found)
    # one of raypipe's own that was cut off
    cut = own.rename(tmp_path / "checkpoint_0001_0000004_0a1b2c3d")
    with pytest.raises(ConfigError, match="no raypipe checkpoint"):
        find_start(str(cut), check)


def test_if_all_were_cut_off_the_run_starts_from_its_beginning(run: Path) -> None:
    for path in run.glob("checkpoint_*"):
        (path / "checkpoint.json").unlink()
    newest, passed_over = find_newest(run.as_uri(), check)
    assert newest is None and len(passed_over) == 2


def test_a_checkpoint_of_another_plan_is_passed_over_or_refused(run: Path) -> None:
    write(run.as_uri(), 1, 9, plan="f" * 16)
    _, passed_over = find_newest(run.as_uri(), check)
    assert (
        list(passed_over.values()) == [f"made under plan {'f' * 16}"]
        and step_of(run) == 6
    )
    for path in (newest(run, before=1), *run.glob("checkpoint_0001_0000003_*")):
        shutil.rmtree(path)
    with pytest.raises(CursorError, match="made under plan"):
        find_newest(run.as_uri(), check)


def test_after_ten_kills_while_writing_the_newest_checkpoint_is_whole(
    tmp_path: Path,
) -> None:
    run, random_moment, step = tmp_path / "run", random.Random(1), 0
    for _ in range(10):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                for next_step in range(step + 1, step + 10_000):
                    write(run.as_uri(), 0, next_step)
                    os.write(writing, b"x")
            os._exit(1)
        os.close(writing)
        done = len(os.read(reading, 1))
        time.sleep(random_moment.uniform(0, 0.01))  # somewhere in the next ones
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        done += len(os.read(reading, 10_000))
        os.close(reading)
        found = step_of(run)
        assert done and found is not None and found - step in (done, done + 1)
        step = found
    # what the last two kills have cut off
    assert len(list(run.glob("checkpoint_*"))) <= 2 + 4


def test_checkpoints_in_a_bucket_are_found_passed_over_and_removed(bucket: str) -> None:
    run = f"{bucket}/runs/mine"
    for step in (1, 2, 3):
        write(run, 0, step)
    assert step_of(run) == 3
    filesystem, path = open_filesystem(run)

    def names() -> list[str]:
        return sorted(
            info.base_name
            for info in filesystem.get_file_info(pyarrow.fs.FileSelector(path))
        )

    two, three = names()
    with filesystem.open_output_stream(f"{path}/{three}/state.pt") as file:
        file.write(b"")
    found, passed_over = find_newest(run, check)
    assert found and found.name == two and [*passed_over] == [three]
    assert names() == sorted([two, three])
    four = write(run, 0, 4)
    assert names() == [two, four]
