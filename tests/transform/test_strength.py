"""transform.strength: weaker chances and magnitudes of the steps that raypipe makes itself."""

from __future__ import annotations

from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import torch

import raypipe
from raypipe.config import PlanConfig, PoolConfig, TransformConfig
from raypipe.errors import ConfigError
from raypipe.kernel import COLOR_STEPS, GEOMETRY_STEPS, Program, native_step
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.inline import inline_batches
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.streaming.spec import StreamSpec
from raypipe.transform.decode.rgb import decode
from raypipe.transform.encoded import MAP
from raypipe.transform.presets import build_transform
from raypipe.transform.sample_transform import SampleTransform

IMAGE = cv2.GaussianBlur(
    np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8), (5, 5), 0
)
KEYS = np.random.default_rng(1).integers(0, 2**63, (64, 2)).astype(np.uint64)
RANDOM: dict[str, dict[str, Any]] = {
    "RandomResizedCrop": {"size": (24, 24)},
    "RandomCrop": {"height": 24, "width": 24},
    "Affine": {
        "rotate": (-30, 30),
        "scale": (0.5, 1.5),
        "translate_px": (-9, 9),
        "shear": (-9, 9),
        "p": 1,
    },
    "ColorJitter": {"p": 1},
    "ToGray": {},
    "Solarize": {"threshold_range": (0.2, 0.5)},
    "Posterize": {"num_bits": (1, 3)},
    "GaussianBlur": {"p": 1},
    "MotionBlur": {"blur_limit": (3, 15)},
    "CoarseDropout": {"hole_height_range": (8, 12), "hole_width_range": (8, 12)},
    "HorizontalFlip": {},
    "D4": {"p": 1},
}
FIXED: dict[str, dict[str, Any]] = {
    "CenterCrop": {"height": 24, "width": 24},
    "Resize": {"height": 24, "width": 24},
    "SmallestMaxSize": {"max_size": 24},
    "Pad": {"padding": 4},
}


def made(program: Program, strength: float) -> np.ndarray:
    """The image under many keys; as large as the largest, black around."""
    transform = SampleTransform(program)
    transform.weaken(strength)
    return np.stack(
        [transform(IMAGE.copy(), tuple(map(int, key))) for key in KEYS]
    ).astype(int)


def test_all_steps_are_in_one_of_the_tables() -> None:
    named = {kind.__name__ for kind in (*GEOMETRY_STEPS, *COLOR_STEPS)}
    assert named <= {*RANDOM, *FIXED}


@pytest.mark.parametrize("name", RANDOM)
def test_a_weaker_step_changes_less_and_one_of_no_strength_nothing(name: str) -> None:
    step = native_step(name, RANDOM[name])
    assert step is not None
    ends = native_step("CenterCrop", {"height": 24, "width": 24})
    assert ends is not None
    program = Program([step] if name.startswith("Random") else [ends, step])
    assert program.size == (24, 24)
    at_zero, at_half, whole = (made(program, strength) for strength in (0, 0.5, 1))
    center = made(Program([ends]), 1)
    if name == "RandomResizedCrop":  # of the largest area in the ratio
        center[:] = cv2.resize(IMAGE[:, 10:50], (24, 24))
    assert np.abs(at_zero - center).mean() < 1 and np.array_equal(
        at_zero[:1].repeat(64, 0), at_zero
    )
    assert 0 < np.abs(at_half - center).mean() < np.abs(whole - center).mean()
    assert np.array_equal(made(program.at(1), 1), whole)


@pytest.mark.parametrize("name", FIXED)
def test_a_step_without_chance_stays(name: str) -> None:
    step = native_step(name, FIXED[name])
    assert step is not None and step.weaker(0.3) == step


JPEG = cv2.imencode(".jpg", IMAGE)[1].tobytes()
STORE = MemoryStore([JPEG] * 32, [0] * 32)


