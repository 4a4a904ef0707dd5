from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raypipe.commands import cli
from raypipe.commands.inspection import verify
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.device.prefetcher import HostBatch
from raypipe.errors import RaypipeError
from raypipe.plan.schedule import MicroBatchId
from raypipe.stores import open_store
from raypipe.stores.destination import write_atomically
from raypipe.streaming.digest import Combiner, batch_digest, combine, iterate_digests
from raypipe.streaming.pipeline import StreamSpec

from conftest import CLASSES, samples  # isort: skip

BATCH = HostBatch(
    at=MicroBatchId("train", 0, 1, 2),
    image=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
    label=np.array([3, 4]),
    weight=np.ones(2, np.float32),
    index=np.array([7, 8]),
    num_bad=0,
)


def flipped(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed.flat[-1] += 1
    return changed


def test_golden_digests() -> None:
    assert batch_digest(BATCH).hex() == "8a1e5b905f132e445f95f9e3c819ba10"
    assert combine([b"a" * 16, b"b" * 16]) == "3106330ede3673ae78e9b017358c794a"


@pytest.mark.parametrize("name", ["image", "label", "weight", "index"])
def test_one_changed_value_changes_the_digest(name: str) -> None:
    changed = replace(BATCH, **{name: flipped(getattr(BATCH, name))})
    assert batch_digest(changed) != batch_digest(BATCH)


def test_masks_and_boxes_are_part_of_the_digest_where_there_are_any() -> None:
    mask, boxes = np.zeros((2, 2, 2), np.uint8), np.zeros((2, 1, 5), np.float32)
    kinds = [{}, {"mask": mask}, {"mask": flipped(mask)}, {"boxes": boxes}, {"boxes": flipped(boxes)}]
    kinds.append({"mask": mask, "boxes": boxes})
    assert len({batch_digest(replace(BATCH, **kind)) for kind in kinds}) == len(kinds)


def test_the_place_and_the_shape_are_part_of_the_digest() -> None:
    assert batch_digest(replace(BATCH, at=MicroBatchId("val", 0, 1, 2))) != batch_digest(BATCH)
    assert batch_digest(replace(BATCH, image=BATCH.image.reshape(2, 1, 4, 3))) != batch_digest(BATCH)


def test_read_only_memory_gives_the_same_digest() -> None:
    frozen = BATCH.image.copy()
    frozen.flags.writeable = False
    assert batch_digest(replace(BATCH, image=frozen)) == batch_digest(BATCH)


def test_combine_is_of_the_order() -> None:
    assert combine([b"a", b"b"]) != combine([b"b", b"a"])
    assert combine(iter([b"a", b"b"])) == combine([b"a", b"b"])


def test_a_combiner_tells_the_digest_at_any_time() -> None:
    combiner = Combiner()
    assert combiner.hex() == combine([])
    combiner.add(b"a")
    assert combiner.hex() == combine([b"a"])
    combiner.add(b"b")
    assert combiner.hex() == combine([b"a", b"b"])


# The command without Ray


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--from-step", "12"], "--from-step 12 is outside the run's 12 steps"),
        (
            ["--from-step", "4", "--to-step", "4"],
            "--to-step 4 is not after --from-step 4 within the run's 12 steps",
        ),
        (["--to-step", "13"], "--to-step 13 is not after --from-step 0"),
        (["--to-step", "-1"], "--to-step -1 is not after --from-step 0"),
        (["--output", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--compare", "/nowhere/x.json"], "/nowhere/x.json cannot be read"),
        (["--leave-out", "/nowhere/x.json"], "store.leave_out: /nowhere/x.json cannot be read"),
        (["--val-leave-out", "/nowhere/x.json"], "store.val_leave_out: there is /nowhere/x.json, but no store"),
    ],
)
def test_a_range_or_a_file_that_cannot_be_is_told_before_ray_starts(
    args: list[str], message: str, stores: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    with pytest.raises(SystemExit) as caught:
        cli_main("digest", stores["train"], "--micro-batch", "8", "--epochs", "1", *args)
    assert caught.value.code == 1
    assert re.match(f"ConfigError: {message}", capsys.readouterr().err)


def cli_main(*args: object) -> None:
    # The cluster is all tests'.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_shutdown", lambda: None)
        cli.main([str(arg) for arg in args])


# Ranges of a stream

PLAN = PlanConfig(epochs=2, micro_batch=8, per_step=2, seed=5)
SMALL = TransformConfig(train="light", val="center", size=16)


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
class TestRanges:
    def test_a_range_is_that_part_of_the_whole_for_any_workers_and_pool(self, stores: dict[str, Path]) -> None:
        spec = StreamSpec.of(str(stores["train"]), str(stores["val"]), plan=PLAN, transform=SMALL)

        def digests(start: int, stop: int, actors: int, workers: int) -> list[tuple[str, bytes]]:
            pool = PoolConfig(min_actors=actors, cpus_per_actor=0.5)
            cut = replace(spec, plan=spec.plan.until(stop), pool=pool)
            found = iterate_digests(cut, spec.plan.cursor_at(start), max_actors=actors, world_size=workers)
            return [(one.name, one.digest) for one in found]

        before = pool_actors()
        whole = digests(0, 12, 1, 1)
        names = [str(at) for at in spec.plan.micro_batches(spec.plan.start())]
        assert [name for name, _ in whole] == names
        # Six steps of two micro-batches in an epoch, and a validation of two steps after each.
        assert digests(4, 8, 2, 2) == whole[8 : 12 + 4 + 4]
        assert wait_for_end(before) == {}

    def test_a_stream_of_too_few_micro_batches_is_an_error(self, stores: dict[str, Path]) -> None:
        spec = StreamSpec.of(str(stores["train"]), plan=PLAN, transform=SMALL)
        cut = replace(spec, plan=spec.plan.until(1))

        class Short(StreamSpec):
            def splits(self, *args: Any, **options: Any) -> Any:
                return StreamSpec.splits(cut, *args, **options)

        short = Short(**vars(spec))
        with pytest.raises(RaypipeError, match="rank 0 expected train-e0000-s000001-m000, the stream ended"):
            list(iterate_digests(short, spec.plan.start(), max_actors=1, world_size=1))

    def test_the_command_writes_and_compares_files(
        self, stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(*args: object, code: int = 0) -> dict[str, Any]:
            options = ["--epochs", 2, "--micro-batch", 10, "--per-step", 2, "--size", 16, "--actors", 1]
            with pytest.raises(SystemExit) if code else contextlib.nullcontext() as caught:
                cli_main("digest", stores["train"], *options, *args)
            assert caught is None or caught.value.code == code
            return json.loads(capsys.readouterr().out.splitlines()[-1])

        one, other = tmp_path / "one.json", tmp_path / "other.json"
        found = run("--to-step", 7, "--output", one)
        assert found == {"digest": found["digest"], "samples": 140, "micro_batches": 14, "output": str(one)}
        written = json.loads(one.read_text())
        assert combine(bytes.fromhex(d) for d in written["micro_batches"].values()) == found["digest"]
        found = run("--from-step", 5, "--workers", 2, "--unbroken=false", "--compare", one, "--output", other)
        assert found["equal"] and found["compared"] == 4 and found["micro_batches"] == 10
        assert found["settings"] == {"workers": [1, 2], "from_step": [0, 5], "to_step": [7, 10]}
        assert "unbroken_digest" not in found
        found = run("--to-step", 1, "--transform", "center", "--compare", one, code=1)
        assert (found["equal"], found["compared"], found["different"]) == (False, 2, 2)
        assert found["first_different"] == "train-e0000-s000000-m000"
        assert found["settings"]["transform.train"] == ["light", "center"]
        steps = [{"RandomResizedCrop": {"size": [16, 16]}}, {"HorizontalFlip": {"p": 0.5}}]  # what light is
        (tmp_path / "light.yaml").write_text(json.dumps(steps))
        found = run("--to-step", 1, "--transform", tmp_path / "light.yaml", "--compare", one)
        assert found["equal"] and found["settings"]["transform.train"] == ["light", steps]
        cli_main("digest-diff", one, other)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["compared"] == 4

    def test_a_stream_without_its_bad_samples(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        damaged = [{**s, "image": b"x"} if i in (3, 30) else s for i, s in enumerate(samples(50))]
        write_atomically(str(tmp_path / "train.lmdb"), damaged, CLASSES)
        store = open_store(tmp_path / "train.lmdb")
        verify(store, str(tmp_path / "bad.json"), progress=False)
        cli_main(
            *("digest", store.address, "--val", store.address, "--micro-batch", 8, "--size", 16),
            *("--leave-out", tmp_path / "bad.json", "--val-leave-out", tmp_path / "bad.json"),
        )
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["samples"], found["micro_batches"]) == (48 + 48, 6 + 6)


def pool_actors() -> dict[str, str]:
    """The live actors of streams: id → class. (Ray Data keeps others of its own, one of each in a cluster.)"""
    import ray

    states = [actor for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"]
    names = ("MapWorker", "SplitCoordinator")
    return {a["ActorID"]: a["ActorClassName"] for a in states if a["ActorClassName"].startswith(names)}


def wait_for_end(before: dict[str, str]) -> dict[str, str]:
    """The actors of streams that live on, 10 s after the last one was needed, beside those there were before."""
    deadline = time.monotonic() + 10
    while left := {name: actor for name, actor in pool_actors().items() if name not in before}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return left
