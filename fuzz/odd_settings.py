"""Values of every kind for the fields of a configuration, and all that a section can be asked for."""

from __future__ import annotations

import dataclasses
import inspect
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch

from raypipe import config
from raypipe.config import PlanConfig, TransformConfig
from raypipe.errors import ConfigError, StoreError
from raypipe.plan.places import MicroBatchId
from raypipe.plan.schedule import Plan
from raypipe.section import (
    Limits,
    Ramped,
    Section,
    check,
    is_section,
    kinds_of,
    shown,
)
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan

SECTIONS = sorted(
    {part for part in vars(config).values() if is_section(part) and part is not Section}
    - {Ramped},
    key=lambda section: section.__name__,
)

FIELDS = [(section, name) for section in SECTIONS for name in kinds_of(section)]

ITSELF: list[Any] = []

ITSELF.append(ITSELF)

INTS = [
    -(10**30),
    -1,
    0,
    1,
    2,
    3,
    8,
    200,
    1 << 12,
    1 << 16,
    1 << 20,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
]

INTS += [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, 10**400, 10**5000]

FLOATS = [0.0, -0.0, -1.0, 0.5, 1.0, 1.5, 8.0, 5e-324, 1e-12, 1e6, 1e9, 1e300, 1.7e308]

FLOATS += [float("nan"), float("inf"), float("-inf")]

TEXTS = [
    "",
    "a",
    "8",
    "1.5",
    "auto",
    "off",
    "longest",
    "192x256",
    "99999x99999",
    "0x1",
    "a:b",
    "weight",
    "label",
]

TEXTS += [
    "a=b",
    "a\0b",
    "\ud800",
    "text",
    "x" * 1000,
    "heavy",
    "none.npy",
    "simclr",
    "gpu",
    "array",
    "disk",
]

OTHERS = [
    None,
    True,
    False,
    b"a",
    1j,
    Decimal(3),
    Fraction(1, 2),
    object(),
    int,
    np.int64,
    len,
    range(3),
    {1, 2},
]

OTHERS += [
    np.int64(8),
    np.uint64(1 << 63),
    np.float32(0.5),
    np.float64("nan"),
    np.bool_(True),
    np.str_("auto"),
]

OTHERS += [
    np.array([0.5, 0.5, 0.5]),
    np.zeros((0,)),
    np.zeros((2, 2)),
    np.array("auto"),
    torch.tensor(3),
]

OTHERS += [Path("a"), PlanConfig(), TransformConfig, iter([1]), ITSELF]

NESTED: list[Any] = [
    [],
    (),
    {},
    [1],
    ["a"],
    ["a", 1],
    [None],
    [[1]],
    (1.0, 2.0, 3.0),
    (0.5, float("nan"), 0.5),
]

NESTED += [
    ["192x256", "256x192"],
    ["192x256"] * 2,
    ["99999x99999"],
    [True],
    {"a": 1},
    {"a": 1, "b": 2},
]

NESTED += [
    {"a": 1e308, "b": 1e308},
    {"a": 5e-324, "b": 1e308},
    {"a": "x"},
    {"a": float("inf")},
    {"a": 10**400},
]

NESTED += [
    {"a": None},
    {"a": {}},
    {"a": []},
    {"a": True},
    {0: {"a": 1, "b": 0}},
    {0: {"a": float("nan")}},
    {0: 64},
]

NESTED += [
    {0: 64, 3: 13_000},
    {0: 13_000, 3: 64},
    {3: 64},
    {0: "a"},
    {0: {}},
    {0: {"a": 1}, "b": 2},
    {1.5: 2},
    {None: 1},
    {True: 3},
]

NESTED += [
    {10**30: 3},
    {"0": 64},
    {0: 10**30},
    {-1: 64, 0: 64},
    {"a": {"length": 10**12}},
    {"a": {"fill": "x"}},
]

NESTED += [
    {"a": {"length": 8, "fill": float("nan"), "dtype": "int8"}},
    {"a": {"dtype": "complex"}},
    {"a": {1: 2}},
]

NESTED += [
    [{}],
    [{"op": 3}],
    [{"op": "RandomInvert", "p": "x"}],
    [{"HorizontalFlip": {"p": 3}}],
    [{"a": 1}],
]

NESTED += [
    {"a": {"transform": "light", "count": 10**12}},
    {"a": {"transform": 3}},
    {"a": {"size": 10**12}},
]

VALUES = [*INTS, *FLOATS, *TEXTS, *OTHERS, *NESTED]

# What else is set, so that a value of one field meets the code that another one switches on.
PLANS: list[dict[str, Any]] = [
    {"micro_batch_size": 4},
    {
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "aug_repeats": 2,
        "epochs": 1 << 30,
    },
    {"micro_batch_size": 4, "weights": "weight", "epoch_samples": 16},
    {"micro_batch_size": 4, "weights": 1.0, "shuffle": "off"},
    {
        "micro_batch_size": 2,
        "buckets": {"train": ["192x256", "256x192"], "val": ["192x256"]},
        "epoch_samples": 8,
    },
    {"micro_batch_size": 4, "mixture": {"a": 1, "b": 2}, "epoch_samples": "longest"},
    {
        "micro_batch_size": 2,
        "mixture": {0: {"a": 1, "b": 2}, 5: {"a": 0, "b": 1}},
        "buckets": ["10x10", "10x20"],
    },
]