def stream(
    strength: Any, train: Any = "light", epochs: int = 2, **transform: Any
) -> StreamSpec:
    return raypipe.open_stream(
        STORE,
        STORE,
        plan=PlanConfig(epochs=epochs, micro_batch_size=4, global_batch_size=8),
        transform=TransformConfig(size=24, strength=strength, **transform),
        train_transform=train,
        val_transform="center",
        pool=PoolConfig(engine="inline"),
    )


def digests(spec: StreamSpec, step: int = 0, world_size: int = 1) -> dict[str, bytes]:
    start = spec.plan.cursor_at(step)
    ranks = [
        inline_batches(spec, start, rank, world_size) for rank in range(world_size)
    ]
    return {str(batch.position): batch_hash(batch) for rank in ranks for batch in rank}


def test_the_strength_follows_the_run_whatever_the_workers_and_the_start() -> None:
    rising, whole = stream([1.0, 1.0, 0.0], "heavy"), stream(1.0, "heavy")
    found = digests(rising)
    assert digests(rising, world_size=2) == found
    assert digests(rising, 5).items() <= found.items(), "and a resume has the same"
    validation = [name for name in found if name.startswith("val")]
    assert validation and all(
        found[name] == digests(whole)[name] for name in validation
    )
    first = next(inline_batches(rising, rising.plan.start()))["image"].astype(int)
    largest = cv2.resize(decode(JPEG)[:, 10:50], (24, 24))
    assert np.abs(first - largest).mean() < 1, "the first step is of strength 0"
    # A block may hold micro-batches of several steps.
    places = [*rising.plan.micro_batches(rising.plan.start())][:6]
    batches, _, _ = MicroBatchMaker(rising).block(places)
    assert [batch_hash(batch) for batch in batches] == [found[str(at)] for at in places]


def test_images_that_the_device_decodes_have_a_strength() -> None:
    """Their maps are drawn anew for each step; a strength of 0 leaves one box and no flip."""
    none, whole = (stream(strength, decode="device") for strength in (0.0, 1.0))
    found, others = (
        next(inline_batches(spec, spec.plan.start()))[MAP] for spec in (none, whole)
    )
    assert (found == found[:1]).all() and not (others == others[:1]).all()


def test_the_strength_is_in_the_fingerprint() -> None:
    plain, half, ramp = (
        stream(strength).plan.fingerprint for strength in (1.0, 0.5, [0.5, 1.0, 0.0])
    )
    assert len({plain, half, ramp}) == 3
    assert stream(0.5, epochs=3).plan.fingerprint == half, (
        "a number does not depend on the run's length"
    )
    assert stream([0.5, 1.0, 0.0], epochs=3).plan.fingerprint != ramp


def test_views_and_a_list_in_a_script_have_a_strength(tmp_path: Any) -> None:
    pipeline = A.Compose(
        [A.RandomResizedCrop((24, 24)), A.ColorJitter(p=1), A.Normalize()]
    )
    batch = next(next(raypipe.loader(stream(0.0, pipeline)).epochs()).train)
    assert batch.image.dtype == torch.float32 and torch.equal(
        batch.image[:1].expand(4, -1, -1, -1), batch.image
    )
    views = next(
        next(raypipe.loader(stream(0.0, {"pair": (pipeline, 2)})).epochs()).train
    ).views["pair"]
    assert torch.equal(views[:, 0], views[:, 1])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            "autoaugment",
            "train is autoaugment: Compose is not a list of Albumentations' steps",
        ),
        (
            [{"Resize": {"height": 8, "width": 8}}, {"CLAHE": None}],
            "the step CLAHE is not among those that raypipe",
        ),
        (
            A.Compose([A.Resize(8, 8), A.GaussNoise()]),
            "the step GaussNoise is not among",
        ),
        ({"a": "light", "b": [{"CLAHE": None}]}, "views a, b: the step CLAHE"),
        (lambda image: image, "function is not a list of Albumentations' steps"),
        ([{"HorizontalFlip": None}], "its images have no fixed size"),
    ],
)
def test_a_step_that_raypipe_does_not_make_is_one_error(
    train: Any, message: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^transform.strength scales .*{message}.* leave transform.strength out",
    ):
        stream(0.5, train)
    assert build_transform("light", 24).at(1) is not None
