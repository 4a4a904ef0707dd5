"""A user's modules on the device: Kornia's as scripts have them, equal to a call by hand under the seed."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import kornia.augmentation as K  # noqa: N812 # as everybody writes it
import numpy as np
import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from raypipe.config import AugmentConfig
from raypipe.device.augment import DeviceAugment, scaled
from raypipe.device.kornia_targets import kept_keypoints
from raypipe.device.mixing import mixed_cross_entropy, soft_targets
from raypipe.device.modules import PLAIN, all_seeded, normalization_of
from raypipe.device.prefetcher import Batch, on_device
from raypipe.errors import ConfigError
from raypipe.plan.places import MicroBatchId
from raypipe.transform.device_input import IMAGES
from raypipe.transform.fields import LABEL, MicroBatch

CPU = torch.device("cpu")

ROWS, SIZE = 6, 32
VIEWS = IMAGES._replace(has_views=True)
JOINT = ["mask", "boxes", "keypoints"]


def host(split: Any = "train", seed: int = 0) -> MicroBatch:
    """Gray noise with a bright square of class 3, its mask, its box, and its first and last pixel as keypoints."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 100, (ROWS, SIZE, SIZE, 3), np.uint8)
    mask, boxes = (
        np.zeros((ROWS, SIZE, SIZE), np.uint8),
        np.zeros((ROWS, 3, 5), np.float32),
    )
    points = np.zeros((ROWS, 3, 3), np.float32)
    boxes[..., 4] = points[..., 2] = -1
    for row in range(ROWS):
        x, y, width, height = (int(number) for number in rng.integers(6, 12, 4))
        mask[row, y : y + height, x : x + width] = 3
        image[row, y : y + height, x : x + width] = 255
        boxes[row, 0] = x, y, x + width, y + height, 3 + row
        points[row, :2] = (x, y, 0), (x + width - 1, y + height - 1, 1)
    fields: Any = {
        "image": image,
        LABEL: np.arange(ROWS),
        "mask": mask,
        "boxes": boxes,
        "keypoints": points,
    }
    at = MicroBatchId(split, 0, seed, 0)
    return MicroBatch(at, np.arange(ROWS), np.ones(ROWS, np.float32), fields)


def batch_of(split: Any = "train", seed: int = 0) -> Batch:
    (batch,) = on_device([host(split, seed)], CPU, lambda at: 77 + at.step)
    return batch


def pixels(seed: int = 0) -> torch.Tensor:
    return scaled(batch_of(seed=seed).image)


def made(module: Any, targets: Any = (), seed: int = 0, **config: Any) -> Batch:
    given = AugmentConfig(
        module=module, **{"mean": PLAIN.mean, "std": PLAIN.std, **config}
    )
    batches = IMAGES._replace(targets=tuple(targets))
    return DeviceAugment(given, CPU, batches=batches).of_batch(batch_of(seed=seed), 1.0)


def pipeline() -> nn.Sequential:
    return nn.Sequential(
        K.RandomHorizontalFlip(p=0.5),
        K.RandomResizedCrop((24, 24), scale=(0.4, 1.0)),
        K.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
        K.RandomErasing(p=0.25),
    )


