"""Tasks of commands; what an error does to them is tested with ingest, which undoes the most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raypipe.commands import tasks
from raypipe.commands.tasks import Tasks, check_wanted
from raypipe.errors import ConfigError, ResourceError


def test_a_task_gives_up_when_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "wanted").touch()
    check_wanted(tmp_path / "wanted")
    (tmp_path / "wanted").unlink()
    with pytest.raises(InterruptedError):
        check_wanted(tmp_path / "wanted")


def counting() -> Any:
    """A task, made here since the cluster cannot import this module."""

    def count(wanted: Path, numbers: list[int]) -> Iterator[int]:
        for number in numbers:
            check_wanted(wanted)
            if number < 0:
                raise ConfigError("a number is negative")
            yield number

    return count


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestTasks:
    @pytest.mark.parametrize("here", [True, False])
    def test_tasks_run_here_or_anywhere(self, here: bool) -> None:
        assert Tasks("the count", here).num_cpus() == 4
        with Tasks("the count", here) as started:
            found = list(started.stream(counting(), [([1, 2],), ([],), ([3],)], 6, int, progress=False))
            assert sorted(found) == [1, 2, 3]
            assert started.results(lambda wanted, number: number + 1, [(1,), (2,)]) == [2, 3]
        assert not started._wanted.exists()

    def test_an_error_of_a_task_is_the_error(self) -> None:
        with pytest.raises(ConfigError, match="negative"), Tasks("the count", here=True) as started:
            list(started.stream(counting(), [([1, -1, 2],)], 6, int, progress=False))
        assert not started._wanted.exists()

    @pytest.mark.parametrize(("here", "where"), [(True, "this node"), (False, "the cluster")])
    def test_a_busy_cluster_is_an_error_not_a_wait(
        self, here: bool, where: str, all_cpus_held: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tasks, "_SETTLE_S", 0.5)
        with (
            pytest.raises(ResourceError, match=f"the count needs 1 CPU, other jobs hold all 4 of {where}"),
            Tasks("the count", here),
        ):
            pass
