"""What `connect` tells Ray, which starts in one of these; other tests connect to clusters, too."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import ray

from raypipe.cpus import _quota, num_cpus
from raypipe.errors import ResourceError
from raypipe.rayext import cluster


def offered(monkeypatch: pytest.MonkeyPatch, **options: Any) -> int:
    """The CPUs that Ray would be started with."""
    told: dict[str, Any] = {}

    def init(**arguments: Any) -> None:
        told.update(arguments)
        raise RuntimeError("it is not to start")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ResourceError, match="it is not to start"):
        cluster.connect(**options)
    return int(told["num_cpus"])


@pytest.mark.parametrize("allowed", [{0}, {0, 1, 5}])
def test_ray_offers_the_cpus_that_this_process_may_use(
    allowed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: 64)
    monkeypatch.setattr("raypipe.cpus._quota", lambda *_: 1 << 20)
    assert offered(monkeypatch) == num_cpus() == len(allowed)
    assert offered(monkeypatch, num_cpus=7) == 7
    # of a container's quota, the second of less than a CPU
    for quota in (1, 0.5):
        monkeypatch.setattr(
            "ray._private.utils.get_num_cpus", lambda quota=quota: quota
        )
        assert offered(monkeypatch) == 1


class Listener:
    """A port that accepts connections, and the address file of a cluster there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.file = folder / "ray" / "ray_current_cluster"
        self.file.parent.mkdir()
        self.file.write_text(self.address)
        monkeypatch.setenv("RAY_TMPDIR", str(folder))
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)


def joined(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the cluster that `connect` joins; "local" = it starts one."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **arguments: told.update(arguments))
    monkeypatch.setattr(cluster, "wait_for_head", lambda *_: None)
    monkeypatch.setattr(cluster, "remember_own_node", lambda: None)
    cluster.connect()
    return str(told["address"])


def test_a_cluster_that_ray_start_runs_on_this_machine_is_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = Listener(monkeypatch, tmp_path)
    with running.socket:
        assert joined(monkeypatch) == running.address


def test_a_cluster_that_has_ended_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = Listener(monkeypatch, tmp_path)
    ended.socket.close()
    assert joined(monkeypatch) == "local"
    ended.file.write_text("what a crash left")
    assert joined(monkeypatch) == "local"


def test_another_users_cluster_is_not_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = Listener(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: running.file.stat().st_uid + 1)
    with running.socket:
        assert joined(monkeypatch) == "local"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_an_address_is_read_from_the_file_itself_and_not_through_a_link(
    linked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = Listener(monkeypatch, tmp_path)
    place = running.file if linked == "file" else running.file.parent
    place.symlink_to(place.rename(tmp_path / "moved"))
    assert running.file.read_text()
    with running.socket:
        assert joined(monkeypatch) == "local"


@pytest.mark.parametrize("found", ["nothing", "own", "open", "link", "another's"])
def test_no_other_user_can_enter_the_folder_of_a_local_cluster(
    found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    usual = tmp_path / f"ray-{os.getuid()}"
    if found == "link":
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir(0o700)
        usual.symlink_to(elsewhere)
    elif found != "nothing":
        usual.mkdir(0o755 if found == "open" else 0o700)
    if found == "another's":
        user = os.getuid() + 1
        usual.rename(tmp_path / f"ray-{user}")
        monkeypatch.setattr(os, "getuid", lambda: user)
    folder = Path(cluster._private_folder()).parent
    assert folder.parent == tmp_path
    assert folder.lstat().st_mode == stat.S_IFDIR | 0o700
    assert (folder == usual) == (found in ("nothing", "own"))


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 1 << 20),
        ({"": "max 100000"}, 1 << 20),
        ({"a/b": "250000 100000", "a": "max 100000"}, 2.5),
        ({"a/b": "max 100000", "a": "50000 100000"}, 0.5),
        ({"": "300000 100000", "a/b": "400000 100000"}, 3.0),
    ],
)
def test_a_control_groups_quota_limits_the_cpus(
    quotas: dict[str, str], expected: float, tmp_path: Path
) -> None:
    root, own = tmp_path / "cgroup", tmp_path / "own"
    (root / "a" / "b").mkdir(parents=True)
    own.write_text("4:cpu:/x\n0::/a/b\n")
    for group, text in quotas.items():
        (root / group / "cpu.max").write_text(text + "\n")
    assert _quota(root, own) == expected
    assert _quota(root, tmp_path / "none") == 1 << 20


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_rays_token_is_its_owners_alone(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    before = os.umask(umask)
    try:
        cluster._keep_token_private()
    finally:
        os.umask(before)
    token = tmp_path / ".ray" / "auth_token"
    first = token.read_text()
    assert len(first) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(token.parent.stat().st_mode) == 0o700
    token.chmod(0o644)  # as Ray itself leaves it
    cluster._keep_token_private()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and token.read_text() == first
