"""Whatever the user's code draws from is under the sample's key, and is as it was behind the stream."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import textwrap
from typing import Any

import albumentations as A  # noqa: N812
import cv2
import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from raypipe.transform.reach import ReachedGenerators
from raypipe.transform.sample_transform import SampleTransform

KEYS = [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]
IMAGE = np.full((8, 8, 3), 100, np.uint8)


def noisy() -> Any:
    return A.Compose(
        [A.OneOf([A.GaussNoise(p=1), A.Compose([A.GaussNoise(p=1)])], p=1)]
    )


PIPELINE, GENERATOR, STATE, PYTHONS = (
    noisy(),
    np.random.default_rng(),
    np.random.RandomState(),
    random.Random(),
)
TORCHS, LATER = torch.Generator(), {}
STEP = A.GaussNoise(p=1)


def by_global(image: np.ndarray) -> np.ndarray:
    return PIPELINE(image=image)["image"]


def through_others(image: np.ndarray) -> np.ndarray:
    return by_global(image)


def by_step(image: np.ndarray) -> np.ndarray:
    return STEP(image=image)["image"]


def made_at_the_first_call(image: np.ndarray) -> np.ndarray:
    if "pipeline" not in LATER:
        LATER["pipeline"] = noisy()
    return LATER["pipeline"](image=image)["image"]


def by_default(image: np.ndarray, pipeline: Any = PIPELINE) -> np.ndarray:
    return pipeline(image=image)["image"]


def by_generator(image: np.ndarray) -> np.ndarray:
    return GENERATOR.integers(0, 256, image.shape, dtype=np.uint8)


def by_state(image: np.ndarray) -> np.ndarray:
    return STATE.randint(0, 256, image.shape).astype(np.uint8)


def by_pythons(image: np.ndarray) -> np.ndarray:
    return image + np.uint8(PYTHONS.randrange(150))


def by_torchs(image: np.ndarray) -> np.ndarray:
    return torch.randint(
        0, 256, image.shape, generator=TORCHS, dtype=torch.uint8
    ).numpy()


def by_spawns(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    rng.bit_generator.seed_seq.spawn(1)
    first, second = rng.spawn(2)
    return first.integers(0, 100, image.shape, dtype=np.uint8) + second.integers(
        0, 100, image.shape, dtype=np.uint8
    )


def with_rng_and_others(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return by_global(image) + rng.integers(0, 9, image.shape, dtype=np.uint8)


def step_of_users(image: np.ndarray, **_: Any) -> np.ndarray:
    return by_global(image)


def closure() -> Any:
    pipeline = noisy()
    return lambda image: pipeline(image=image)["image"]


class Held:
    """Has it among others, deep within."""

    def __init__(self) -> None:
        self.steps = [{"noise": noisy()}, (np.random.default_rng(),)]

    def __call__(self, image: np.ndarray) -> np.ndarray:
        image = self.steps[0]["noise"](image=image)["image"]
        return image + self.steps[1][0].integers(0, 9, image.shape, dtype=np.uint8)

    def method(self, image: np.ndarray) -> np.ndarray:
        return self(image)


class OfClass:
    """All objects of the class share it."""

    noise = np.random.default_rng()

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return image + self.noise.integers(0, 100, image.shape, dtype=np.uint8)


class OfScript:
    __module__ = "__main__"  # whose file is that of a library, in an actor

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return by_generator(image)


class InModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pipeline = noisy()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made = self.pipeline(image=image.permute(1, 2, 0).numpy())["image"]
        return torch.from_numpy(made).permute(2, 0, 1)


def listed(image: np.ndarray, steps: list[Any]) -> np.ndarray:
    return functools.reduce(lambda made, step: step(made), steps, image)


CODE: dict[str, Any] = {
    "global": by_global,
    "function of a function": through_others,
    "a bare step": by_step,
    "made at the first call": made_at_the_first_call,
    "default": by_default,
    "closure": closure(),
    "attributes": Held(),
    "method": Held().method,
    "a class": OfClass(),
    "a script's class": OfScript(),
    "module": InModule(),
    "modules in a row": v2.Compose([v2.RandomHorizontalFlip(), InModule()]),
    "partial of a list": functools.partial(listed, steps=[by_global, Held()]),
    "step of Albumentations": A.Compose(
        [A.Lambda(image=step_of_users, p=1), A.GaussNoise(p=1)]
    ),
    "numpy's": by_generator,
    "numpy's old": by_state,
    "Python's": by_pythons,
    "torch's": by_torchs,
    "spawned": by_spawns,
    "rng and others": with_rng_and_others,
}


def made(code: Any, keys: list[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
    transform = SampleTransform(code)
    return {key: transform(IMAGE.copy(), key).tobytes() for key in keys}


@pytest.mark.parametrize("name", CODE)
def test_the_users_code_draws_under_the_key_whatever_was_drawn_before(
    name: str,
) -> None:
    LATER.clear()
    first = made(CODE[name], KEYS)
    (
        np.random.rand(3),
        random.random(),
        torch.rand(5),
        GENERATOR.random(),
        cv2.randu(IMAGE.copy(), 0, 9),
    )
    by_global(IMAGE.copy())
    again = made(CODE[name], KEYS[::-1])
    assert first == again and len(set(first.values())) == len(KEYS)


def states() -> list[Any]:
    held = [
        GENERATOR.bit_generator.state,
        STATE.get_state(legacy=False),
        PYTHONS.getstate(),
        TORCHS.get_state().tolist(),
    ]
    nodes = [PIPELINE, *PIPELINE.transforms, STEP]
    return [
        str(held),
        [(id(node.random_generator), id(node.py_random)) for node in nodes],
    ]


def test_the_generators_of_a_process_are_as_they_were() -> None:
    before = states()
    for code in CODE.values():
        made(code, KEYS)
    assert states() == before


LAZY = """
    import hashlib, sys
    import numpy as np
    from raypipe.transform.process_state import process_kept
    from raypipe.transform.sample_transform import SampleTransform

    def lazy(image):
        import torch
        return torch.randint(0, 256, image.shape, dtype=torch.uint8).numpy()

    def digest(key):
        made = transform(np.zeros((8, 8, 3), np.uint8), key)
        return hashlib.blake2b(made.tobytes(), digest_size=6).hexdigest()

    transform = SampleTransform(lazy)
    assert "torch" not in sys.modules
    found, where = [], sys.argv[1:]
    if "kept" in where:
        with process_kept():
            found = [digest((number, 7)) for number in map(int, where[0].split(","))]
    else:
        found = [digest((number, 7)) for number in map(int, where[0].split(","))]
    import torch
    imported = torch.Generator()
    imported.manual_seed(imported.initial_seed())
    print(*found, torch.equal(torch.rand(3), torch.rand(3, generator=imported)))
"""


@pytest.mark.system
def test_torch_that_the_code_is_first_to_import_is_seeded_with_it() -> None:
    def run(*arguments: str) -> list[str]:
        command = [sys.executable, "-c", textwrap.dedent(LAZY), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.split()

    # Each has another sample first, and the other has that one later: by its key it has the same pixels.
    one, kept = run("0,1,2"), run("2,0,1", "kept")
    assert one[:3] == [kept[1], kept[2], kept[0]]
    assert (one[3], kept[3]) == ("False", "True")


@pytest.mark.parametrize("num_own", [0, 1])
def test_generators_that_are_seeded_ahead_draw_as_those_of_one_key(
    num_own: int,
) -> None:
    own = [np.random.default_rng()] * num_own
    reached = ReachedGenerators([PIPELINE, *own])
    keys = [(number, 2 * number) for number in range(40)]

    def draws() -> list[float]:
        generators = PIPELINE.random_generator, PIPELINE.py_random, *own
        return [generator.random() for generator in generators]

    expected = []
    with reached.kept():
        for key in keys:
            reached.rewind(key)
            expected.append(draws())
    with reached.kept():
        assert [draws() for _ in reached.rewound(keys)] == expected
    assert expected[0] != expected[1]
