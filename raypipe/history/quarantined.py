"""Samples that a run could not use, by its quarantine/: one file of JSON lines for each micro-batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.fs

from raypipe.history.record_checks import damage_told, whole_number
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import read_whole
from raypipe.storage.filesystem import join_address, open_filesystem


@dataclass(frozen=True)
class BadRecord:
    """A sample that a run could not use.

    Attributes:
        index: its index in the store.
        substitute: index of the sample that the model saw instead; None = none.
        error: why it could not be used.
    """

    index: int
    substitute: int | None
    error: str


def read_bad_samples(folder: str, place: MicroBatchId) -> list[BadRecord]:
    """Read the record of a micro-batch; empty where it had no bad samples.

    Raises:
        ConfigError: the file cannot be read as a record of bad samples.
    """
    address = join_address(folder, f"{place}.jsonl")
    records = []
    with damage_told(address):
        for line in (read_whole(address) or b"").splitlines():
            record = json.loads(line)
            substitute = record["substitute"]
            if substitute is not None:
                whole_number(substitute, "substitute")
            index = whole_number(record["index"], "index")
            records.append(BadRecord(index, substitute, str(record["error"])))
    return records


def names_of_records(folder: str) -> Iterator[str]:
    """Yield the names of the micro-batches that have a record, as the files have them."""
    filesystem, path = open_filesystem(folder)
    selector = pyarrow.fs.FileSelector(path, allow_not_found=True)
    for info in filesystem.get_file_info(selector):
        if info.base_name.endswith(".jsonl"):
            yield info.base_name.removesuffix(".jsonl")
