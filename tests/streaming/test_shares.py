"""Which share a process gets, and that the shares of any launcher and mesh are those of one stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launched_stream import described, launch, seen, spec_of
from small_streams import store_of
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from without_ray import every_batch

import raypipe
from raypipe.errors import ConfigError
from raypipe.streaming.shares import Share, share_of

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "tp": 2}


@contextmanager
def process(rank: int, num: int) -> Iterator[None]:
    """Within, this is one process of torch.distributed, whose collectives do nothing."""
    distributed.init_process_group("fake", FakeStore(), rank=rank, world_size=num)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def mesh_of(*names: str) -> Any:
    sizes = tuple(SIZES.get(name, 2) for name in names)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names or None)


def test_processes_that_differ_in_no_data_axis_have_one_share() -> None:
    shares = list[Share]()
    for rank in range(24):
        with process(rank, 24):
            shares.append(share_of(mesh=mesh_of(*SIZES)))
    assert {share.world_size for share in shares} == {6}
    assert [share.rank for share in shares] == [rank // 2 % 6 for rank in range(24)]
    assert [share.process for share in shares] == list(range(24))
    first = [share for share in shares if share.is_first]
    assert [share.rank for share in first] == list(range(6))


@pytest.mark.parametrize("name", ["dp", "data", "data_parallel", "batch", "fsdp"])
def test_an_axis_of_data_has_any_of_its_usual_names(name: str) -> None:
    with process(3, 4):
        assert share_of(mesh=mesh_of("tp", name))[:2] == (1, 2)
        assert share_of(mesh=mesh_of(name, "tp"))[:2] == (1, 2)
        assert share_of(mesh=mesh_of(name, "cp")[name])[:2] == (1, 2)


def test_without_arguments_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of() == (0, 1, 0, 1, False, True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert share_of() == (1, 4, 1, 4, False, True)
    assert share_of(world_size=1) == (0, 1, 1, 4, True, True)
    with process(2, 3):
        assert share_of() == (2, 3, 2, 3, False, True)
        assert share_of(1, 2) == (1, 2, 2, 3, True, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rank": 2, "world_size": 2},
            "rank from 0 to world_size - 1.* got rank=2 and",
        ),
        ({"rank": 1}, "give rank and world_size, .* got rank=1 and world_size=None"),
        ({"world_size": 2}, "got rank=None and world_size=2"),
        ({"rank": -1, "world_size": 2}, "rank must be a whole number of at least 0"),
        ({"rank": 0, "world_size": 3}, "3 workers cannot share the 2 micro-batches"),
        ({"mesh": "dp"}, "raypipe.loader: mesh must be a DeviceMesh"),
    ],
)
def test_a_share_that_cannot_be_is_one_sentence(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = spec_of(str(store_of("keys", tmp_path)), "inline")
    with pytest.raises(ConfigError, match=message):
        raypipe.loader(spec, **options)


def test_a_mesh_without_a_data_axis_names_those_that_it_has() -> None:
    with process(1, 4):
        with pytest.raises(
            ConfigError, match=r"of the axes \('tp', 'cp'\); .* data-par"
        ):
            share_of(mesh=mesh_of("tp", "cp"))
        with pytest.raises(ConfigError, match="or only a mesh"):
            share_of(0, 2, mesh_of("dp", "tp"))


def test_of_the_processes_of_one_share_the_first_alone_writes(tmp_path: Path) -> None:
    spec = spec_of(str(store_of("keys", tmp_path)), "inline")
    for rank in (1, 0):
        with process(rank, 2):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            loader = raypipe.loader(
                spec,
                mesh=mesh,
                cursor=spec.plan.start(),
                run_dir=tmp_path / "run",
                log_digest=True,
            )
            assert len(list(every_batch(loader))) == 24
            loader.close()
        written = [path.name for path in tmp_path.glob("run/**/*") if path.is_file()]
        assert bool(written) == (rank == 0)


def of_one_process(store: str) -> list[str]:
    loader = raypipe.loader(spec_of(store, "inline"))
    return [described(batch) for batch in every_batch(loader)]


@pytest.mark.cluster
@pytest.mark.usefixtures("idle_cluster", "two_cpus")
def test_pools_of_shares_make_the_stream_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if the first pool took the CPU that is free when the second one asks
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 2.0})
    store = str(store_of("keys", tmp_path))
    alone = of_one_process(store)
    shares = [
        every_batch(raypipe.loader(spec_of(store, "ray"), rank=rank, world_size=2))
        for rank in range(2)
    ]
    found = [described(batch) for pair in zip(*shares, strict=True) for batch in pair]
    assert found == alone


@pytest.mark.system
@pytest.mark.cluster
def test_pools_of_two_processes_share_a_cluster_and_resume_as_one(
    tmp_path: Path,
) -> None:
    store = store_of("keys", tmp_path)
    alone = of_one_process(str(store))
    launch(store, tmp_path, "plain", "ray")
    assert sorted(seen(tmp_path, 0) + seen(tmp_path, 1)) == sorted(alone)
    clusters = [(tmp_path / f"cluster-{rank}").read_text() for rank in range(2)]
    assert clusters[0] == clusters[1]
    (tmp_path / "state").unlink()
    launch(store, tmp_path, "ranks", "ray", dies_at=7)
    done = [line for rank in range(2) for line in seen(tmp_path, rank)]
    launch(store, tmp_path, "0/1", "ray")
    later = seen(tmp_path, 0)
    assert later == alone[-len(later) :] and set(done) | set(later) == set(alone)
