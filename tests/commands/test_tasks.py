"""Tasks of commands; what an error does to them is tested with convert, which undoes the most."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands import tasks
from raypipe.commands.tasks import _while_wanted, count_cpus, run_tasks
from raypipe.errors import ConfigError, ResourceError


def test_a_task_ends_at_its_next_part_when_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    task = _while_wanted(tmp_path / "wanted", counting(), [1, 2, -1])
    assert [next(task), next(task)] == [None, (1,)]
    (tmp_path / "wanted").unlink()
    assert list(task) == []
    assert list(_while_wanted(tmp_path / "wanted", counting(), [-1])) == [None]


def counting() -> Any:
    """A task, made here since the cluster cannot import this module."""

    def count(numbers: list[int]) -> Iterator[tuple[int]]:
        for number in numbers:
            if number < 0:
                raise ConfigError("a number is negative")
            yield (number,)

    return count


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestTasks:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @pytest.mark.parametrize("here", [True, False])
    def test_tasks_run_here_or_anywhere(self, here: bool, tmp_path: Path) -> None:
        assert count_cpus("the count", here) == 4
        calls = [([1, 2],), ([],), ([3],)]
        assert sorted(run_tasks("the count", here, counting(), calls, 6)) == [
            (1,),
            (2,),
            (3,),
        ]
        assert not list(tmp_path.glob("raypipe-tasks-*"))

    def test_an_error_of_a_task_is_the_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="negative"):
            list(run_tasks("the count", True, counting(), [([1, -1, 2],)], 6))
        assert not list(tmp_path.glob("raypipe-tasks-*"))

    def test_a_busy_cluster_is_an_error_not_a_wait(
        self, all_cpus_held: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tasks, "_BEGIN_S", 0.0)
        monkeypatch.setattr(tasks, "_LOOK_S", 0.5)
        for here, where in ((True, "this node"), (False, "the cluster")):
            with pytest.raises(
                ResourceError,
                match=f"1 CPU for the count, since other jobs hold all 4 of {where}",
            ):
                list(run_tasks("the count", here, counting(), [([1],)], 1))