class Faded(nn.Module):
    """By generators of all kinds, and one of its own; with a weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.tensor(0.1))
        self.generator = torch.Generator()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        drawn = (
            torch.rand(1, generator=self.generator) + np.random.rand() + random.random()
        )
        noise = torch.rand_like(image) * drawn.to(image.device)
        return (image * self.weight + self.shift * noise).clamp(0, 1)


OTHERS: dict[str, Any] = {
    "sequential": pipeline,
    "one operation": lambda: K.RandomAffine(20.0, p=0.7),
    "policy": lambda: K.ImageSequential(
        K.RandomVerticalFlip(), K.auto.RandAugment(n=2, m=9)
    ),
    "random order": lambda: K.ImageSequential(
        K.RandomInvert(), K.RandomSolarize(), random_apply=(1, 2)
    ),
    "jigsaw": lambda: nn.Sequential(K.RandomJigsaw((4, 4), p=0.8)),
    "torchvision": lambda: v2.Compose(
        [v2.RandomHorizontalFlip(), v2.ColorJitter(0.3, 0.3)]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_module_does_what_it_does_by_hand_under_the_seed(name: str) -> None:
    module = OTHERS[name]()
    found = made(module)
    batch = batch_of()
    torch.manual_seed(batch.seed)
    expected = module(pixels())
    assert torch.equal(found.image, expected) and found.image.dtype == torch.float32
    assert found.image.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(found.image, made(module, seed=1).image)


def test_all_generators_are_seeded_and_left_as_they_were() -> None:
    module = Faded()
    first = made(module).image
    torch.rand(3), np.random.rand(3), random.random()
    torch.rand(2, generator=module.generator)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    made(module, seed=5)
    assert torch.equal(first, made(module).image)
    assert (
        torch.equal(states[0], torch.get_rng_state())
        and (states[1] == np.random.get_state()[1]).all()
    )
    assert states[2] == random.getstate()


@pytest.mark.parametrize(
    "at_end",
    [K.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), v2.Normalize([0.5], [0.25])],
)
def test_a_normalize_at_the_end_is_that_of_validations_too(at_end: Any) -> None:
    module = nn.Sequential(pipeline(), at_end)
    mean, std = normalization_of(module) or ((), ())
    assert len(mean) == len(std) == 3
    augment = DeviceAugment(AugmentConfig(module=module), CPU)
    assert augment.config.mean == mean and augment.config.std == std
    found = augment.of_batch(batch_of("val"), 1.0).image
    torch.testing.assert_close(found, at_end(pixels()), rtol=1e-5, atol=1e-5)
    torch.manual_seed(77)
    assert torch.equal(augment.of_batch(batch_of(), 1.0).image, module(pixels()))
    with pytest.raises(
        ConfigError, match=r"ends with Normalize\(.*leave one of the two out"
    ):
        DeviceAugment(AugmentConfig(module=module, mean=(0.1, 0.1, 0.1)), CPU)


def test_a_normalize_by_chance_is_no_ending() -> None:
    numbers = [0.5] * 3, [0.25] * 3
    last = K.Normalize(*map(torch.tensor, numbers))
    for module in (
        K.ImageSequential(K.RandomHorizontalFlip(), last, random_apply=1),
        v2.RandomApply([v2.Normalize(*numbers)], p=0.5),
        v2.RandomChoice([v2.RandomVerticalFlip(), v2.Normalize(*numbers)]),
        v2.RandomOrder([v2.RandomVerticalFlip(), v2.Normalize(*numbers)]),
    ):
        assert normalization_of(module) is None
    whole = K.ImageSequential(K.RandomHorizontalFlip(), v2.Compose([last]))
    assert normalization_of(whole) == tuple(map(tuple, numbers))


def container(
    *operations: nn.Module, keys: Any = ("input", "mask", "bbox_xyxy", "keypoints")
) -> Any:
    return K.AugmentationSequential(*operations, data_keys=keys and list(keys))


@pytest.mark.parametrize("keys", [("input", "mask", "bbox_xyxy", "keypoints"), None])
def test_masks_boxes_and_keypoints_move_with_the_image(keys: Any) -> None:
    module = container(
        K.RandomHorizontalFlip(),
        K.RandomRotation90((1, 3), p=0.7),
        K.ColorJitter(0.1, 0.1, 0.1, 0.1),
        keys=keys,
    )
    for seed in range(5):
        found = made(module, JOINT, seed=seed)
        mask, boxes, points = (found.fields[name] for name in JOINT)
        assert mask.dtype == torch.uint8 and mask.shape == (ROWS, SIZE, SIZE)
        for row in range(ROWS):
            ys, xs = np.nonzero(mask[row].numpy() == 3)
            bright_y, bright_x = np.nonzero(found.image[row].amin(0).numpy() > 0.7)
            assert (ys == bright_y).all() and (xs == bright_x).all()
            x0, y0, x1, y1, label = boxes[row, 0].tolist()
            assert label == 3 + row
            assert [x0, y0, x1, y1] == pytest.approx(
                [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1], abs=1e-3
            )
            ends = points[row, :2, :2]
            assert ends.amin(0).tolist() == pytest.approx([x0, y0], abs=1e-3)
            assert ends.amax(0).tolist() == pytest.approx([x1 - 1, y1 - 1], abs=1e-3)
        assert (boxes[:, 1:] == torch.tensor([0.0, 0, 0, 0, -1])).all()
        assert (points[:, 2] == torch.tensor([0.0, 0, -1])).all()


def test_what_leaves_the_image_is_dropped_or_marked() -> None:
    found = made(container(K.CenterCrop(8)), JOINT)
    boxes, points = found.fields["boxes"], found.fields["keypoints"]
    real = boxes[..., 4] >= 0
    assert ((boxes[..., :4] >= 0) & (boxes[..., :4] <= 8)).all() and real.any()
    assert not (boxes[~real] != torch.tensor([0.0, 0, 0, 0, -1])).any()
    x, y, labels = points[:, :2].unbind(-1)
    inside = (x >= 0) & (y >= 0) & (x < 8) & (y < 8)
    expected = torch.tensor([0.0, 1]).expand(ROWS, 2)
    assert (
        torch.equal(labels, torch.where(inside, expected, -2 - expected))
        and not inside.all()
    )
    # back where they were
    points = kept_keypoints(points[..., :2] + 12, points[..., 2], SIZE, SIZE)
    assert torch.equal(points[:, :2], batch_of().fields["keypoints"][:, :2])


def test_a_mosaic_brings_the_boxes_of_four_images_with_their_labels() -> None:
    module = container(K.RandomMosaic((SIZE, SIZE), p=0.6), keys=("input", "bbox_xyxy"))
    num_seen = num_mosaics = 0
    for seed in range(6):
        found = made(module, ["boxes"], seed=seed)
        boxes = found.fields["boxes"]
        assert boxes.shape == (ROWS, 12, 5)
        own = batch_of(seed=seed).fields["boxes"][:, 0]
        for row in range(ROWS):
            kept = boxes[row][boxes[row, :, 4] >= 0]
            num_mosaics += len(kept) > 1
            for x0, y0, x1, y1, label in kept.tolist():
                if x0 > 1 and x1 < SIZE - 1 and y0 > 1 and y1 < SIZE - 1:
                    # whole: of its own image's size
                    left, top, right, bottom = own[int(label) - 3, :4].tolist()
                    assert x1 - x0 == pytest.approx(right - left, abs=1e-3)
                    assert y1 - y0 == pytest.approx(bottom - top, abs=1e-3)
                    rows, columns = (
                        slice(round(y0), round(y1)),
                        slice(round(x0), round(x1)),
                    )
                    assert found.image[row, :, rows, columns].min() > 0.9
                    num_seen += 1
    assert num_seen > 10 and num_mosaics > 5


def test_a_transplantation_moves_an_object_and_its_mask() -> None:
    module = container(
        K.RandomTransplantation(excluded_labels=[0], p=1.0), keys=("input", "mask")
    )
    found, batch = made(module, ["mask"]), batch_of()
    bright = found.image.amin(1) > 0.9
    assert torch.equal(bright, found.fields["mask"] == 3)
    assert bright.sum() > (batch.fields["mask"] == 3).sum()
    torch.manual_seed(batch.seed)
    image, mask = module(pixels(), batch.fields["mask"])
    assert torch.equal(found.image, image) and torch.equal(
        found.fields["mask"], mask.view_as(found.fields["mask"])
    )


def mixers() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cutmix = K.RandomCutMixV2(p=0.8), K.RandomCutMixV2(use_correct_lambda=True)
    return {
        "mixup": K.RandomMixUpV2(p=0.8),
        "cutmix": cutmix[0],
        "right": cutmix[1],
        "patch": K.PatchMix(patch_size=8),
    }


@pytest.mark.parametrize("name", mixers())
def test_the_mixing_operations_of_kornia_mix_the_targets_as_the_pixels(
    name: str,
) -> None:
    """In images of one value each, the mean of a row tells the shares of the two that it was made of."""
    mixer = mixers()[name]
    augment = DeviceAugment(
        AugmentConfig(PLAIN.mean, PLAIN.std, module=nn.Sequential(mixer)), CPU
    )
    assert augment.mixes
    values = torch.tensor([10, 250, 60, 200, 120, 30], dtype=torch.uint8)
    target, num_mixed = torch.arange(6), 0
    for seed in range(12):
        image = values.view(6, 1, 1, 1).expand(6, 3, 24, 20)
        found, mix = augment(image, target, np.ones(6, bool), seed=seed)
        assert (
            mix is not None
            and mix.is_cutmix == (name != "mixup")
            and isinstance(mix.lam, torch.Tensor)
        )
        shares = soft_targets(target, mix, 6)
        torch.testing.assert_close(
            found.mean((1, 2, 3)), shares @ (values / 255), rtol=1e-4, atol=1e-4
        )
        torch.manual_seed(seed)
        assert torch.equal(found, mixer(scaled(image), data_keys=["input"]))
        num_mixed += int((shares.amax(1) < 1).sum())
        logits = torch.randn(6, 6)
        losses = mixed_cross_entropy(logits, target, mix)
        torch.testing.assert_close(
            losses, nn.functional.cross_entropy(logits, shares, reduction="none")
        )
    assert num_mixed > 20
    counts = np.array([True, False, True, True, True, False])
    found, mix = augment(image, target, counts, seed=3)
    assert mix is not None and set(mix.target[counts].tolist()) <= {0, 2, 3, 4}
    assert torch.equal(
        found[~torch.from_numpy(counts)], scaled(image)[~torch.from_numpy(counts)]
    )


def mixed_by_hand(images: torch.Tensor, target: torch.Tensor) -> Any:
    """MixUp as training scripts write it."""
    lam = np.random.beta(1.0, 1.0)
    order = torch.randperm(len(images))
    soft = nn.functional.one_hot(target, 6).float()
    mixed = lam * images + (1 - lam) * images[order]
    return mixed, lam * soft + (1 - lam) * soft[order]


REPLACING: dict[str, Any] = {
    "MixUp": v2.MixUp(num_classes=6),
    "CutMix": v2.CutMix(num_classes=6),
    "either": v2.RandomChoice([v2.MixUp(num_classes=6), v2.CutMix(num_classes=6)]),
    "a function": mixed_by_hand,
    "behind Kornia's": nn.Sequential(
        K.RandomHorizontalFlip(p=1.0), v2.CutMix(num_classes=6)
    ),
}


@pytest.mark.parametrize("name", REPLACING)
def test_a_step_of_images_and_targets_replaces_both_as_by_hand(name: str) -> None:
    module = REPLACING[name]
    step = module[-1] if isinstance(module, nn.Sequential) else module
    for seed in range(6):
        batch = batch_of(seed=seed)
        found = made(module, seed=seed)
        given = pixels(seed)
        with all_seeded(batch.seed):
            torch.manual_seed(batch.seed)
            if step is not module:
                given = module[0](given)
            image, target = step(given, batch.target)
        torch.testing.assert_close(found.image, image, atol=1e-6, rtol=1e-6)
        assert torch.equal(found.target, target) and found.mix is None
    assert torch.equal(made(module, seed=3).target, made(module, seed=3).target)


@dataclass
class Darker:
    """A callable without a hash, as a dataclass is."""

    factor: float

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return images * self.factor


def test_a_step_needs_no_hash() -> None:
    torch.testing.assert_close(made(Darker(0.5)).image, pixels() * 0.5)


def test_a_step_of_images_and_targets_mixes_no_padding_into_samples() -> None:
    augment = DeviceAugment(
        AugmentConfig(module=v2.MixUp(num_classes=6), mean=PLAIN.mean, std=PLAIN.std),
        CPU,
    )
    whole = host()
    weight = np.array([1, 1, 1, 1, 0, 0], np.float32)
    index = np.where(weight > 0, whole.index, -1)
    padded = replace(whole, index=index, weight=weight)
    (batch,) = on_device([padded], CPU, lambda at: 77)
    found = augment.of_batch(batch, 1.0)
    with all_seeded(batch.seed):
        torch.manual_seed(batch.seed)
        image, target = v2.MixUp(num_classes=6)(pixels()[:4], batch.target[:4])
    torch.testing.assert_close(found.image[:4], image, atol=1e-6, rtol=1e-6)
    assert torch.equal(found.target[:4], target)
    assert not found.image[4:].any() and not found.target[4:].any()


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(image)


def test_a_module_that_remembers_is_refused_until_it_is_in_eval() -> None:
    with pytest.raises(
        ConfigError, match=r"Remembering changes its own buffer 'norm\..*module\.eval"
    ):
        made(Remembering())
    module = Remembering().eval()
    torch.testing.assert_close(made(module).image, module(pixels()).detach())
    assert not module.training


FLIP, JITTER = K.RandomHorizontalFlip(), K.ColorJitter(0.1, 0.1, 0.1, 0.1)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "geometry alone": (
        nn.Sequential(JITTER, FLIP),
        ["mask"],
        r"leaves 'mask' behind.*data_keys=\['input', 'mask'\]",
    ),
    "torchvision's geometry": (
        v2.Compose([v2.ColorJitter(0.1), v2.RandomApply([v2.RandomRotation(9)])]),
        ["mask"],
        "torchvision's RandomRotation moves or erases pixels, and leaves 'mask' behind",
    ),
    "torchvision's erasing": (
        nn.Sequential(v2.RandomErasing()),
        ["mask"],
        "torchvision's RandomErasing",
    ),
    "a target without a key": (
        container(FLIP, keys=("input", "mask")),
        JOINT,
        "leaves 'boxes' behind",
    ),
    "a target that Kornia has no key for": (
        nn.Sequential(JITTER, FLIP),
        ["depth"],
        "Kornia moves no depth",
    ),
    "a key without a target": (
        container(FLIP),
        ["mask", "boxes"],
        "set transform.targets.keypoints",
    ),
    "a key twice": (
        container(FLIP, keys=("input", "mask", "mask")),
        ["mask"],
        "name a target twice",
    ),
    "clips": (K.VideoSequential(FLIP), [], "takes clips"),
    "three dimensions": (nn.Sequential(K.RandomHorizontalFlip3D()), [], "takes clips"),
    "mixing of masks": (
        nn.Sequential(K.RandomMixUpV2()),
        ["mask"],
        "mixes images, not masks",
    ),
    "mixing inside": (
        container(FLIP, K.RandomMixUpV2(), keys=("input",)),
        [],
        "make it a separate step, as nn.Sequential",
    ),
    "mixing twice": (nn.Sequential(K.RandomMixUpV2(), K.PatchMix()), [], "mixes twice"),
    "a mosaic of classes": (nn.Sequential(K.RandomMosaic()), [], "needs boxes"),
    "a mosaic of masks": (
        container(K.RandomMosaic(), keys=("input", "mask")),
        ["mask"],
        "RandomMosaic moves no mask",
    ),
    "a transplantation alone": (
        nn.Sequential(K.RandomTransplantation()),
        [],
        "needs a mask",
    ),
    "a warp of boxes": (
        container(K.RandomFisheye(*[torch.tensor([-0.1, 0.1])] * 3)),
        JOINT,
        "moves no",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_leave_a_target_behind_is_named(name: str) -> None:
    module, targets, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        DeviceAugment(
            AugmentConfig(module=module),
            CPU,
            batches=IMAGES._replace(targets=tuple(targets)),
        )


def test_a_step_of_targets_returns_both_and_is_the_only_one_that_mixes() -> None:
    with pytest.raises(ConfigError, match=r"returned \(6, 3, 32, 32\): it must return"):
        made(lambda images, target: images)
    for broken in (v2.MixUp(), nn.Sequential(v2.MixUp())):
        with pytest.raises(
            ConfigError, match=r"MixUp fails .*num_classes must be pass"
        ):
            made(broken)
    mixing = v2.CutMix(num_classes=6)
    for module, targets in (
        (mixing, ["boxes"]),
        (nn.Sequential(K.RandomMixUpV2(), mixing), []),
    ):
        with pytest.raises(ConfigError, match="CutMix mixes images, and another step"):
            made(module, targets)
    erasing = made(v2.RandomErasing(p=1))
    assert torch.equal(erasing.target, batch_of().target)


def test_color_alone_goes_with_targets_and_a_mosaic_with_none() -> None:
    found = made(nn.Sequential(JITTER, v2.RandomGrayscale()), JOINT)
    assert torch.equal(found.fields["mask"], batch_of().fields["mask"])
    config = AugmentConfig(module=nn.Sequential(K.RandomMosaic((SIZE, SIZE))))
    DeviceAugment(config, CPU, batches=IMAGES._replace(has_target=False))


def test_what_kornia_refuses_is_named_with_its_step() -> None:
    with pytest.raises(
        ConfigError,
        match=r"RandomJigsaw fails on image, label of \(6, 3, 32, 32\): Run",
    ):
        made(nn.Sequential(K.RandomJigsaw((5, 5), p=1.0)))
    with pytest.raises(
        ConfigError, match=r"PatchMix fails on .* ValueError: Expect `patch_size`"
    ):
        made(nn.Sequential(K.PatchMix(patch_size=64)))


def make() -> nn.Module:
    return nn.Sequential(K.RandomInvert(p=1.0))


inverted = make()


@pytest.mark.parametrize("name", ["make", "inverted", "Faded"])
def test_a_name_is_that_of_a_module_its_class_or_a_function_that_makes_it(
    name: str,
) -> None:
    found = made(f"{__name__}:{name}").image
    if name != "Faded":
        assert torch.equal(found, 1 - pixels())


# Gradients


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_differentiable_augmentation_has_the_gradient_of_its_pixels(
    split: Any,
) -> None:
    config = AugmentConfig(module=pipeline(), mixup_alpha=0.4, differentiable=True)
    augment, layer = DeviceAugment(config, CPU), nn.Linear(3, 4)
    batch = augment.of_batch(batch_of(split), 1.0)
    assert batch.pixels is not None and batch.augment is not None
    assert torch.equal(batch.pixels, pixels()) and batch.pixels.is_leaf
    assert torch.equal(batch.augment(batch.pixels), batch.image)
    loss = mixed_cross_entropy(
        layer(batch.image.mean((2, 3))), batch.target % 4, None
    ).mean()
    (gradient,) = torch.autograd.grad(loss, batch.pixels)
    assert gradient.shape == batch.pixels.shape and (gradient != 0).float().mean() > 0.2
    plain = DeviceAugment(
        AugmentConfig(module=pipeline(), mixup_alpha=0.4), CPU
    ).of_batch(batch_of(split), 1.0)
    torch.testing.assert_close(plain.image, batch.image.detach())
    assert plain.pixels is None


def test_a_module_learns_only_where_the_augmentation_is_differentiable() -> None:
    module = Faded()
    assert not made(module).image.requires_grad
    made(module, differentiable=True).image.sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        assert not made(module, differentiable=True).image.requires_grad
    with pytest.raises(ConfigError, match=r"augment\.differentiable is for images"):
        DeviceAugment(AugmentConfig(differentiable=True), CPU, batches=VIEWS)
