"""What programs draw: by key and place alone, evenly, and from the library's distributions."""

from __future__ import annotations

import random
from typing import Any

import albumentations as A  # noqa: N812
import numpy as np
import pytest

from raypipe.kernel import Program, Step, native_step
from raypipe.kernel.draws import integers, uniforms

NUM = 100_000
KEYS = np.random.default_rng(7).integers(0, 1 << 63, (NUM, 2)).astype(np.uint64)
NUM_OF_LIBRARY = 6_000  # which takes a second for them
# Two samples of one distribution differ by more in one of 10^4 comparisons (Smirnov 1948).
BOUND = 2.23 * np.sqrt(1 / NUM + 1 / NUM_OF_LIBRARY)


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """The Kolmogorov–Smirnov statistic: the largest difference of the two distribution functions."""
    values = np.unique(np.concatenate([first, second]))
    shares = [
        np.searchsorted(np.sort(each), values, side="right") / len(each)
        for each in (first, second)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def test_uniforms_are_evenly_distributed_and_do_not_hang_together() -> None:
    u = uniforms(KEYS, 6)
    even = np.sort(np.linspace(0, 1, NUM, endpoint=False))
    assert all(distance(column, even) < BOUND for column in u.T)
    of_neighbors = uniforms(
        np.stack([np.arange(NUM), np.zeros(NUM)], axis=1).astype(np.uint64), 6
    )
    assert all(distance(column, even) < BOUND for column in of_neighbors.T)
    for numbers in (u, of_neighbors):
        of_places, of_keys = (
            np.corrcoef(numbers.T),
            np.corrcoef(numbers[1:, 0], numbers[:-1, 0]),
        )
        assert np.abs(of_places - np.eye(6)).max() < 5 / np.sqrt(NUM)
        assert abs(of_keys[0, 1]) < 5 / np.sqrt(NUM)


def test_a_number_depends_on_its_key_and_place_alone() -> None:
    whole = uniforms(KEYS[:50], 6)
    assert np.array_equal(uniforms(KEYS[20:21], 6)[0], whole[20])
    assert np.array_equal(uniforms(KEYS[:50], 3), whole[:, :3])
    assert uniforms(KEYS[:1], 2).tolist() == [[0.964225954694865, 0.8207038744859557]]


def test_integers_reach_both_ends_alike() -> None:
    counts = np.bincount(integers(uniforms(KEYS, 1)[:, 0], 2, 6))
    assert counts[:2].tolist() == [0, 0] and len(counts) == 7
    assert np.abs(counts[2:] / NUM - 0.2).max() < 0.01


def drawn(transform: Any) -> np.ndarray:
    """The parameters of a transform's native step, float64 (NUM, n), in its own order."""
    step = native(transform)
    numbers = step.draw(uniforms(KEYS, step.num_uniforms), SIZES)
    columns = [
        np.broadcast_to(part, (NUM,)) if np.ndim(part) < 2 else part for part in numbers
    ]
    return np.column_stack(columns).astype(np.float64)


def of_library(transform: Any) -> list[dict[str, Any]]:
    """What the library draws for images of the first SIZES."""
    transform.set_random_state(np.random.default_rng(3), random.Random(3))
    found = []
    for size in SIZES[:NUM_OF_LIBRARY].tolist():
        params = transform.get_params()
        data = (
            {"image": np.broadcast_to(np.uint8(0), (*size, 3))}
            if transform.targets_as_params
            else {}
        )
        found.append(
            params | transform.get_params_dependent_on_data({"shape": (*size, 3)}, data)
        )
    return found


def native(transform: Any) -> Step:
    step = native_step(type(transform).__name__, vars(transform))
    assert step is not None
    return step


def first_hole(params: dict[str, Any]) -> dict[str, int]:
    edges = params["holes"][0].tolist()
    return dict(zip(("left", "top", "right", "bottom"), edges, strict=True))


SIZES = np.random.default_rng(1).integers(40, 700, (NUM, 2))


@pytest.mark.parametrize(
    ("transform", "ours", "theirs"),
    [
        (
            A.RandomResizedCrop((64, 48), scale=(0.05, 0.9), ratio=(0.5, 1.5)),
            {"top": 0, "left": 1, "height": 2, "width": 3},
            lambda p: {
                "left": p["crop_coords"][0],
                "top": p["crop_coords"][1],
                "width": p["crop_coords"][2] - p["crop_coords"][0],
                "height": p["crop_coords"][3] - p["crop_coords"][1],
            },
        ),
        (
            A.RandomCrop(33, 40),
            {"top": 0, "left": 1},
            lambda p: {"left": p["crop_coords"][0], "top": p["crop_coords"][1]},
        ),
        (
            A.ColorJitter((0.5, 1.5), (0.6, 1.1), (0.0, 2.0), (-0.2, 0.4), p=1),
            {"brightness": 4, "contrast": 5, "saturation": 6, "first": 0, "last": 3},
            lambda p: {
                **{
                    name: round(p[name] * 65536)
                    for name in ("brightness", "contrast", "saturation")
                },
                "first": p["order"][0],
                "last": p["order"][3],
            },
        ),
        (
            A.ColorJitter(hue=0.1, p=1),
            {"hue": 7},
            lambda p: {"hue": round(p["hue"] * 6 * 65536) % (6 * 65536)},
        ),
        (
            A.Solarize((0.2, 0.8), p=1),
            {"threshold": 1},
            lambda p: {"threshold": np.ceil(p["threshold"] * 255)},
        ),
        (
            A.Posterize((2, 6), p=1),
            {"mask": 1},
            lambda p: {"mask": 256 - 2 ** (8 - p["num_bits"])},
        ),
        (
            A.CoarseDropout((2, 5), (0.1, 0.3), (0.2, 0.25), p=1),
            {"num": 3, "top": 4, "left": 5, "bottom": 6, "right": 7},
            lambda p: {"num": len(p["holes"]), **first_hole(p)},
        ),
        (
            A.CoarseDropout((1, 1), (5, 30), (3, 20), p=1),
            {"top": 4, "left": 5, "bottom": 6, "right": 7},
            first_hole,
        ),
        (
            A.RandomRotate90(p=1),
            {"turn": 0},
            lambda p: {"turn": (0, 6, 3, 5)[p["factor"]]},
        ),
    ],
    ids=lambda value: (
        type(value).__name__ if isinstance(value, A.BasicTransform) else ""
    ),
)
def test_steps_draw_from_the_distributions_of_the_library(
    transform: Any, ours: Any, theirs: Any
) -> None:
    numbers = drawn(transform)
    library = [theirs(params) for params in of_library(transform)]
    for name, column in ours.items():
        values = np.array([each[name] for each in library], float)
        assert distance(numbers[:, column], values) < BOUND, name


def test_affine_draws_the_librarys_matrices() -> None:
    transform = A.Affine(
        (0.7, 1.3),
        {"x": (-0.1, 0.1), "y": (-0.2, 0.3)},
        None,
        (-30, 60),
        {"x": (-5, 10), "y": 3},
        p=1,
    )
    forward = np.stack([params["matrix"] for params in of_library(transform)])
    theirs = np.linalg.inv(forward)[:, :2].reshape(-1, 6)
    ours = drawn(transform)[:, :6] / 2**32
    for column in range(6):
        assert distance(ours[:, column], theirs[:, column]) < BOUND


def test_a_chance_is_kept() -> None:
    for p in (0.2, 0.5, 0.9):
        params, _ = Program(
            [native(A.HorizontalFlip(p=p)), native(A.ToGray(p=p))]
        ).draw(KEYS, SIZES)
        applied = params[:, [0, 2]].mean(axis=0)
        assert np.abs(applied - p).max() < 0.01
        assert abs((params[:, 0] & params[:, 2]).mean() - p * p) < 0.01
