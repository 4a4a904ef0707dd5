"""State of the cluster's object store, which Ray tells only through a private call."""

from __future__ import annotations

import contextlib

import ray

_ANSWER_S = 5.0


def spilled_bytes() -> int:
    """Return the bytes that all nodes have written to disk for lack of memory since the cluster began.

    It is 0 if Ray does not tell.
    """
    if not ray.is_initialized():
        return 0
    with contextlib.suppress(
        Exception
    ):  # a name that a release of Ray lacks, or a node that does not answer
        from ray._private.internal_api import (
            get_memory_info_reply,
            get_state_from_address,
        )

        state = get_state_from_address(ray.get_runtime_context().gcs_address)
        return int(
            get_memory_info_reply(
                state, timeout_seconds=_ANSWER_S
            ).store_stats.spilled_bytes_total
        )
    return 0
