"""The command `replay`: steps of a run made again, as a table of samples and a picture. Starts no Ray."""

from __future__ import annotations

import json
import re
from dataclasses import replace as changed
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.config import ByStore
from raypipe.errors import ConfigError, RaypipeError
from raypipe.printing import Result, print_rows, print_table, told

if TYPE_CHECKING:
    from raypipe.commands.picture import Tile
    from raypipe.history.replay import Replay
    from raypipe.plan.places import MicroBatchId

# Samples in a picture; each has two tiles or more.
_MAX_PICTURES = 128
_TILES_A_LINE = 12
# Rows that are printed; a file takes any number.
_MAX_ROWS = 4096
_COLUMNS = ("step", "micro", "row", "index", "label", "weight", "seed", "drawn", "name")
_MAX_NUMBERS = 8  # an operation shows these
_SEED_LETTERS = 8  # the table shows these of 32
_STEPS = re.compile(r"(\d{1,15})(?:\.\.(\d{1,15}))?", re.ASCII)


def replay_steps(
    folder: str,
    *,
    step: str = "",
    epoch: int | None = None,
    rank: int | None = None,
    micro: int | None = None,
    output: str = "replay.png",
    compare: str = "",
    train: ByStore = "",
    val: str = "",
    train_transform: str = "",
    val_transform: str = "",
    augment: str = "",
    anyway: bool = False,
    trust_run_code: bool = False,
) -> Result:
    """Show the samples of a step of a run, and its images.

    The images are shown as the CPU made them, and as the model saw them after the augmentation on the device.

    Examples:
        raypipe replay runs/first --step 48211
        raypipe replay runs/first --step 48200..48220 --rank 1 -o rows.jsonl
        raypipe replay runs/first --compare runs/second

    Args:
        folder: the run's folder: the `run_dir` that it printed, or that your own loop gave; a path or a URI.
        step: a step, counted from 1 as in metrics.jsonl, several, FIRST..LAST, or a micro-batch's name, such as
            val-e0002-s000000-m000.
        epoch: all steps of this epoch, counted from 0 as in metrics.jsonl; with --step, steps within it.
        rank: only the micro-batches of this rank.
        micro: only the micro-batch of this number in its step.
        output: a .png for the picture, or a .jsonl for all rows of the table; empty = neither.
        compare: the folder of another run: show where the two part.
        train: the training store, where it is now; {NAME: STORE, …} of a mixture.
        val: the validation store, where it is now.
        train_transform: MODULE:NAME of a transform that was an object.
        val_transform: the same for validations.
        augment: MODULE:NAME of a device augmentation that was an object.
        anyway: make pixels of stores whose contents have changed since the run.
        trust_run_code: open the folder although another user owns it, and run the code that it names.
    """
    from raypipe.history.recorded import given_of
    from raypipe.history.replay import Replay

    given = given_of(
        train=train,
        val=val,
        train_transform=train_transform,
        val_transform=val_transform,
        augment=augment,
    )
    replay = Replay(folder, trust_run_code, anyway, **given)
    result: Result = {"run_dir": folder, "differences": replay.differences}
    if compare:
        other = Replay(compare, trust_run_code, anyway, **given)
        result |= {"run_dir": replay.address, "with": other.address}
        result["differences"] = replay.differences + other.differences
        return result | replay.compare(other)
    places = _places(replay, step, epoch, rank, micro)
    result["micro_batches"] = len(places)
    if output.endswith(".jsonl"):
        return result | _written(replay, places, output)
    num_rows = len(places) * replay.plan.config.micro_batch_size
    if num_rows > _MAX_ROWS:
        raise ConfigError(
            f"these are {num_rows:,} samples, and {_MAX_ROWS:,} are printed at most: name fewer steps, or write "
            "them to a file with -o rows.jsonl"
        )
    result["samples"] = [row for place in places for row in replay.samples_of(place)]
    if output:
        result |= _picture(replay, places, result["samples"], output)
    return result


def _places(
    run: Replay, step: str, epoch: int | None, rank: int | None, micro: int | None
) -> list[MicroBatchId]:
    """The micro-batches that the options name."""
    if "-e" in step:
        return [run.place_of(step)]
    if not step and epoch is None:
        raise ConfigError(
            f"name a step, --step N, from 1 to {len(run):,}, or --epoch E"
        )
    steps = range(1, len(run) + 1) if epoch is None else run.steps_in(epoch)
    if step:
        match = _STEPS.fullmatch(re.sub("[,_]", "", step))
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise ConfigError(
                f"--step must be a step, N, or several, FIRST..LAST, got {step!r}"
            )
        if last > len(steps):
            whose = run.address if epoch is None else f"epoch {epoch}"
            raise ConfigError(
                f"{whose} has the steps 1 to {len(steps):,}, and no step {last:,}"
            )
        steps = steps[first - 1 : last]
    return [
        place
        for number in steps
        if len(steps) == 1 or not run.is_skipped(number)
        for place in run.micro_batches(number, rank, micro)
    ]


