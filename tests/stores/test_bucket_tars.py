"""Tars in a bucket, read in groups: what is fetched, how often, and in which order."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import without_ray
from pictures import picture
from s3_server import FaultyProxy
from tars import put, write_tar

import raypipe
from raypipe.commands.cli import main
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.stores import open_store, tar_jumps, tar_samples
from raypipe.stores import tar as tar_module
from raypipe.stores.tar import TarStore
from raypipe.stores.tar_samples import GROUP_BYTES
from raypipe.streaming.spec import StreamSpec

NUM_TARS, PER_TAR = 4, 12
PLAN = PlanConfig(epochs=2, micro_batch_size=4, global_batch_size=8, seed=3, shuffle=3)
GROUP = 8000
"""Bytes of a group: 4 or 5 images."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tar_module, tar_samples):
        monkeypatch.setattr(module, "GROUP_BYTES", GROUP)
    monkeypatch.setattr(tar_samples, "_GAP_BYTES", 2048)


@pytest.fixture
def tars(bucket: str, proxy: FaultyProxy, tmp_path: Path) -> tuple[Path, str]:
    """A folder and a bucket with the same tars, which are indexed in the bucket."""
    (tmp_path / "tars").mkdir()
    for number in range(NUM_TARS):
        first = PER_TAR * number
        images = [(picture(first + i, 60, 50), (first + i) % 5) for i in range(PER_TAR)]
        put(
            write_tar(tmp_path / "tars" / f"t-{number}.tar", images, first),
            f"{bucket}/tars/t-{number}.tar",
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYPIPE_CACHE", str(tmp_path / "of the indexer"))
        main(["index", f"{bucket}/tars"])
    forget(proxy)
    return tmp_path / "tars", f"{bucket}/tars"


def forget(proxy: FaultyProxy) -> None:
    with proxy.lock:
        proxy.sent.clear()
        proxy.requests.clear()


def sent(proxy: FaultyProxy) -> int:
    """Bytes of tars that came from the bucket."""
    return sum(size for path, size in proxy.sent.items() if path.endswith(".tar"))


def spec_of(address: Any, **plan: Any) -> StreamSpec:
    return raypipe.open_stream(
        address,
        plan=dataclasses.replace(PLAN, **plan),
        transform=TransformConfig(train="small", size=16),
        pool=PoolConfig(engine="inline", max_actors=2),
    )


def test_with_an_index_a_read_fetches_its_group_and_nothing_else(
    tars: tuple[Path, str], proxy: FaultyProxy
) -> None:
    local, address = tars
    store = open_store(address)
    assert len(store) == NUM_TARS * PER_TAR and sent(proxy) == 0
    groups = store.groups
    assert groups is not None and len(groups) > 2 * NUM_TARS
    assert (
        store.read(np.array([20]))["image"]
        == open_store(local).read(np.array([20]))["image"]
    )
    assert 0 < sent(proxy) < GROUP + 8000
    before = sent(proxy)
    of_group = np.arange(*groups[np.searchsorted(groups, 20, "right") - 1 :][:2])
    assert 20 in of_group
    assert store.read(of_group)["image"] == open_store(local).read(of_group)["image"]
    assert sent(proxy) == before
    assert "000020" in store.sample_name(20)  # type: ignore[attr-defined]


def test_an_epoch_and_all_later_ones_read_each_byte_once(
    tars: tuple[Path, str], proxy: FaultyProxy
) -> None:
    local, address = tars
    stored = sum(path.stat().st_size for path in local.glob("*.tar"))
    spec = spec_of(address)
    batches = without_ray.digests(spec)
    assert len(batches) == 2 * NUM_TARS * PER_TAR // 4
    assert 0.7 * stored < sent(proxy) <= stored


def test_the_digest_is_the_local_ones_in_windows_and_in_the_whole(
    tars: tuple[Path, str],
) -> None:
    local, address = tars
    in_windows = without_ray.digests(spec_of(address))
    assert in_windows == without_ray.digests(spec_of(local))
    whole = without_ray.digests(spec_of(local, shuffle="global"))
    assert (
        whole == without_ray.digests(spec_of(address, shuffle="global")) != in_windows
    )
    assert without_ray.digests(spec_of(address, shuffle="off")) == without_ray.digests(
        spec_of(local, shuffle="off")
    )


def test_without_an_index_one_scan_serves_the_node_and_fills_its_cache(
    tars: tuple[Path, str], proxy: FaultyProxy, bucket: str
) -> None:
    address = put(tars[0] / "t-1.tar", f"{bucket}/other/t-1.tar")
    forget(proxy)
    store = open_store(address)
    assert len(store) == PER_TAR
    once = sent(proxy)
    assert once == (tars[0] / "t-1.tar").stat().st_size
    assert len(open_store(address)) == PER_TAR
    assert (
        store.read(np.arange(PER_TAR))["image"]
        == open_store(tars[0] / "t-1.tar").read(np.arange(PER_TAR))["image"]
    )
    assert sent(proxy) == once


def test_a_scan_of_large_members_reads_headers_only(
    bucket: str, proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tar_jumps, "_BLOCK_BYTES", 8192)
    monkeypatch.setattr(tar_module, "_SMALL_REMOTE_BYTES", 0)
    monkeypatch.setattr(tar_jumps, "_LEAST_STRIDE", 20_000)
    images = [(bytes([i]) * 100_000, i % 3) for i in range(20)]
    file = write_tar(tmp_path / "large.tar", images)
    store = open_store(put(file, f"{bucket}/large.tar"))
    assert store.fingerprint == open_store(file).fingerprint and len(store) == 20
    assert sent(proxy) <= 20 * 2 * 8192 + 8192
    values = store.read(np.arange(20))
    assert values["image"] == [image for image, _ in images] and values[
        "label"
    ].tolist() == [i % 3 for i in range(20)]


def test_an_index_of_another_version_costs_a_scan(
    tars: tuple[Path, str],
    bucket: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(
        write_tar(tmp_path / "new.tar", [(picture(77), 4)] * PER_TAR),
        f"{bucket}/tars/t-0.tar",
    )
    store = open_store(tars[1])
    assert len(store) == NUM_TARS * PER_TAR and store.read(np.array([0]))[
        "label"
    ].tolist() == [4]
    assert (
        "belongs to another version of the tar" in caplog.text
        and "raypipe index" in caplog.text
    )


def test_a_tar_that_changed_since_the_store_was_opened_is_refused(
    tars: tuple[Path, str], bucket: str, tmp_path: Path
) -> None:
    store = open_store(tars[1])
    assert len(store) == NUM_TARS * PER_TAR
    put(
        write_tar(tmp_path / "new.tar", [(picture(77), 4)] * PER_TAR),
        f"{bucket}/tars/t-2.tar",
    )
    with pytest.raises(
        StoreError, match=r"t-2\.tar has changed since the store was opened"
    ):
        store.read(np.array([2 * PER_TAR]))


def test_runs_share_an_index_through_their_folder(
    tars: tuple[Path, str], bucket: str, proxy: FaultyProxy
) -> None:
    address = put(tars[0] / "t-3.tar", f"{bucket}/other/t-3.tar")
    assert len(open_store(address)) == PER_TAR  # so that this node knows it already
    store = TarStore(address).adapted("auto", f"{bucket}/run/index")
    assert len(store) == PER_TAR and len(_names(f"{bucket}/run/index")) == 1
    forget(proxy)
    with pytest.MonkeyPatch.context() as patch:
        # of another node, which cannot keep anything
        patch.setenv("RAYPIPE_CACHE", "/proc/none")
        assert len(pickle.loads(pickle.dumps(store))) == PER_TAR and sent(proxy) == 0


def test_index_says_what_has_none(stores: dict[str, Path], tmp_path: Path) -> None:
    from raypipe.commands.index import index
    from raypipe.config import RunConfig, StoreConfig

    with pytest.raises(
        ConfigError, match=r"train\.lmdb has no tars: only they need an index"
    ):
        index(RunConfig(store=StoreConfig(train=str(stores["train"]))))
    with pytest.raises(ConfigError, match="needs the address of tars"):
        index(RunConfig())


def _names(address: str) -> list[str]:
    from raypipe.stores.addresses import names_at

    return sorted(names_at(address) or ())


def test_groups_are_a_function_of_sizes_that_never_changes(tmp_path: Path) -> None:
    # the order of every run in windows depends on it
    assert GROUP_BYTES == 8 << 20
    for name, sizes in (("a", [3000] * 8), ("b", [10, 30_000, 10, 7980, 20])):
        write_tar(tmp_path / f"{name}.tar", [(bytes(size), 0) for size in sizes])
    groups = TarStore(tmp_path, groups=True).groups
    # b begins its samples at 0, 10, 30010, 30020, 38000
    assert groups is not None and groups.tolist() == [
        0,
        3,
        6,
        8,
        10,
        12,
        13,
    ]
    assert TarStore(tmp_path).groups is None
