"""Pipelines as projects write them, copied from their sources in short, with sides of 32 pixels.

script       what the project's loader hands over: PIL (ImageFolder), array (arrays in memory), tensor (read_image)
is_random    whether two calls may differ
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import albumentations as A  # noqa: N812
import numpy as np
import torch
from albumentations.pytorch import ToTensorV2
from PIL import Image, ImageFilter, ImageOps
from torch import nn
from torchvision import models
from torchvision import transforms as T  # noqa: N812
from torchvision.transforms import functional as F  # noqa: N812
from torchvision.transforms import v2

SIDE = 32
BICUBIC = T.InterpolationMode.BICUBIC
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CLIP_NUMBERS = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)


class Written(NamedTuple):
    """A project's pipeline."""

    make: Callable[[], Any]
    is_random: bool = False
    script: str = "pil"


# timm


class MaybeToTensor(T.ToTensor):
    def __call__(self, pic: Any) -> torch.Tensor:
        return pic if isinstance(pic, torch.Tensor) else F.to_tensor(pic)


class ToNumpy:
    def __call__(self, pil_img: Any) -> np.ndarray:
        return np.rollaxis(np.array(pil_img, dtype=np.uint8), 2)


class ToUnscaledTensor:  # timm's ToTensor of its prefetcher
    def __call__(self, pil_img: Any) -> torch.Tensor:
        return torch.from_numpy(ToNumpy()(pil_img).copy()).to(torch.float32)


class RandomResizedCropAndInterpolation:
    def __init__(self, size: int, scale: Any = (0.08, 1.0), ratio: Any = (0.75, 1.33)):
        self.size, self.scale, self.ratio = (size, size), scale, ratio

    def __call__(self, img: Any) -> Any:
        area = img.size[0] * img.size[1] * random.uniform(*self.scale)
        aspect = math.exp(random.uniform(*map(math.log, self.ratio)))
        width = min(img.size[0], round(math.sqrt(area * aspect)))
        height = min(img.size[1], round(math.sqrt(area / aspect)))
        top = random.randint(0, img.size[1] - height)
        left = random.randint(0, img.size[0] - width)
        mode = random.choice([T.InterpolationMode.BILINEAR, BICUBIC])
        return F.resized_crop(img, top, left, height, width, list(self.size), mode)


class ResizeKeepRatio:
    def __init__(self, size: int, longest: float = 0.0):
        self.size, self.longest = size, longest

    def __call__(self, img: Any) -> Any:
        sides = img.size[::-1]
        ratio = [side / self.size for side in sides]
        scale = max(ratio) * self.longest + min(ratio) * (1 - self.longest)
        return F.resize(img, [round(side / scale) for side in sides], BICUBIC)


class CenterCropOrPad:
    def __init__(self, size: int):
        self.size = size

    def forward(self, img: Any) -> Any:
        pads = [max(0, self.size - side) // 2 for side in img.size]
        return F.center_crop(F.pad(img, pads), [self.size, self.size])

    __call__ = forward


class RandAugmentOps:
    def __init__(self, num: int):
        self.num = num

    def __call__(self, img: Any) -> Any:
        ops: list[Any] = [
            ImageOps.autocontrast,
            ImageOps.equalize,
            lambda img: ImageOps.posterize(img, 4),
            lambda img: img.rotate(random.uniform(-30, 30), fillcolor=(124, 116, 104)),
            lambda img: img.transform(img.size, Image.AFFINE, (1, 0.2, 0, 0, 1, 0)),
        ]
        for op in np.random.choice(len(ops), self.num):
            img = ops[op](img)
        return img


class RandomErasing:
    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        top, left = random.randint(0, SIDE - 9), random.randint(0, SIDE - 9)
        batch[:, top : top + 8, left : left + 8] = torch.empty((3, 8, 8)).normal_()
        return batch


def timm_train(*more: Any) -> Any:
    first = [RandomResizedCropAndInterpolation(SIDE), T.RandomHorizontalFlip(0.5)]
    return T.Compose([*first, *more])


def timm_eval(*last: Any, resize: Any = None) -> Any:
    first = [resize or T.Resize(36, BICUBIC), T.CenterCrop(SIDE)]
    return T.Compose([*first, *last])


# OpenCLIP, CLIP, MoCo, DINO and their kin


def _convert_to_rgb(image: Any) -> Any:
    return image.convert("RGB")


class ColorJitter:  # OpenCLIP's
    def __init__(self) -> None:
        self.transf = T.RandomApply([T.ColorJitter(0.32, 0.32, 0.32, 0.08)], p=0.8)

    def __call__(self, img: Any) -> Any:
        return self.transf(img)


class GaussianBlur:  # MoCo's
    def __init__(self, sigma: Any):
        self.sigma = sigma

    def __call__(self, x: Any) -> Any:
        sigma = random.uniform(self.sigma[0], self.sigma[1])
        return x.filter(ImageFilter.GaussianBlur(radius=sigma))


class Solarization:
    def __init__(self, p: float):
        self.p = p

    def __call__(self, img: Any) -> Any:
        return ImageOps.solarize(img) if random.random() < self.p else img


class GaussianBlurByTorch:  # of a SimCLR in PyTorch
    def __init__(self) -> None:
        self.blur = nn.Conv2d(3, 3, 3, padding=1, bias=False, groups=3)

    def __call__(self, img: Any) -> Any:
        weight = torch.from_numpy(np.random.dirichlet(np.ones(9), 3))
        self.blur.weight.data.copy_(weight.view(3, 1, 3, 3))
        with torch.no_grad():
            return T.ToPILImage()(self.blur(T.ToTensor()(img)[None])[0].clamp(0, 1))


def ssl(*colors: Any) -> Any:
    crop = T.RandomResizedCrop(SIDE, scale=(0.2, 1.0))
    last = [T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(*IMAGENET)]
    return T.Compose([crop, *colors, *last])


def jitter(p: float = 0.8) -> Any:
    return T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=p)


