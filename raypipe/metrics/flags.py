"""Micro-batches that a loop has flagged, in the run's folder: RUN/flags/PLACE.jsonl, one object for each reason.

Each micro-batch has its file, since every rank writes, and object storage cannot append.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow.fs

from raypipe.errors import StoreError
from raypipe.metrics.records import RunFolder, write_file
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import open_input, read_whole
from raypipe.storage.filesystem import join_address, open_filesystem

FLAGS = "flags"


def write_flag(folder: RunFolder, place: MicroBatchId, flag: dict[str, Any]) -> None:
    """Add a flag to those of a micro-batch; the same reason again replaces the earlier one.

    Args:
        folder: the run's folder.
        flag: plain values, `reason` among them.
    """
    filesystem, path = folder
    filesystem.create_dir(f"{path}/{FLAGS}", recursive=True)
    name = f"{FLAGS}/{place}.jsonl"
    try:
        content = open_input(filesystem, f"{path}/{name}").read()
    except FileNotFoundError:
        content = b""
    flags = [json.loads(line) for line in content.splitlines()]
    flags = [other for other in flags if other["reason"] != flag["reason"]]
    lines = [json.dumps(other) + "\n" for other in (*flags, flag)]
    write_file(folder, name, "".join(lines))


def read_flags(run_uri: str) -> list[dict[str, Any]]:
    """Read all flags of a run, in the order of its steps.

    Raises:
        StoreError: a file has other contents.
    """
    filesystem, path = open_filesystem(join_address(run_uri, FLAGS))
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    flags = []
    for info in filesystem.get_file_info(selector):
        if not info.base_name.endswith(".jsonl"):
            continue
        address = join_address(run_uri, FLAGS, info.base_name)
        for line in (read_whole(address) or b"").splitlines():
            try:
                flag = json.loads(line)
                for name in ("epoch", "step", "rank", "micro"):
                    if type(flag[name]) is not int:
                        raise TypeError(f"{name} must be a whole number")
                place = (flag["step"], info.base_name, float(flag["time"]))
                flags.append((place, {**flag, "reason": str(flag["reason"])}))
            except (
                ArithmeticError,
                LookupError,
                RecursionError,
                TypeError,
                ValueError,
            ) as error:
                text = repr(error)[:200]
                raise StoreError(f"{address} is not a file of flags: {text}") from None
    return [flag for _, flag in sorted(flags, key=lambda pair: pair[0])]
