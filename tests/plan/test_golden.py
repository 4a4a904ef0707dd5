"""Fixed hashes of plans of every kind: what they draw, with which keys, seeds and substitutes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from raypipe.config import PlanConfig
from raypipe.plan.schedule import Plan
from raypipe.plan.selection import Selection
from raypipe.stores.base import Store
from raypipe.stores.joined import JoinedStore
from raypipe.stores.memory import MemoryStore
from raypipe.streaming.planning import make_plan

BUCKETS = ["12x16", "14x14", "16x12"]


def store(size: int, salt: int = 0, group_size: int | None = None) -> MemoryStore:
    rng = np.random.default_rng((size, salt))
    columns = {name: rng.integers(4, 20, size) for name in ("width", "height")}
    columns["weight"] = rng.integers(0, 4, size) + 0.5
    images = [bytes([i % 256, i // 256, salt]) for i in range(size)]
    return MemoryStore(
        images,
        rng.integers(0, 5, size).tolist(),
        columns=columns,
        group_size=group_size,
    )


def several(group_size: int | None = None) -> JoinedStore:
    return JoinedStore(
        {"a": store(64), "b": store(16, 1), "c": store(200, 2, group_size)}
    )


ONE = {"size": 90}
GROUPED = {"size": 90, "group_size": 7}
MIXTURE = {"mixture": {0: {"a": 2, "b": 1, "c": 1}, 1: {"a": 0, "b": 1, "c": 3}}}
PLAIN: dict[str, dict[str, Any]] = {
    "global": ONE,
    "global, one micro-batch": {**ONE, "global_batch_size": 0},
    "global, seed 2^32 - 1": {**ONE, "seed": 2**32 - 1},
    "global, no validation": {**ONE, "val_interval": 0},
    "off": {**ONE, "shuffle": "off"},
    "window": GROUPED,
    "window of 2 groups": {**GROUPED, "shuffle": 2},
    "groups, global": {**GROUPED, "shuffle": "global"},
    "excluded": {**ONE, "exclude": range(0, 90, 7), "val_exclude": [3]},
    "most excluded": {**ONE, "exclude": range(60), "val_exclude": range(9)},
    "window, excluded": {**GROUPED, "shuffle": 2, "exclude": range(20, 50)},
}
OTHERS: dict[str, dict[str, Any]] = {
    "global, seed 2^40": {**ONE, "seed": 2**40},
    "repeats": {**ONE, "aug_repeats": 2},
    "epoch of 40": {**ONE, "epoch_samples": 40},
    "window, epoch of 40, repeats": {**GROUPED, "epoch_samples": 40, "aug_repeats": 2},
    "weights": {**ONE, "weights": "weight"},
    "weights, window": {
        **GROUPED,
        "weights": "weight",
        "shuffle": 3,
        "epoch_samples": 50,
    },
    "weights, off, excluded": {
        **ONE,
        "weights": "weight",
        "shuffle": "off",
        "exclude": [2, 9],
        "aug_repeats": 2,
    },
    "class balance": {**ONE, "weights": 0.5},
    "buckets": {**ONE, "buckets": {"train": BUCKETS, "val": BUCKETS}},
    "buckets, off, repeats": {
        **ONE,
        "buckets": BUCKETS,
        "shuffle": "off",
        "aug_repeats": 2,
        "exclude": [1],
    },
    "buckets, epoch of 40": {**ONE, "buckets": BUCKETS, "epoch_samples": 40},
    "buckets, weights": {**ONE, "buckets": BUCKETS, "weights": "weight"},
    "buckets, class balance": {
        **ONE,
        "buckets": BUCKETS,
        "weights": 1.0,
        "aug_repeats": 2,
    },
    "mixture by sizes": {},
    "mixture": MIXTURE,
    "mixture, longest": {
        **MIXTURE,
        "epoch_samples": "longest",
        "exclude": [5, 70, 79],
        "group_size": 9,
    },
    "mixture, weights, repeats": {
        **MIXTURE,
        "weights": "weight",
        "aug_repeats": 2,
        "epoch_samples": 100,
    },
    "mixture, buckets": {**MIXTURE, "buckets": BUCKETS},
    "mixture, buckets, weights, repeats": {
        **MIXTURE,
        **{"buckets": BUCKETS, "weights": "weight", "aug_repeats": 2},
    },
}


def plan_of(
    size: int = 0,
    group_size: int | None = None,
    exclude: Any = (),
    val_exclude: Any = (),
    **config: Any,
) -> Plan:
    usual = {
        "epochs": 3,
        "micro_batch_size": 4,
        "global_batch_size": 8,
        "seed": 3,
        "val_interval": 2,
    }
    train: Store = store(size, group_size=group_size) if size else several(group_size)
    keep = ~np.isin(np.arange(len(train)), list(exclude))
    cuts = train.offsets[1:-1] if isinstance(train, JoinedStore) else []
    return make_plan(
        PlanConfig(**{**usual, **config}),
        train,
        store(10, 9),
        selections=[Selection.where(part) for part in np.split(keep, cuts)],
        val_selection=Selection.where(~np.isin(np.arange(10), list(val_exclude))),
    )


def hashes_of(plan: Plan) -> tuple[str, str]:
    """Of all indices and buckets; and of the keys, seeds and substitutes too, with the fingerprint."""
    drawn, all_of_it = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
    all_of_it.update(plan.fingerprint.encode())
    for at in plan.micro_batches(plan.start()):
        draws = plan.draw(at)
        indices = draws.indices
        line = f"{at} {indices.tolist()} {plan.bucket_of(at)}\n".encode()
        drawn.update(line)
        keys = plan.sample_keys(at.split, draws).tolist()
        again = (
            [plan.substitute(at, int(indices[0]), n) for n in range(2)]
            if at.split == "train"
            else []
        )
        all_of_it.update(
            line + f"{keys} {plan.micro_batch_seed(at)} {again}\n".encode()
        )
    return drawn.hexdigest(), all_of_it.hexdigest()


# Those of PLAIN were recorded of the first version of plans, and stay.
HASHES = {
    "global": ("45f9411de00657e7", "25342fdb703ee4bc"),
    "global, one micro-batch": ("16c0f8ee0275f185", "d2e1a6a98f35c162"),
    "global, seed 2^32 - 1": ("d9182190cdc79c1c", "77a68e2dca7e0772"),
    "global, no validation": ("cfea5357b3b2d708", "18e6fb29b9f99704"),
    "off": ("932ae4431cf53425", "1107c4335c4b18b3"),
    "window": ("6d0267d0de7d14e8", "e82924d295411896"),
    "window of 2 groups": ("c9e49c6d697a2e8a", "6e90639551e8dde4"),
    "groups, global": ("45f9411de00657e7", "05c366172368296f"),
    "excluded": ("cf9e2f62ac0f3386", "3734ccd0cfcf3da9"),
    "most excluded": ("e696d603b9ce45a6", "0d7aee865e66c03a"),
    "window, excluded": ("2f076ed2c999a3b1", "3c2c4886c6a46a3a"),
    "global, seed 2^40": ("0253f91642ed0091", "78a58f6fdd4604f1"),
    "repeats": ("444f05aa0afb5cc3", "c1afee49497390aa"),
    "epoch of 40": ("2a538b55f209c6d1", "37cf184994c29d64"),
    "window, epoch of 40, repeats": ("a67051186e96eecd", "d2c26689e49d9425"),
    "weights": ("c4cbcd02fc7fd36a", "bf222bfcf7d28468"),
    "weights, window": ("058743d4d8c511f3", "eae10d21c8d810a0"),
    "weights, off, excluded": ("d745e1e0cba8633e", "547b41092ba7f702"),
    "class balance": ("eac3f312cab78c11", "279f48eeb4b99f6d"),
    "buckets": ("641c9db35946ca0f", "a854524da6d95ea7"),
    "buckets, off, repeats": ("ad7dcf51eed4a361", "78dbd5faad374d3a"),
    "buckets, epoch of 40": ("7b397ad85273300e", "2f7e9c67bcbd12b9"),
    "buckets, weights": ("02b3e18a462321ce", "f1b9a951701717b5"),
    "buckets, class balance": ("5331096a6015a91a", "47d27ee5600cd9f8"),
    "mixture by sizes": ("78a10ec21531ee3a", "4aaaf00fd45f491d"),
    "mixture": ("77f611ee4ec7a391", "aef7ee43ebeada93"),
    "mixture, longest": ("9795cf41f6ce0375", "0bb95d003f792684"),
    "mixture, weights, repeats": ("2d1c354a3d1ae288", "a14f7acaec211d6f"),
    "mixture, buckets": ("7f6e0206aa7def45", "bfaa90e69d286c5a"),
    "mixture, buckets, weights, repeats": ("69fd43ab95f0765a", "fe5b526fdfef5156"),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_a_plan_draws_what_it_always_drew(name: str) -> None:
    assert hashes_of(plan_of(**{**PLAIN, **OTHERS}[name])) == HASHES[name]
