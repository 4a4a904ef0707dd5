"""The preview shows what the pieces make, where the plan puts the samples; and the command around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from pictures import CLASSES, picture
from small_runs import run_command

from raypipe.commands.cli import main
from raypipe.commands.preview import preview
from raypipe.commands.preview_tiles import Preview, find_draws
from raypipe.config import AugmentConfig, PlanConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.history.step_maker import Remade, StepMaker
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.opening import open_stream
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode.rgb import decode

SIZE, B = 24, 8
FLIP = AugmentConfig(preset="light")  # the cheapest that draws anything
TRANSFORM = TransformConfig(train="light", size=SIZE)


def memory(num: int = 30, bad: int = -1) -> MemoryStore:
    images = [b"\xff\xd8\xffbroken" if i == bad else picture(i) for i in range(num)]
    return MemoryStore(images, [i % 5 for i in range(num)], CLASSES)


def made(
    store: MemoryStore,
    augment: AugmentConfig = FLIP,
    transform: TransformConfig = TRANSFORM,
) -> Preview:
    plan = PlanConfig(epochs=3, micro_batch_size=B, global_batch_size=2 * B, seed=5)
    return Preview(StepMaker(stream(store, plan, transform), augment))


def stream(
    store: MemoryStore,
    plan: PlanConfig,
    transform: TransformConfig = TRANSFORM,
    columns: Sequence[str] = (),
) -> StreamSpec:
    label = "label" if "label" in store.schema.names else ""
    return open_stream(
        store, plan=plan, transform=transform, columns=columns, target_column=label
    )


def first_of(shown: Preview, epoch: int = 0) -> list[int]:
    return shown.plan.draw_epoch(epoch, np.arange(4)).indices.tolist()


# What the tiles are


def test_the_tiles_are_what_a_run_makes() -> None:
    store = memory()
    mean, std = (0.5, 0.4, 0.3), (0.3, 0.2, 0.1)
    augment = replace(FLIP, mean=mean, std=std, strength=(1, 1, 0))
    shown = made(store, augment)
    for epoch in (0, 2):
        index = first_of(shown, epoch)[0]
        ((decoded, transformed, fed),), names = shown.tiles([index], [epoch])
        assert names == ["transformed", "augmented"]
        stored = store.read(np.array([index]))["image"][0]
        assert np.array_equal(decoded.image, decode(stored))
        at = find_draws(shown.plan, epoch, [index])[index]
        remade = Remade(shown.maker, at.micro_batch)
        assert np.array_equal(transformed.image, remade.host["image"][at.row])
        image = remade.finished.image[at.row].movedim(0, -1)
        pixels = (image * torch.tensor(std) + torch.tensor(mean)) * 255
        assert np.array_equal(fed.image, pixels.round().clamp(0, 255).byte())


@pytest.mark.parametrize("kind", ["MixUp", "CutMix"])
def test_the_caption_of_a_mixed_tile_is_its_target(kind: str) -> None:
    shown = made(memory(), replace(FLIP, **{f"{kind.lower()}_alpha": 0.4}))
    indices = first_of(shown)
    for index, row in zip(indices, shown.tiles(indices, [0])[0], strict=True):
        at = find_draws(shown.plan, 0, [index])[index]
        mixed = Remade(shown.maker, at.micro_batch).finished.mix
        assert mixed is not None
        partner = int(shown.plan.indices(at.micro_batch)[(at.row + 1) % B])
        own, other = CLASSES[index % 5], CLASSES[partner % 5]
        assert row[2].lines == (
            f"{kind}: {mixed.lam:.2f} {own}",
            f"+ {1 - mixed.lam:.2f} {other}",
        )


def test_a_bad_sample_is_grey_with_the_reason_and_its_substitute_follows() -> None:
    good = made(memory())
    bad = first_of(good)[0]
    shown = made(memory(bad=bad))
    decoded, transformed, fed = shown.tiles([bad], [0])[0][0]
    assert decoded.image is None and "JPEG" in decoded.reason
    at = find_draws(shown.plan, 0, [bad])[bad]
    substitute = shown.plan.substitute(at.micro_batch, bad, 0)
    assert transformed.lines[-1] == f"bad: sample {substitute} stands in"
    assert transformed.image is not None and fed.lines == (
        "not mixed",
        CLASSES[substitute % 5],
    )


def test_a_sample_that_an_epoch_leaves_out_is_grey() -> None:
    shown = made(memory(35))
    (index, *_) = set(range(35)) - find_draws(shown.plan, 1, range(35)).keys()
    tile = shown.tiles([index], [1])[0][0][1]
    assert (tile.image, tile.reason) == (None, "not drawn in this epoch")


# The picture


def run(store: MemoryStore, output: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"augment": FLIP, "epochs": 2, "samples": 2} | changes
    plan = settings.pop("plan", PlanConfig(epochs=2, micro_batch_size=B))
    return preview(
        stream(store, plan, settings.pop("transform", TRANSFORM)),
        str(output),
        **settings,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [3, 30]}, r"30 is outside \[0, 30\)"),
        ({"indices": [-1]}, r"-1 is outside \[0, 30\)"),
        ({"samples": 0}, "0 samples, stored and in 2 epochs, are 0 pictures"),
        ({"indices": [0] * 500}, "are 1500 pictures, not 1 to 400"),
        ({"name": "a.jpg"}, "--output must be a .png"),
        ({"name": "missing/a.png"}, "--output must be a .png"),
        ({"name": "n" * 300 + ".png"}, "--output .* cannot be written"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    changes = dict(changes)
    with pytest.raises(ConfigError, match=message):
        run(memory(), tmp_path / changes.pop("name", "a.png"), **changes)


# Masks and boxes


def scenes(bad: int = -1) -> MemoryStore:
    """A red square on black in each image, class 1 in its mask, with its box."""
    images, masks, boxes = [], [], []
    for number in range(16):
        mask = np.zeros((40, 48), np.uint8)
        left, top = 2 * number, number
        mask[top : top + 16, left : left + 16] = 1
        pixels = np.zeros((40, 48, 3), np.uint8)
        pixels[mask == 1, 2] = 200
        images.append(cv2.imencode(".png", pixels)[1].tobytes())
        masks.append(
            b"bad" if number == bad else cv2.imencode(".png", mask)[1].tobytes()
        )
        boxes.append([[left, top, left + 16, top + 16, 3]])
    return MemoryStore(images, None, columns={"seg": masks, "objects": boxes})


def test_masks_and_boxes_are_on_the_tiles_where_the_stream_has_them() -> None:
    settings = TransformConfig(
        train="resize",
        size=24,
        targets={"mask": "seg", "boxes": "objects", "max": 2},
    )
    shown = made(scenes(bad=5), AugmentConfig(), settings)
    for index in (3, 5):
        decoded, *others = shown.tiles([index], [0])[0][0]
        assert (decoded.image is None) == (index == 5)
        assert "mask" in decoded.targets or "the mask is no PNG" in decoded.reason
        for tile in others:
            assert tile.image is not None
            assert (
                (tile.image[:, :, 0] > 100) == (tile.targets["mask"] == 1)
            ).mean() > 0.95
            assert tile.targets["boxes"][:, 4].tolist() == [3, -1]


# The command


def test_the_command(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["--show-epochs=1", "--plan.epochs=5", "--indices=[7,3,7]"]
    settings = ["--plan.micro_batch_size=8", "--augment.cutmix-alpha", "1"]
    output = tmp_path / "a.png"
    given = [*shown, *settings, "-o", output]
    found = run_command(capsys, "preview", stores["train"], *given)
    assert found == {"output": str(output), "samples": 3, "epochs": 1}
    assert output.read_bytes()[:4] == b"\x89PNG"


def test_the_command_shows_what_a_filter_or_mixture_leaves_of_a_store(
    stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = f"{{a: {stores['train']}, b: {stores['val']}}}"
    for args in (
        [str(stores["train"]), "--store.filter=label == 1"],
        [f"--store.train={one}"],
    ):
        shown = ["--show-epochs=1", "--samples=2", "-o", tmp_path / "a.png"]
        assert run_command(capsys, "preview", *args, *shown)["samples"] == 2


@pytest.mark.parametrize(
    "option",
    [
        *("--indices=[3,100]", "--augment.std=[1]", "-o=a/b/c.png"),
        *("--transform.train=lihgt", "--transform.train=[{Blurr: {}}]"),
        *("--transform.targets={mask: image}", "--store.columns=[image]"),
    ],
)
def test_an_error_of_the_command_is_one_line(
    stores: dict[str, Path],
    option: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(
            ["preview", str(stores["train"]), f"--output={tmp_path / 'a.png'}", option]
        )
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 + error.count(
        "\n  tip: "
    )


# Columns and targets that are no classes


def test_a_store_without_labels_is_shown_without_classes() -> None:
    shown = made(MemoryStore([picture(number) for number in range(30)], None))
    ((row,), _) = shown.tiles([first_of(shown)[0]], [0])
    assert [tile.lines[0] for tile in row] == [
        "",
        "step 0, micro 0, row 0",
        "not mixed",
    ]


@pytest.mark.parametrize("labels", [np.arange(30) / 4, np.eye(30, 3, dtype=np.int64)])
def test_captions_show_columns_and_targets_of_any_numbers(
    labels: Any,
) -> None:
    captions = [f"picture {number}" for number in range(30)]
    store = MemoryStore(
        [picture(number) for number in range(30)], labels, columns={"caption": captions}
    )
    spec = stream(store, PlanConfig(epochs=1, micro_batch_size=B), columns=["caption"])
    shown = Preview(StepMaker(spec, FLIP))
    index = first_of(shown)[0]
    ((row,), _) = shown.tiles([index], [0])
    assert (
        row[0].lines[1] == f"sample {index}, 48 x 40"
        and row[1].lines[-1] == f"caption picture {index}"
    )
    assert row[2].lines == ("not mixed", f"target {np.array2string(labels[index])}")


# Views


VIEWS = {
    "global": {"transform": "light", "count": 2},
    "local": {"transform": "light", "count": 3, "size": 12},
}


def crops(view: torch.Tensor) -> np.ndarray:
    """Normalized crops (B, n, 3, H, W) as uint8 (B, n, H, W, 3)."""
    mean = torch.tensor(AugmentConfig.mean).view(3, 1, 1)
    std = torch.tensor(AugmentConfig.std).view(3, 1, 1)
    pixels = view * std + mean if view.is_floating_point() else view / 255
    return (pixels * 255).round().byte().movedim(2, -1).numpy()


def test_of_views_each_crop_has_a_tile_as_the_model_gets_it() -> None:
    shown = made(memory(), transform=replace(TRANSFORM, train=VIEWS))
    indices = first_of(shown)
    rows, names = shown.tiles(indices, [0, 1])
    assert names == ["global 0", "global 1", "local 0", "local 1", "local 2"]
    at = find_draws(shown.plan, 0, indices[:1])[indices[0]]
    fed = Remade(shown.maker, at.micro_batch).finished.views
    for number, tile in enumerate(rows[0][1:6]):
        name, crop = ("global", number) if number < 2 else ("local", number - 2)
        assert np.array_equal(tile.image, crops(fed[name])[at.row, crop])
    assert [len(row) for row in rows] == [1 + 2 * 5] * 4