def _written(replay: Replay, places: list[MicroBatchId], output: str) -> Result:
    """Write the rows of micro-batches to a file of JSON lines."""
    num_rows = 0
    try:
        with Path(output).open("w") as file:
            for place in places:
                rows = replay.samples_of(place)
                file.writelines(json.dumps(row) + "\n" for row in rows)
                num_rows += len(rows)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    return {"rows": num_rows, "output": output}


def _tiles(
    replay: Replay, places: list[MicroBatchId]
) -> tuple[list[list[Tile]], list[str]]:
    """The tiles of each sample, as far as a picture has room, and the names of their columns."""
    from raypipe.commands.preview_tiles import Preview

    groups: list[list[Tile]] = []
    names: list[str] = []
    for place in places:
        remade = replay.remade(place)
        rows = range(len(remade.host.index))
        tiles, names = Preview(remade.maker).of_micro_batch(remade, rows)
        groups += tiles
        if len(groups) >= _MAX_PICTURES:
            break
    return groups[:_MAX_PICTURES], names


def _picture(
    replay: Replay,
    places: list[MicroBatchId],
    samples: list[Result],
    output: str,
) -> Result:
    """Write the picture of micro-batches, as far as it has room; say why if their pixels cannot be made."""
    if not output.endswith(".png") or not Path(output).parent.is_dir():
        raise ConfigError(
            f"--output must be a .png or a .jsonl in an existing folder, got {output}"
        )
    from raypipe.commands.picture import draw_tiles, save_picture

    try:
        groups, names = _tiles(replay, places)
    except RaypipeError as error:
        return {"output": None, "no_picture": str(error)}
    for row, group in zip(samples, groups, strict=False):
        label = " ".join(_label(row))
        title = f"step {row['step']}, sample {row['index']} {label}".rstrip()
        group[0] = changed(group[0], lines=[title])
    ends = dict.fromkeys([places[0], places[-1]])
    titles = [f"step {replay.step_of(place)}, {place}" for place in ends]
    title = f"{replay.address}: {' to '.join(titles)}"
    per_line = max(1, min(_TILES_A_LINE // len(names), len(groups)))
    lines = [
        [*chain.from_iterable(groups[first : first + per_line])]
        for first in range(0, len(groups), per_line)
    ]
    save_picture(draw_tiles(lines, title, names * per_line), output)
    return {"output": output, "pictured": len(groups)}


def print_replay(result: Result) -> None:
    """Print a table of samples, or where two runs part."""
    for sentence in result["differences"]:
        print(f"changed: {sentence}")
    if "samples" in result:
        print_rows([list(_COLUMNS), *map(_cells, result["samples"])])
    rows = told(result, "run_dir", "with", "differences", "samples")
    heading = result["run_dir"]
    if "with" in result:
        heading += f" and {result['with']}"
        made = {"made_steps": ", ".join(map(str, result["made_steps"]))}
        rows = told(rows | made)
    print_table(heading, rows)


def _cells(row: Result) -> list[str]:
    """The texts of a row's columns."""
    drawn = [_line(entry) for entry in (*row["drawn"], *row["augmented"])]
    if row["mixed"]:
        drawn.append(_line({"op": "mixed with", **row["mixed"]}))
    if row["bad"]:
        drawn.insert(0, f"stands in for a bad sample ({row['bad']})")
    texts = {
        "label": " ".join(_label(row)),
        "weight": f"{row['weight']:g}",
        "seed": row["seed"][:_SEED_LETTERS],
        "drawn": "; ".join(drawn),
    }
    return [texts.get(name, str(row[name])) for name in _COLUMNS]


def _line(entry: Result) -> str:
    """An operation or a partner with its numbers, on one line."""
    values = {name: value for name, value in entry.items() if value is not None}
    texts = [values.pop("view", ""), values.pop("op")]
    texts += [f"{name} {_numbers(value)}" for name, value in values.items()]
    return " ".join(filter(None, texts))


def _numbers(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return f"{value:.4g}"
    shown = " ".join(map(_numbers, value[:_MAX_NUMBERS]))
    return shown + (" …" if len(value) > _MAX_NUMBERS else "")


def _label(row: Result) -> list[str]:
    """The label of a row and the name of its class, as far as there are any."""
    values = (row["label"], row["class"])
    return [*dict.fromkeys(str(value) for value in values if value is not None)]
