"""The HTML page of a run, or of two side by side, from what their folders hold (`raypipe.train.run_folder`): so a
page can be made again at any time, and of a run that is still going on."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow.fs
import yaml

from raypipe import pages
from raypipe.errors import ConfigError
from raypipe.logs import STAGES
from raypipe.metrics.records import METRICS, START, parse, read_records, unreadable_note
from raypipe.pages import Series
from raypipe.storage.files import read_whole, write_text
from raypipe.storage.filesystem import as_uri, explained, join, open_filesystem
from raypipe.stores.base import title_of

_MAX_ROWS = 50  # rows of a table; the files have the rest


@dataclass(frozen=True)
class Recorded:
    """A run's files: records of metrics.jsonl that hold, of the quarantine, and lines that are not records."""

    uri: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    unreadable: int = 0

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") in kinds]

    def series(self, kind: str, key: str, scale: float = 1.0) -> Series:
        """The values of a key by global step."""
        values = {record["step"]: record.get("values", record).get(key) for record in self.of(kind)}
        values = {step: value * scale for step, value in values.items() if isinstance(value, int | float)}
        return Series(self.name, [*values], [*values.values()])

    def bad_samples(self) -> list[tuple[str, str]]:
        """Name each bad sample once, with its error."""
        first = {(record.get("store"), record.get("index")): record for record in self.bad}
        return [
            (title_of(store, index, record.get("name", "")), str(record.get("error")))
            for (store, index), record in first.items()
        ]


def read_run(run: str) -> Recorded:
    """Read a run's folder, a path or a URI.

    Raises:
        ConfigError: it is none, or a file of it cannot be read.
    """
    uri = as_uri(run)
    with explained(ConfigError, f"the run {run} cannot be read"):
        filesystem, folder = open_filesystem(uri)
        config = read_whole(join(uri, "config.yaml"))
        metrics = read_records(uri)
        if metrics is None:
            missing = "config.yaml" if config is None else METRICS
            why = "give the folder of a run, such as runs/NAME" if config is None else "it has not begun to train"
            raise ConfigError(f"{run} has no {missing}: {why}")
        quarantine = pyarrow.fs.FileSelector(f"{folder}/quarantine", allow_not_found=True)
        names = sorted(info.base_name for info in filesystem.get_file_info(quarantine) if info.is_file)
        bad = parse(b"".join((read_whole(join(uri, "quarantine", name)) or b"") + b"\n" for name in names))
    try:
        values = _settings(metrics.kept) if config is None else yaml.safe_load(config)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run}/config.yaml is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{run}/config.yaml holds no settings")
    return Recorded(uri, values, metrics.kept, bad.kept, metrics.unreadable + bad.unreadable)


def _settings(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Those of the newest start, which has them where the trainers ran a loop of the user's own."""
    starts = (record for record in reversed(records) if record.get("kind") == START)
    return next((start["settings"] for start in starts if "settings" in start), {})


def summary(run: Recorded) -> dict[str, Any]:
    """The figures of a run in short; None where it has recorded none."""
    steps, per_s, waiting, loss = (
        run.series("train", key).y for key in ("step", "images_per_s", "wait_fraction", "loss")
    )
    accuracy = run.series("val", "accuracy").y
    return {
        "run": run.uri,
        "steps": int(max(steps, default=0)),
        "images_per_s": statistics.median(per_s) if per_s else None,
        "wait_fraction": statistics.median(waiting) if waiting else None,
        "loss": loss[-1] if loss else None,
        "val_accuracy": accuracy[-1] if accuracy else None,
        "best_val_accuracy": max(accuracy, default=None),
        "starts": len(run.of("start")),
        "faults": len(run.of("fault")),
        "bad_samples": len(run.bad_samples()),
        "unreadable_lines": run.unreadable,
    }


def write_report(run: str, against: str = "", output: str = "") -> dict[str, Any]:
    """Write the page of a run's folder, or of two, to `output`, or to report.html in the run's folder.

    Returns:
        `summary` of the run, `report`, where the page is, and `against`, the summary of the other run or None.
    """
    runs = [read_run(folder) for folder in (run, against) if folder]
    where = as_uri(output) if output else join(runs[0].uri, "report.html")
    write_text(where, render(runs))
    summaries = [summary(recorded) for recorded in runs]
    return summaries[0] | {"report": where, "against": summaries[1] if against else None}


def render(runs: list[Recorded]) -> str:
    """The page of one run or several, as HTML."""

    def chart(title: str, kind: str, key: str, scale: float = 1.0, **options: Any) -> str:
        return pages.chart(title, [run.series(kind, key, scale) for run in runs], **options)

    reported = dict.fromkeys(name for run in runs for record in run.of("report") for name in record["values"])
    return pages.render(
        "report.html",
        runs=runs,
        summaries=[summary(run) for run in runs],
        charts=[
            chart("images/s", "train", "images_per_s"),
            chart("waiting for data, %", "train", "wait_fraction", 100),
            chart("training loss", "train", "loss"),
            chart("validation accuracy", "val", "accuracy", from_zero=False),
            chart("validation loss", "val", "loss"),
            chart("learning rate", "train", "lr"),
            chart("strength of the augmentation", "train", "strength"),
            *(chart(f"reported: {name}", "report", name, from_zero=False) for name in reported),
        ],
        stages=[_stages(run) for run in runs],
        differences=_differences(runs),
        configuration=yaml.safe_dump(runs[0].config, sort_keys=False),
        max_rows=_MAX_ROWS,
        unreadable_note=unreadable_note,
    )


def _stages(run: Recorded) -> str:
    """Share of the trainers' time, by log interval."""
    names = [stage for stage in STAGES if stage != "wait"]
    train = [record for record in run.of("train") if isinstance(record.get("compute_s"), int | float)]
    seconds = {record["step"]: [float(record.get(f"{name}_s", 0)) for name in names] for record in train}
    shares = {
        step: [100 * one / sum(of_step) for one in of_step] for step, of_step in seconds.items() if sum(of_step)
    }
    lines = zip(names, zip(*shares.values(), strict=True), strict=False)  # none without a value
    return pages.chart("of the time that is not waited, %", [Series(name, [*shares], y) for name, y in lines])


def _differences(runs: list[Recorded]) -> list[list[str]]:
    """Name and values of each setting that is not the same in all runs."""
    flat = [dict(_flat(run.config)) for run in runs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [[name, *(one.get(name, "not there") for one in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
