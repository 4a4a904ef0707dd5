"""Streams with `transform.decode: device`: the CPU road's samples, crops and bad samples, by any way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import without_ray
from pictures import CLASSES, samples

import raypipe
from raypipe.commands.preview_tiles import Preview
from raypipe.device.prefetcher import Batch
from raypipe.errors import BadSamplesError, CursorError, SampleError
from raypipe.history.step_maker import StepMaker
from raypipe.stores.destination import write_atomically
from raypipe.stores.writers import open_writer
from raypipe.streaming.digest import plain_settings
from raypipe.streaming.saving.saved_model import SavedModel, input_of
from raypipe.streaming.spec import StreamSpec

INLINE = raypipe.PoolConfig(engine="inline")
COLUMNS = {"image": "binary", "label": "int64", "width": "int64", "height": "int64"}


def damaged(image: Any) -> bytes:
    """With a whole header and a whole end."""
    middle = len(image) // 2
    return image[:middle] + b"\xff\xd0" * 20 + image[middle + 40 :]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 images: a PNG, a damaged JPEG, one that is cut short."""
    made, path = samples(40), tmp_path_factory.mktemp("decoding") / "train.lmdb"
    made[3]["image"] = cv2.imencode(".png", np.full((50, 60, 3), 7, np.uint8))[
        1
    ].tobytes()
    made[7]["image"] = damaged(made[7]["image"])
    made[9]["image"] = bytes(made[9]["image"])[:-100]  # type: ignore[call-overload]
    with open_writer(path, columns=COLUMNS, classes=CLASSES) as writer:
        for sample in made:
            # as `raypipe convert` adds them
            writer.append({**sample, "width": 48, "height": 40})
    return path


def open_spec(store: Path, decode: Any = "device", **options: Any) -> StreamSpec:
    plan = {
        "epochs": 1,
        "micro_batch_size": 5,
        "global_batch_size": 10,
        **options.pop("plan", {}),
    }
    transform = raypipe.TransformConfig(
        **{"size": 24, "decode": decode, **options.pop("transform", {})}
    )
    return raypipe.open_stream(
        store,
        store,
        plan=raypipe.PlanConfig(**plan),
        transform=transform,
        pool=INLINE,
        **options,
    )


def batches(spec: StreamSpec) -> list[Batch]:
    return list(without_ray.every_batch(raypipe.loader(spec)))


def records(folder: Path) -> dict[str, list[Any]]:
    """The quarantine: by micro-batch its bad samples, and their substitutes."""
    return {
        path.name: sorted(
            (record["index"], str(record["substitute"]))
            for record in map(json.loads, lines)
        )
        for path in sorted(folder.iterdir())
        if (lines := path.read_text().splitlines())
    }


def test_samples_targets_and_bad_samples_are_those_of_the_cpu_road(
    store: Path, tmp_path: Path
) -> None:
    by_road = {
        road: batches(open_spec(store, road, quarantine=str(tmp_path / road)))
        for road in ("cpu", "device")
    }
    for ours, other in zip(by_road["device"], by_road["cpu"], strict=True):
        assert (
            ours.position == other.position
            and ours.index.tolist() == other.index.tolist()
        )
        assert torch.equal(ours.weight, other.weight) and torch.equal(
            ours.target, other.target
        )
        assert (ours.num_bad, ours.image.shape, ours.image.dtype) == (
            other.num_bad,
            other.image.shape,
            torch.uint8,
        )
        assert (
            ours.image.int() - other.image.int()
        ).abs().float().mean() < 3  # it shrinks without aliasing
    assert records(tmp_path / "device") == records(tmp_path / "cpu")
    assert sum(batch.num_bad for batch in by_road["device"]) == 4


def test_the_roads_do_not_resume_each_other(store: Path) -> None:
    with pytest.raises(CursorError):
        raypipe.loader(open_spec(store), cursor=open_spec(store, "cpu").plan.start())
    settings = plain_settings(
        open_spec(store), workers=1, actors=1, from_step=0, to_step=1
    )
    assert settings["transform.decode"] == "device"


@pytest.mark.parametrize("ring", [False, True])
def test_a_bad_sample_that_only_decoding_shows_ends_a_strict_run(
    tmp_path: Path, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYPIPE_DEBUG", "1" if ring else "")
    kept = [{"image": sample["image"], "label": 1} for sample in samples(20)]
    kept[7]["image"] = damaged(kept[7]["image"])
    write_atomically(str(tmp_path / "strict.lmdb"), kept, CLASSES)
    spec = open_spec(tmp_path / "strict.lmdb", transform={"max_bad_fraction": 0.0})
    with pytest.raises(SampleError, match=r"key 7\): damaged JPEG.*max_bad_fraction"):
        batches(spec)


def test_too_many_bad_samples_end_a_run_by_the_same_budget(tmp_path: Path) -> None:
    made = samples(60)
    for sample in made[:45]:
        sample["image"] = damaged(sample["image"])
    write_atomically(str(tmp_path / "bad.lmdb"), made, CLASSES)
    with pytest.raises(
        (BadSamplesError, SampleError), match=r"are bad|substitutes were bad"
    ):
        batches(open_spec(tmp_path / "bad.lmdb", plan={"epochs": 3}))


def test_the_stages_of_time_have_the_decoding(store: Path) -> None:
    loader = raypipe.loader(open_spec(store))
    list(without_ray.every_batch(loader))
    assert loader.times().decode_s > 0 and loader.times("val").decode_s > 0


def test_a_preview_and_a_saved_model_see_the_images(store: Path) -> None:
    spec = open_spec(store)
    rows, names = Preview(StepMaker(spec, raypipe.AugmentConfig())).tiles([3, 7], [0])
    assert names == ["transformed", "augmented"]
    # the PNG is of one color
    assert rows[0][1].image is not None and (rows[0][1].image == 7).all()
    described = input_of(spec, None)
    model = SavedModel(
        "here", 0, 0, {}, {}, None, "", described["transform"], described, False
    )
    last = next(batch for batch in batches(spec) if batch.position.split == "val")
    row = last.index.tolist().index(int(last.index[0]))
    image = spec.stores["val"].read(last.index[row : row + 1], ("image",))["image"][0]
    assert torch.equal(model.prepare(bytes(image)), last.image[row])
    with pytest.raises(SampleError, match="damaged JPEG"):
        model.prepare(damaged(bytes(image)))