MEMORY_BYTES, CPU_S = 1 << 30, 30.0


def store(num: int) -> MemoryStore:
    columns = {
        "width": [10 + i % 9 for i in range(num)],
        "height": [18 - i % 9 for i in range(num)],
    }
    columns |= {
        "weight": [i % 3 for i in range(num)],
        "heavy": [1.7e308 if i % 3 else 5e-324 for i in range(num)],
    }
    return MemoryStore(
        [b""] * num, [i % 4 for i in range(num)], columns=columns, group_size=None
    )


ONE, TWO = store(24), JoinedStore({"a": store(20), "b": store(13)})


def made(section: Any, names: list[str], values: dict[str, Any]) -> Any:
    """The configuration; None where its one error names one of the fields that are not as by default."""
    start = time.process_time()
    try:
        config = section(**values)
        use(config)
    except ConfigError as error:
        named = any(
            f"{section._prefix}{name}".replace("NAME.", "") in str(error)
            for name in names
        )
        assert named or section is not type(error), f"{error} names none of {names}"
        assert len(str(error)) < 1500 and "\n" not in str(error), error
        return None
    finally:
        assert time.process_time() - start < CPU_S
    return config


def use(config: Any) -> None:
    """Everything that a section can be asked for."""
    for name, kind in kinds_of(type(config)).items():
        value = getattr(config, name)
        assert check(name, value, kind) == value or value != value
        is_code = name in ("module", "sampler") and callable(value)
        assert is_code or is_plain(value), f"{name} is {value!r}"
    assert dataclasses.replace(config) == config or "nan" in repr(config)
    hash(repr(config))
    for name, member in inspect.getmembers(type(config)):
        # What settings name need not exist.
        if name.startswith("_") or name == "imported":
            continue
        if isinstance(member, property):
            getattr(config, name)
        elif inspect.isfunction(member):
            hints = get_type_hints(member)
            getattr(config, name)(
                *(
                    argument(hints[each])
                    for each in list(inspect.signature(member).parameters)[1:]
                )
            )


def edges(kind: Any) -> list[Any]:
    """The choices that a kind names, and the numbers at its limits and beyond."""
    if isinstance(kind, Limits):
        found = {
            edge + by for edge in (kind.minimum, kind.maximum) for by in (-1, 0, 1)
        } | {
            kind.minimum,
            kind.maximum,
        }
        return [*found, *(float(each) for each in found if abs(each) < 1e308)]
    if isinstance(kind, type) and issubclass(kind, Section):
        return [kind()]
    parts = [*get_args(kind), *getattr(kind, "__metadata__", ())]
    return [
        each
        for part in parts
        for each in (edges(part) if not isinstance(part, str | bool) else [part])
    ]


def argument(kind: Any) -> Any:
    return (
        get_args(kind)[0]
        if get_origin(kind) is Literal
        else kind(0.5)
        if kind is float
        else kind(3)
    )


def is_plain(value: Any) -> bool:
    """Whether it is built of Python's own types, which pickle, compare and are written as YAML."""
    if isinstance(value, dict):
        return all(is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return value is ITSELF or all(map(is_plain, value))
    return type(value) in (int, float, str, bool, type(None)) or isinstance(
        value, Section
    )


def plan_of(values: dict[str, Any]) -> None:
    config = made(PlanConfig, list(values), values)
    if config is None:
        return
    for train in (TWO, ONE) if not config.mixture else (TWO,):
        start = time.process_time()
        try:
            plan = make_plan(config, train, ONE)
            ask(plan)
        except (ConfigError, StoreError) as error:
            assert len(str(error)) < 1500, error
        except Exception as error:
            raise AssertionError(
                f"{shown(values)}: {type(error).__name__}: {error}"
            ) from error
        assert time.process_time() - start < CPU_S, shown(values)


def ask(plan: Plan) -> None:
    """The first and the last micro-batch of the first and the last epoch, and of their validations."""
    config = plan.config
    plan.check(plan.cursor_at(config.epochs * plan.steps_per_epoch))
    plan.num_micro_batches(plan.cursor_at((config.epochs - 1) * plan.steps_per_epoch))
    for epoch in {0, config.epochs - 1}:
        for split, num_steps, num in (
            ("train", plan.steps_per_epoch, 33),
            ("val", plan.val_steps, len(ONE)),
        ):
            places = (
                {(0, 0), (num_steps - 1, config.per_step - 1)} if num_steps else set()
            )
            for step, micro in places:
                at = MicroBatchId(split, epoch, step, micro)  # type: ignore[arg-type]
                draws = plan.draw(at)
                indices = draws.indices
                assert (
                    indices.shape == (config.micro_batch_size,)
                    and indices.dtype == np.int64
                )
                assert (
                    indices.min() >= -1
                    and indices.max() < num
                    and (split == "val" or not config.drop_last or indices.min() >= 0)
                )
                plan.sample_keys(at.split, draws)
                plan.micro_batch_seed(at), plan.bucket_of(at)
                if split == "train":
                    plan.substitute(at, int(indices[0]), 0)
