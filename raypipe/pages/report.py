"""One HTML page of a run, from what it has written so far, or of two runs side by side.

    throughput, share of the time that trainers wait, loss, accuracy, learning rate, strength of the augmentation
    seconds of each stage, the pool's size, faults, bad samples, the diagnosis, the configuration

All of it comes from the run's folder (`raypipe.train.run_folder`), so a page can be made anew at any time, and of
a run that is still going on.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow.fs
import yaml

from raypipe.errors import ConfigError
from raypipe.logs import STAGES
from raypipe.metrics.records import METRICS, parse, read_records, told
from raypipe.pages import page
from raypipe.pages.page import Form, Series, number
from raypipe.storage.filesystem import as_uri, explained, join, open_filesystem, read_whole
from raypipe.storage.whole_file import write_text
from raypipe.stores.base import title_of

FILE_NAME = "report.html"
_MAX_ROWS = 50  # of a table; the files have the rest
_POOL_SIZE = re.compile(r"→ (\d+) transform actors")  # `raypipe.rayext.autoscaler` tells of its decisions so


@dataclass(frozen=True)
class Recorded:
    """What a run has written.

    Attributes:
        uri: its folder.
        config: the effective configuration, as plain values.
        records: the objects of metrics.jsonl that hold, in their order.
        bad: the records of the quarantine.
        unreadable: lines of both that are no record.
    """

    uri: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    bad: list[dict[str, Any]]
    unreadable: int = 0

    @property
    def name(self) -> str:
        return self.uri.rstrip("/").rpartition("/")[2]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]

    def series(self, kind: str, key: str, name: str = "", scale: float = 1.0, form: Form = "line") -> Series:
        """The values of a key by global step."""
        found = [(r["step"], r[key] * scale) for r in self.of(kind) if isinstance(r.get(key), int | float)]
        return Series(name or self.name, [x for x, _ in found], [y for _, y in found], form)


def read_run(run: str) -> Recorded:
    """Read a run's folder, a path or a URI.

    Raises:
        ConfigError: it is none, or a file of it cannot be read.
    """
    uri = as_uri(run)
    with explained(ConfigError, f"the run {run} cannot be read"):
        filesystem, folder = open_filesystem(uri)
        config = read_whole(filesystem, f"{folder}/config.yaml")
        metrics = read_records(uri)
        if config is None or metrics is None:
            missing = "config.yaml" if config is None else METRICS
            why = "give the folder of a run, such as runs/NAME" if config is None else "it has not begun to train"
            raise ConfigError(f"{run} has no {missing}: {why}")
        quarantine = pyarrow.fs.FileSelector(f"{folder}/quarantine", allow_not_found=True)
        places = sorted(info.path for info in filesystem.get_file_info(quarantine) if info.is_file)
        bad = parse(b"".join((read_whole(filesystem, path) or b"") + b"\n" for path in places))
    try:
        values = yaml.safe_load(config)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run}/config.yaml is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{run}/config.yaml holds no settings")
    return Recorded(uri, values, metrics.kept, bad.kept, metrics.unreadable + bad.unreadable)


def summary(run: Recorded) -> dict[str, Any]:
    """The figures of a run in short; None where it has recorded none."""

    def median(key: str) -> float | None:
        values = run.series("train", key).y
        return statistics.median(values) if values else None

    def last(kind: str, key: str) -> float | None:
        values = run.series(kind, key).y
        return values[-1] if values else None

    accuracy = run.series("val", "accuracy").y
    return {
        "run": run.uri,
        "steps": int(max((record["step"] for record in run.of("train")), default=0)),
        "images_per_s": median("images_per_s"),
        "wait_fraction": median("wait_fraction"),
        "loss": last("train", "loss"),
        "val_accuracy": last("val", "accuracy"),
        "best_val_accuracy": max(accuracy) if accuracy else None,
        "starts": len(run.of("start")),
        "faults": len(run.of("fault")),
        "bad_samples": len({(record.get("store"), record.get("index")) for record in run.bad}),
        "unreadable_lines": run.unreadable,
    }


def write_report(run: str, against: str = "", output: str = "") -> dict[str, Any]:
    """Write the page of a run, or of two.

    Args:
        run: the run's folder, a path or a URI.
        against: another run to compare with; empty = none.
        output: the page, a path or a URI; empty = report.html in the run's folder.

    Returns:
        `summary` of the run, `report`, where the page is, and `against`, the summary of the other run or None.

    Raises:
        ConfigError: a run cannot be read, or the page not be written.
    """
    runs = [read_run(one) for one in (run, against) if one]
    where = as_uri(output) if output else join(runs[0].uri, FILE_NAME)
    write_text(where, render(runs))
    found = [summary(one) for one in runs]
    return found[0] | {"report": where, "against": found[1] if against else None}


def render(runs: list[Recorded]) -> str:
    """The page of one run or several, as HTML."""
    first = runs[0]
    names = " and ".join(run.name for run in runs)
    body = [page.section("In short", _figures(runs)), page.section("Over the run", page.cards(_charts(runs)))]
    for run in runs:
        mark = f" of {run.name}" if len(runs) > 1 else ""
        diagnosis = run.of("diagnosis")
        body += [
            page.section(
                f"Diagnosis{mark}", *(page.paragraph(str(last.get("text", ""))) for last in diagnosis[-1:])
            ),
            page.section(f"Stages{mark}", page.cards([_stages(run), _pool(run)])),
            page.section(f"What happened{mark}", _events(run)),
            page.section(f"Bad samples{mark}", _bad(run)),
        ]
    if len(runs) > 1:
        body.append(page.section("Settings that differ", _differences(runs)))
    else:
        body.append(page.section("Configuration", page.text_block(yaml.safe_dump(first.config, sort_keys=False))))
    return page.page(f"Run {names}", ", ".join(run.uri for run in runs), body)


def _figures(runs: list[Recorded]) -> str:
    shown: list[tuple[str, str, Callable[[Any], str]]] = [
        ("steps", "steps", number),
        ("images/s, median", "images_per_s", number),
        ("waiting for data, median", "wait_fraction", lambda value: f"{value:.1%}"),
        ("training loss, last", "loss", number),
        ("validation accuracy, last", "val_accuracy", number),
        ("validation accuracy, best", "best_val_accuracy", number),
        ("starts of the trainers", "starts", number),
        ("faults that were mended", "faults", number),
        ("bad samples", "bad_samples", number),
    ]
    figures = [summary(run) for run in runs]
    rows = [
        [name, *("none" if one[key] is None else text(one[key]) for one in figures)] for name, key, text in shown
    ]
    return page.table(rows, ["", *(run.name for run in runs)] if len(runs) > 1 else ())


def _charts(runs: list[Recorded]) -> Iterable[str]:
    def lines(kind: str, key: str, scale: float = 1.0, form: Form = "line") -> list[Series]:
        return [run.series(kind, key, scale=scale, form=form) for run in runs]

    yield page.chart("images/s", lines("train", "images_per_s"))
    yield page.chart("waiting for data, %", lines("train", "wait_fraction", 100))
    yield page.chart("training loss", lines("train", "loss"))
    yield page.chart("validation accuracy", lines("val", "accuracy", form="marked"), from_zero=False)
    yield page.chart("validation loss", lines("val", "loss", form="marked"))
    yield page.chart("learning rate", lines("train", "lr"))
    yield page.chart("strength of the augmentation", lines("train", "strength"))


def _stages(run: Recorded) -> str:
    """Share of the trainers' time, by log interval."""
    train = [record for record in run.of("train") if isinstance(record.get("compute_s"), int | float)]
    names = [f"{stage}_s" for stage in STAGES if stage != "wait"]
    found: dict[str, list[float]] = {name: [] for name in names}
    steps = []
    for record in train:
        whole = sum(float(record.get(name, 0)) for name in names)
        if whole > 0:
            steps.append(record["step"])
            for name in names:
                found[name].append(100 * float(record.get(name, 0)) / whole)
    series = [Series(name.removesuffix("_s"), steps, values) for name, values in found.items()]
    return page.chart("of the time that is not waited, %", series)


