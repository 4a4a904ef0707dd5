"""The record of a stream in its run's folder: all that opens it again, later and elsewhere.

{"arguments": {…}}   those of `raypipe.open_stream`, as entries of `recorded_values`; addresses are absolute
{"stores": {…}}      by split: name, address, fingerprint and number of samples of each store
{"written": {…}}     when the files of each store were written, by its address and the machine
{"plan": …}          the plan's fingerprint
{"quarantine": …}    the folder that records bad samples
{"augment": …}       the loader's augmentation, as an entry; and its `dtype` and `device`
{"code": …}          the hashes of the user's modules by their names
{"versions": {…}}    of the packages and of raypipe's code that pixels depend on, and the machine
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from raypipe.packages import user_code, versions
from raypipe.plan.places import Split
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
# Settings that decide how long a run is, and nothing that is in its micro-batches.
_NOT_SEALED = ("epochs", "val_interval")


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
    """Return the part of a stream's record that decides its batches, the same in all ranks.

    Args:
        augment: the user's augmentation on the device; None = none.
        dtype: dtype of the images that it makes; None = the pipeline's own, or float32.
    """
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
    """Return what a run's folder records of its stream, as JSON; see `settings_record`."""
    return {
        **settings_record(spec, augment, dtype),
        "stores": {
            split: [
                {
                    "name": name,
                    "address": store.address,
                    "fingerprint": store.fingerprint,
                    "samples": len(store),
                    "in_groups": store.groups is not None,
                }
                for name, store in parts_of(of_split).items()
            ]
            for split, of_split in spec.stores.items()
        },
        "written": written_files(spec.stores),
        "quarantine": _absolute(spec.quarantine),
        "device": device.type,
        "code": user_code(),
        "versions": {**versions(), "machine": platform.machine()},
    }


def sealed(record: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the seal of a rank's start: a hash over the settings of its stream, and facts about the rank.

    Args:
        record: from `settings_record` or `stream_record`.
        facts: see `digest_log.FACTS`.
    """
    arguments = dict(record["arguments"])
    plan = arguments["plan"]
    kept = {
        name: value
        for name, value in plan["settings"].items()
        if name not in _NOT_SEALED
    }
    arguments["plan"] = {**plan, "settings": kept}
    content = [
        arguments,
        record["augment"],
        record["plan"],
        record["dtype"],
        sorted(facts.items()),
    ]
    text = json.dumps(_without_texts(content), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _without_texts(entries: Any) -> Any:
    """Entries without the texts of objects, which may differ between processes."""
    if isinstance(entries, Mapping):
        return {
            name: _without_texts(value)
            for name, value in entries.items()
            if name != "text"
        }
    if isinstance(entries, list | tuple):
        return [_without_texts(value) for value in entries]
    return entries


def written_files(stores: Mapping[Split, Store]) -> dict[str, str]:
    """Return when the files of each store were written, see `written_of`, by its address and this machine."""
    host = gethostname()
    return {
        store.address if is_remote(store.address) else f"{store.address} on {host}": (
            written_of(store)
        )
        for of_split in stores.values()
        for store in parts_of(of_split).values()
    }


def rewritten(then: Any, now: Mapping[str, Any]) -> list[str]:
    """Describe the stores whose files were written or replaced between two records of a stream.

    Args:
        then: the earlier one, which may be damaged, or of an earlier release.
    """
    before: Any = then.get("written") if isinstance(then, dict) else {}
    if not isinstance(before, dict):
        before = {}
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
    if not isinstance(address, str | Path) or not str(address):
        return address
    text = str(address)
    if "://" in text:
        return text
    return str(Path(text).expanduser().absolute())
