"""Blocks of one row for an actor pool, in a Dataset of the user's own context."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.data import Dataset


def single_rows(rows: Dataset) -> Dataset:
    """Return the same rows, each as its own block.

    Ray Data joins the rows that a ReadTask yields to blocks of its target size. `target_max_block_size = 1`, as a
    loader's executions have it, would cut the user's blocks as well. The tasks of `repartition` need a CPU by
    default, for which they would wait forever while a pool holds all of them (ray#44687). It has no argument
    for that, so its operator is changed; where a release of Ray has no such attribute, they need a CPU.
    """
    blocks: Any = rows.repartition(target_num_rows_per_block=1)
    with contextlib.suppress(AttributeError, TypeError):
        blocks._logical_plan.dag.ray_remote_args["num_cpus"] = 0
    return blocks
