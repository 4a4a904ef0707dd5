"""The record of a stream in its run's folder: all that opens it again, later and elsewhere; see `StreamRecord`."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any, Literal

from raypipe.importing import user_code
from raypipe.library_settings import as_text
from raypipe.packages import versions
from raypipe.plan.places import Split
from raypipe.section import Limits, Section
from raypipe.storage.files import short_hash
from raypipe.storage.filesystem import is_remote
from raypipe.stores.base import Store
from raypipe.stores.facts import written_of
from raypipe.stores.joined import JoinedStore
from raypipe.streaming.record.recorded_values import recorded

if TYPE_CHECKING:
    import torch

    from raypipe.config import AugmentConfig
    from raypipe.streaming.spec import StreamSpec

# Arguments that decide nothing in a stream, or that a replay sets itself.
_NOT_RECORDED = ("pool", "quarantine", "run", "log_format", "in_memory")


@dataclass(frozen=True)
class StoreRecord(Section, prefix="stores."):
    """A store of a stream; its name in a mixture, else empty."""

    name: str
    address: str
    fingerprint: str
    samples: Annotated[int, Limits(0, 1 << 62)]
    in_groups: bool


@dataclass(frozen=True)
class StreamRecord(Section, prefix="stream."):
    """A stream, as JSON in its run's folder. A value of the wrong kind raises ConfigError.

    Attributes:
        arguments: those of `raypipe.open_stream`, as entries of `recorded_values`; addresses are absolute.
        augment: the user's augmentation on the device, as an entry.
        plan: the plan's fingerprint.
        dtype: dtype of the images that the device makes; None = the pipeline's own, or float32.
        stores: `StoreRecord`s of each split.
        written: when the files of each store were written, see `written_files`.
        quarantine: the folder that records bad samples; empty = none.
        device: kind of the rank's device.
        code: the hashes of the user's modules by their names.
        versions: versions of the packages and of raypipe's code that pixels depend on, and the machine.
    """

    arguments: dict[str, Any]
    augment: dict[str, Any] | None
    plan: str
    dtype: Literal["float32", "float16", "bfloat16", "float64", "uint8"] | None
    stores: dict[Split, list[dict[str, Any]]]
    written: dict[str, str]
    quarantine: str
    device: str
    code: dict[str, str]
    versions: dict[str, str | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(bool(self.parts("train")), "stores", "of train")
        self.parts("val")

    def parts(self, split: Split) -> list[StoreRecord]:
        """Return the stores of a split."""
        return [StoreRecord(**part) for part in self.stores.get(split, [])]


def opened_with(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `open_stream` that decide a stream, with absolute addresses."""
    kept = {
        name: value for name, value in arguments.items() if name not in _NOT_RECORDED
    }
    for name in ("train", "val", "exclude"):
        kept[name] = _absolute(kept[name])
    return kept


def settings_record(
    spec: StreamSpec, augment: AugmentConfig | None, dtype: torch.dtype | None
) -> dict[str, Any]:
    """Return the part of a stream's record that decides its batches, the same in all ranks."""
    arguments = {name: recorded(value) for name, value in spec.opened.items()}
    weights = spec.plan.config.weights
    if isinstance(weights, str) and weights.endswith(".npy"):
        arguments["plan"]["settings"]["weights"] = recorded(_absolute(weights))
    return {
        "arguments": arguments,
        "augment": recorded(augment),
        "plan": spec.plan.order_fingerprint,
        "dtype": str(dtype).removeprefix("torch.") if dtype else None,
    }


def stream_record(
    spec: StreamSpec,
    augment: AugmentConfig | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> dict[str, Any]:
    """Return what a run's folder records of its stream, as JSON."""
    stores = recorded_stores(spec.stores)
    return {
        **settings_record(spec, augment, dtype),
        "stores": {split: [*map(vars, parts)] for split, parts in stores.items()},
        "written": written_files(spec.stores),
        "quarantine": _absolute(spec.quarantine),
        "device": device.type,
        "code": user_code(),
        "versions": {
            **versions(),
            **as_text(),
            "machine": platform.machine(),
        },
    }


def recorded_stores(stores: Mapping[Split, Store]) -> dict[Split, list[StoreRecord]]:
    """Return the stores of each split, as a run records them."""
    return {
        split: [
            StoreRecord(
                name,
                store.address,
                store.fingerprint,
                len(store),
                store.groups is not None,
            )
            for name, store in parts_of(of_split).items()
        ]
        for split, of_split in stores.items()
    }


def sealed(record: Mapping[str, Any], workers: int) -> str:
    """Return a hash of what decides a stream's batches, see `settings_record`, and of W.

    How long the run is decides nothing, unless the augmentation's strength follows its progress.
    """
    plan = dict(record["arguments"]["plan"]["settings"])
    del plan["val_interval"]
    augment = (record["augment"] or {}).get("settings", {})
    if not isinstance(augment.get("strength"), list):
        del plan["epochs"]
    kept = {name: record[name] for name in ("augment", "plan", "dtype")}
    kept["workers"] = workers
    kept["arguments"] = record["arguments"] | {"plan": plan}
    return short_hash(json.dumps(kept, sort_keys=True))


def written_files(stores: Mapping[Split, Store]) -> dict[str, str]:
    """Return when the files of each store were written, see `written_of`, by its address and this machine."""
    written = {}
    for of_split in stores.values():
        for store in parts_of(of_split).values():
            place = store.address
            if not is_remote(place):
                place += f" on {gethostname()}"
            written[place] = written_of(store)
    return written


def rewritten(then: Any, now: Mapping[str, Any]) -> list[str]:
    """Describe the stores whose files were written or replaced between two records of a stream.

    Args:
        then: the earlier one, which may be damaged, or of an earlier release.
    """
    before: Any = then.get("written") if isinstance(then, dict) else None
    if not isinstance(before, dict):
        return []
    return [
        f"The files of {place} were written or replaced since the run: if their contents have changed, so have "
        "its pixels."
        for place, written in now.get("written", {}).items()
        if before.get(place, written) != written
    ]


def parts_of(store: Store) -> dict[str, Store]:
    """Return the stores of a mixture by their names, or a single store by an empty one."""
    return store.parts if isinstance(store, JoinedStore) else {"": store}


def _absolute(address: Any) -> Any:
    """Return addresses with absolute paths, since a replay starts in another folder; other values as they are."""
    if isinstance(address, Mapping):
        return {name: _absolute(value) for name, value in address.items()}
    if not isinstance(address, str | Path) or "://" in str(address) or not str(address):
        return address
    return str(Path(address).expanduser().absolute())
