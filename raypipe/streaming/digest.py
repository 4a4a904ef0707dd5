"""The digest of a stream: a hash of every micro-batch, in order; as a file, and compared with another stream's.

Two streams are the same if their digests are, whatever made them.

    {"settings": {name: value}, "micro_batches": {"train-e0000-s000000-m000": 32 hex digits, …}}

The settings are those that determine the stream (the plan's fingerprint, the transform, the versions of the
libraries that decode and transform) and those that must not change it (workers, actors, where it was resumed). If
two streams differ, they show why. Reading and comparing files needs neither Ray nor torch.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.errors import ConfigError, RaypipeError
from raypipe.packages import versions
from raypipe.plan.custom import sampler_content
from raypipe.plan.places import Cursor
from raypipe.rayext.failures import get
from raypipe.storage.files import read_json
from raypipe.streaming.hashes import batch_hash
from raypipe.streaming.row import host_batches
from raypipe.transform.fields import MicroBatch

if TYPE_CHECKING:
    from ray.data import DataIterator

    from raypipe.plan.schedule import Plan
    from raypipe.streaming.spec import StreamSpec


# To send one through Ray takes a millisecond or two.
_CHUNK = 16


class MicroBatchDigest(NamedTuple):
    """The digest of a micro-batch: the name of its place, 16 bytes, and how many samples have weight."""

    name: str
    digest: bytes
    num_samples: int


def digested(batches: Iterable[MicroBatch]) -> Iterator[MicroBatchDigest]:
    """The digest of each micro-batch."""
    for batch in batches:
        yield MicroBatchDigest(
            str(batch.position), batch_hash(batch), int((batch.weight > 0).sum())
        )


def _consume(iterator: DataIterator) -> Iterator[list[MicroBatchDigest]]:
    digests = digested(host_batches(iterator))
    while chunk := list(islice(digests, _CHUNK)):
        yield chunk


def iterate_digests(
    plan: Plan, cursor: Cursor, iterators: Sequence[DataIterator]
) -> Iterator[MicroBatchDigest]:
    """Consume a stream with one process per rank; yield digests in the order of the plan.

    To end it at a step, end its plan there (`Plan.until`): all ranks, and the execution, then end together. It
    must be iterated to its end.

    Args:
        plan: the stream's plan.
        cursor: the stream's start.
        iterators: iterator of each rank, from `pipeline.splits`.

    Raises:
        RaypipeError: a rank got micro-batches that are not the plan's.
    """
    import ray

    consume: Any = ray.remote(num_cpus=0)(_consume).options(num_returns="streaming")
    # All ranks begin together.
    ranks = [
        chain.from_iterable(map(get, consume.remote(iterator)))
        for iterator in iterators
    ]
    for position in plan.micro_batches(cursor):
        rank = position.micro % len(ranks)
        digest = next(ranks[rank], None)
        if digest is None or digest.name != str(position):
            got = f"brought {digest.name}" if digest else "ended"
            raise RaypipeError(f"rank {rank} expected {position}, the stream {got}")
        yield digest
    for rank, left in enumerate(ranks):
        if digest := next(left, None):
            raise RaypipeError(
                f"rank {rank} expected the end, the stream brought {digest.name}"
            )


class Digests(NamedTuple):
    """The digests of a stream: the settings that it was made with, and name → 32 hex digits, in its order."""

    settings: dict[str, Any]
    micro_batches: dict[str, str]


def read_digests(address: str | Path) -> Digests:
    """Read the digests of a file; raise ConfigError if it does not exist."""
    content = read_json(address)
    try:
        return Digests(dict(content["settings"]), dict(content["micro_batches"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{address} holds no digests ({type(error).__name__}: {error}): make it by "
            "`raypipe digest STORE --output FILE`"
        ) from None


def compare(expected: Digests, actual: Digests, title: str) -> dict[str, Any]:
    """Compare two streams over the micro-batches that both have.

    Args:
        title: the file of the expected one, for the error.

    Returns:
        `equal`, `compared`, `different` (how many), `first_different` (None = all are equal), and `settings` that
        differ, name → (the expected stream's, the actual one's).

    Raises:
        ConfigError: the streams have no micro-batch in common.
    """
    hashes = expected.micro_batches
    both = [name for name in actual.micro_batches if name in hashes]
    if not both:
        raise ConfigError(
            f"nothing to compare: {title} and this stream cover different steps (see --from-step, --to-step)"
        )
    different = [name for name in both if actual.micro_batches[name] != hashes[name]]
    return {
        "equal": not different,
        "compared": len(both),
        "different": len(different),
        "first_different": different[0] if different else None,
        "settings": other_settings(expected.settings, actual.settings),
    }


def other_settings(
    one: dict[str, Any], other: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, name → both values."""
    return {
        name: (one.get(name), other.get(name))
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    }


def plain_settings(spec: StreamSpec, **of_use: int) -> dict[str, Any]:
    """A stream's settings, as names and plain values.

    Args:
        of_use: what must not change the stream: `workers`, `actors`, and its range in training steps through all
            epochs, `from_step` and `to_step`.
    """
    val = spec.stores.get("val")
    sampler = spec.plan.config.sampler
    of_plan = dataclasses.asdict(spec.plan.config)
    of_plan["sampler"] = sampler and sampler_content(sampler)
    endings = {split: ending.described for split, ending in spec.endings.items()}
    sections: dict[str, Any] = {
        "plan": of_plan,
        "transform": dataclasses.asdict(spec.transform),
        "column": spec.columns.described(),
        "ending": endings,
        "version": versions(),
        "store": getattr(spec.stores["train"], "facts", {}),  # of a Dataset
    }
    settings = {
        "plan": spec.plan.fingerprint,
        "store": spec.stores["train"].address,
        "val": val and val.address,
        "val.fingerprint": val and val.fingerprint,
        "left_out": spec.plan.kept["train"].num_left_out,
        "val.left_out": spec.plan.kept["val"].num_left_out,
        **of_use,
        "machine": platform.machine(),
    }
    for section, values in sections.items():
        settings |= {f"{section}.{name}": value for name, value in values.items()}
    return json.loads(json.dumps(settings))  # keys that are epochs as a file has them