def _pool(run: Recorded) -> str:
    matches = [(record["step"], _POOL_SIZE.search(str(record.get("text")))) for record in run.of("scale")]
    sizes = [(step, float(match[1])) for step, match in matches if match]
    series = Series("actors", [step for step, _ in sizes], [size for _, size in sizes], "marked")
    return page.chart("transform actors asked for", [series])


def _events(run: Recorded) -> str:
    happened = []
    for record in run.records:
        match record.get("kind"):
            case "start":
                happened.append((number(record["step"]), "start", f"{record.get('workers')} trainers"))
            case "fault" | "scale" as kind:
                happened.append((number(record["step"]), kind, str(record.get("text"))))
    rows = [*happened[:_MAX_ROWS]]
    if len(happened) > _MAX_ROWS:
        rows.append(("…", "", f"{len(happened) - _MAX_ROWS} more"))
    return page.table(rows, ["step", "", ""]) + (page.paragraph(told(run.unreadable)) if run.unreadable else "")


def _bad(run: Recorded) -> str:
    seen = {(r.get("store"), r.get("index")): r for r in run.bad}
    rows = [
        [title_of(store, index, r.get("name", "")), str(r.get("error"))]
        for (store, index), r in list(seen.items())[:_MAX_ROWS]
    ]
    if len(seen) > _MAX_ROWS:
        rows.append(["…", f"{len(seen) - _MAX_ROWS} more in the run's quarantine"])
    return page.table(rows, ["sample", "what is wrong"])


def _differences(runs: list[Recorded]) -> str:
    flat = [dict(_flat(run.config)) for run in runs]
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = [[name, *(one.get(name, "not there") for one in flat)] for name in names]
    return page.table(
        [row for row in rows if len(set(row[1:])) > 1] or [["none", *[""] * len(runs)]],
        ["", *(run.name for run in runs)],
    )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", json.dumps(value)