def blur(p: float) -> Any:
    return T.RandomApply([GaussianBlur([0.1, 2.0])], p=p)


class DINOCrop:  # one of DataAugmentationDINO's
    def __init__(self) -> None:
        self.crop = ssl(jitter(), T.RandomGrayscale(0.2), blur(0.1), Solarization(0.2))

    def __call__(self, image: Any) -> Any:
        return self.crop(image)


# torchvision's references, generative models, others


class ClassificationPreset:
    def __init__(self, train: bool, backend: str = "pil"):
        steps: list[Any] = [T.PILToTensor()] if backend == "tensor" else []
        if train:
            steps += [T.RandomResizedCrop(SIDE, antialias=True), T.AutoAugment()]
        else:
            steps += [T.Resize(36, antialias=True), T.CenterCrop(SIDE)]
        if backend == "pil":
            steps += [T.PILToTensor()]
        steps += [T.ConvertImageDtype(torch.float), T.Normalize(*IMAGENET)]
        self.transforms = T.Compose(steps)

    def __call__(self, img: Any) -> Any:
        return self.transforms(img)


def center_crop_arr(pil_image: Any, image_size: int) -> Any:  # guided diffusion, DiT
    scale = image_size / min(*pil_image.size)
    size = [round(side * scale) for side in pil_image.size]
    arr = np.array(pil_image.resize(tuple(size), resample=Image.BICUBIC))
    y, x = ((side - image_size) // 2 for side in arr.shape[:2])
    return Image.fromarray(arr[y : y + image_size, x : x + image_size])


def make_power_2(img: Any, base: int) -> Any:  # pix2pix
    size = [round(side / base) * base for side in img.size]
    return img.resize(tuple(size), Image.BICUBIC)


class SquarePad:
    def __call__(self, image: Any) -> Any:
        width, height = image.size
        side = max(width, height)
        pads = [(side - width) // 2, (side - height) // 2]
        return F.pad(image, pads, 0, "constant")


def root_of(image: np.ndarray, **_: Any) -> np.ndarray:
    return np.sqrt(image / np.float32(255))


def v1(*steps: Any) -> Callable[[], Any]:
    return lambda: T.Compose(list(steps))


def of_v2(*steps: Any) -> Callable[[], Any]:
    return lambda: v2.Compose(list(steps))


def of_a(*steps: Any) -> Callable[[], Any]:
    return lambda: A.Compose(list(steps))


NORM = T.Normalize(*IMAGENET)
HALF = T.Normalize([0.5], [0.5])
MNIST = T.Normalize((0.1307,), (0.3081,))
FLOAT = v2.ToDtype(torch.float32, scale=True)
CLIP = [_convert_to_rgb, T.ToTensor(), T.Normalize(*CLIP_NUMBERS)]

WRITTEN: dict[str, Written] = {
    "timm train": Written(lambda: timm_train(MaybeToTensor(), NORM), True),
    "timm train, rand-m9": Written(
        lambda: timm_train(RandAugmentOps(2), MaybeToTensor(), NORM, RandomErasing()),
        True,
    ),
    "timm train, color jitter": Written(
        lambda: timm_train(T.ColorJitter(0.4, 0.4, 0.4), T.ToTensor(), NORM), True
    ),
    "timm train, prefetcher": Written(lambda: timm_train(ToNumpy()), True),
    "timm eval": Written(lambda: timm_eval(MaybeToTensor(), NORM)),
    "timm eval, ToTensor": Written(lambda: timm_eval(T.ToTensor(), NORM)),
    "timm eval, prefetcher": Written(lambda: timm_eval(ToNumpy())),
    "timm eval, border": Written(
        lambda: timm_eval(MaybeToTensor(), NORM, resize=ResizeKeepRatio(36, 1.0))
    ),
    "timm eval, unscaled": Written(lambda: timm_eval(ToUnscaledTensor())),
    "timm eval, squash": Written(
        lambda: timm_eval(MaybeToTensor(), NORM, resize=T.Resize((32, 32), BICUBIC))
    ),
    "DeiT, three augment": Written(
        lambda: timm_train(
            T.RandomChoice([T.Grayscale(3), Solarization(1.0), GaussianBlur([0.1, 2])]),
            T.ToTensor(),
            NORM,
        ),
        True,
    ),
    "CLIP": Written(v1(T.Resize(SIDE, BICUBIC), T.CenterCrop(SIDE), *CLIP)),
    "OpenCLIP eval": Written(
        v1(
            T.Resize(SIDE, BICUBIC),
            T.CenterCrop(SIDE),
            _convert_to_rgb,
            MaybeToTensor(),
            T.Normalize(*CLIP_NUMBERS),
        )
    ),
    "OpenCLIP eval, longest": Written(
        v1(ResizeKeepRatio(SIDE, 1.0), CenterCropOrPad(SIDE), *CLIP)
    ),
    "OpenCLIP train": Written(
        v1(T.RandomResizedCrop(SIDE, (0.9, 1.0), interpolation=BICUBIC), *CLIP), True
    ),
    "OpenCLIP train, aug_cfg": Written(
        v1(T.RandomResizedCrop(SIDE), _convert_to_rgb, ColorJitter(), *CLIP[1:]), True
    ),
    "MoCo v1": Written(
        lambda: ssl(T.RandomGrayscale(0.2), T.ColorJitter(0.4, 0.4, 0.4, 0.4)), True
    ),
    "MoCo v2": Written(lambda: ssl(jitter(), T.RandomGrayscale(0.2), blur(0.5)), True),
    "BYOL, BarlowTwins": Written(
        lambda: ssl(jitter(), T.RandomGrayscale(0.2), blur(1.0), Solarization(0.2)),
        True,
    ),
    "SimCLR, blur by torch": Written(
        lambda: ssl(jitter(), T.RandomGrayscale(0.2), GaussianBlurByTorch()), True
    ),
    "DINO, a crop's class": Written(DINOCrop, True),
    "MAE pretraining": Written(
        v1(
            T.RandomResizedCrop(SIDE, scale=(0.2, 1.0), interpolation=BICUBIC),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            NORM,
        ),
        True,
    ),
    "ImageNet example, train": Written(
        v1(T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.ToTensor(), NORM),
        True,
    ),
    "ImageNet example, val": Written(
        v1(T.Resize(36), T.CenterCrop(SIDE), T.ToTensor(), NORM)
    ),
    "MNIST example": Written(v1(T.ToTensor(), MNIST)),
    "MNIST, Grayscale": Written(v1(T.Grayscale(), T.ToTensor(), MNIST)),
    "MNIST, convert L": Written(
        v1(lambda img: img.convert("L"), T.Resize(28), T.ToTensor(), MNIST)
    ),
    "gray to three channels": Written(
        v1(
            T.Grayscale(1),
            T.ToTensor(),
            T.Lambda(lambda x: x.repeat(3, 1, 1)),
            T.Normalize(*IMAGENET),
        )
    ),
    "CIFAR, train": Written(
        v1(T.RandomCrop(SIDE, padding=4), T.RandomHorizontalFlip(), T.ToTensor(), NORM),
        True,
    ),
    "CIFAR of arrays": Written(
        v1(T.ToPILImage(), T.Resize(SIDE), T.ToTensor(), NORM), script="array"
    ),
    "read_image": Written(
        v1(T.Resize(36), T.CenterCrop(SIDE), T.ConvertImageDtype(torch.float32), NORM),
        script="tensor",
    ),
    "read_image, Sequential": Written(
        lambda: nn.Sequential(
            T.CenterCrop(SIDE), T.ConvertImageDtype(torch.float), NORM
        ),
        script="tensor",
    ),
    "tensors by hand": Written(
        v1(T.Lambda(lambda x: x.float() / 255), T.CenterCrop(SIDE)), script="tensor"
    ),
    "references, train": Written(lambda: ClassificationPreset(True), True),
    "references, eval": Written(lambda: ClassificationPreset(False)),
    "references, tensor": Written(lambda: ClassificationPreset(False, "tensor")),
    "weights.transforms()": Written(
        lambda: models.ResNet50_Weights.IMAGENET1K_V2.transforms(
            crop_size=SIDE, resize_size=36
        )
    ),
    "TrivialAugmentWide": Written(
        v1(T.TrivialAugmentWide(), T.Resize((SIDE, SIDE)), T.ToTensor()), True
    ),
    "AugMix": Written(v1(T.AugMix(), T.CenterCrop(SIDE), T.ToTensor(), NORM), True),
    "diffusers": Written(v1(T.Resize(SIDE), T.CenterCrop(SIDE), T.ToTensor(), HALF)),
    "DDPM, lucidrains": Written(
        v1(
            T.Lambda(partial(lambda mode, img: img.convert(mode), "RGB")),
            T.Resize(SIDE),
            nn.Identity(),
            T.CenterCrop(SIDE),
            T.ToTensor(),
        )
    ),
    "DiT": Written(
        v1(T.Lambda(lambda img: center_crop_arr(img, SIDE)), T.ToTensor(), HALF)
    ),
    "pix2pix": Written(
        v1(T.Lambda(lambda img: make_power_2(img, 4)), T.ToTensor(), HALF)
    ),
    "square pad": Written(v1(SquarePad(), T.Resize(SIDE), T.ToTensor(), NORM)),
    "unsharp, posterize": Written(
        v1(
            lambda img: ImageOps.posterize(img.filter(ImageFilter.UnsharpMask()), 5),
            T.CenterCrop(SIDE),
            T.ToTensor(),
        )
    ),
    "arrays at the end": Written(v1(T.Resize(SIDE), T.CenterCrop(SIDE), np.array)),
    "a function of PIL": Written(
        lambda: lambda img: F.to_tensor(img.resize((SIDE, SIDE), Image.LANCZOS))
    ),
    "a function of arrays": Written(
        lambda: lambda image: image[4:36, 4:36, ::-1].copy(), script="array"
    ),
    "v2 eval": Written(
        of_v2(
            v2.ToImage(),
            v2.Resize(36),
            v2.CenterCrop(SIDE),
            FLOAT,
            v2.Normalize(*IMAGENET),
        ),
        script="tensor",
    ),
    "v2 train": Written(
        of_v2(v2.RandomResizedCrop(SIDE), v2.RandAugment(), v2.ToImage(), FLOAT),
        True,
        "tensor",
    ),
    "v2 of PIL": Written(
        of_v2(
            v2.ToPILImage(),
            v2.Resize(36),
            lambda img: img.filter(ImageFilter.GaussianBlur(1)),
            v2.CenterCrop(SIDE),
            v2.PILToTensor(),
            FLOAT,
            v2.Normalize(*IMAGENET),
        ),
        script="tensor",
    ),
    "v2 with a step for PIL": Written(
        of_v2(
            lambda img: img.convert("L").convert("RGB"),
            v2.Resize(36),
            v2.ToImage(),
            FLOAT,
        )
    ),
    "v2, Grayscale": Written(
        of_v2(v2.Grayscale(), FLOAT, v2.Normalize([0.5], [0.5])), script="tensor"
    ),
    "Albumentations eval": Written(
        of_a(A.SmallestMaxSize(36), A.CenterCrop(32, 32), A.Normalize(), ToTensorV2()),
        script="array",
    ),
    "Albumentations train": Written(
        of_a(
            A.RandomResizedCrop((32, 32)),
            A.OneOf([A.MotionBlur(p=1), A.GaussNoise(p=1)], p=0.5),
            A.CoarseDropout(p=0.5),
            A.Normalize(),
            ToTensorV2(),
        ),
        True,
        "array",
    ),
    "Albumentations, gray": Written(
        of_a(A.ToGray(1, p=1), A.Normalize((0.5,), (0.5,)), ToTensorV2()),
        script="array",
    ),
    "Albumentations, own floats": Written(
        of_a(
            A.CenterCrop(32, 32),
            A.Lambda(image=root_of, name="root"),
            A.Normalize((0.5,) * 3, (0.5,) * 3, max_pixel_value=1.0),
            ToTensorV2(),
        ),
        script="array",
    ),
}


def by_script(written: Written, pixels: np.ndarray) -> torch.Tensor:
    """What the project's own loop makes of an image, uint8 (H, W, 3): float or uint8 (C, H, W)."""
    pipeline = written.make()
    if written.script == "pil":
        made = pipeline(Image.fromarray(pixels))
    elif written.script == "tensor":
        made = pipeline(torch.from_numpy(pixels).permute(2, 0, 1))
    elif isinstance(pipeline, A.Compose):
        made = pipeline(image=pixels)["image"]
    else:
        made = pipeline(pixels)
    if isinstance(made, np.ndarray):
        made = torch.from_numpy(made.copy())
        made = made.permute(2, 0, 1) if made.shape[-1] == 3 else made
    return torch.as_tensor(made)
