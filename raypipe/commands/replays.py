"""The command `replay`: steps of a run made again, as a table of samples and a picture. Starts no Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError, RaypipeError
from raypipe.printing import print_rows, print_table, printable

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


def replay_steps(
    folder: str,
    *,
    step: str = "",
    epoch: int | None = None,
    rank: int | None = None,
    micro: int | None = None,
    output: str = "replay.png",
    compare: str = "",
    train: str | dict[str, str] = "",
    val: str = "",
    train_transform: str = "",
    val_transform: str = "",
    augment: str = "",
    anyway: bool = False,
    trust_run_code: bool = False,
) -> dict[str, Any]:
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
    from raypipe.history.recorded import given_of, open_run
    from raypipe.history.replay import Replay

    given = given_of(train, val, train_transform, val_transform, augment)
    run = open_run(folder, trust_run_code=trust_run_code, **given)
    replay = Replay(run, anyway)
    if compare:
        other = open_run(compare, trust_run_code=trust_run_code, **given)
        return _compared(replay, Replay(other, anyway))
    places = _places(replay, step, epoch, rank, micro)
    result: dict[str, Any] = {"run_dir": folder, "differences": replay.differences}
    result["micro_batches"] = len(places)
    if output.endswith(".jsonl"):
        return result | _written(replay, places, output)
    num_rows = len(places) * run.plan.config.micro_batch_size
    if num_rows > _MAX_ROWS:
        raise ConfigError(
            f"these are {num_rows:,} samples, and {_MAX_ROWS:,} are printed at most: name fewer steps, or write "
            "them to a file with -o rows.jsonl"
        )
    result["samples"] = [row for place in places for row in replay.samples_of(place)]
    if output:
        result |= _picture(replay, places, output)
    return result


def _places(
    replay: Replay, step: str, epoch: int | None, rank: int | None, micro: int | None
) -> list[MicroBatchId]:
    """The micro-batches that the options name."""
    from raypipe.history.recorded import place_of

    run = replay.run
    if "-e" in step:
        return [run.check_place(place_of(step))]
    if not step and epoch is None:
        raise ConfigError(
            f"name a step, --step N, from 1 to {run.num_steps:,}, or --epoch E"
        )
    of_epoch = range(1, run.num_steps + 1) if epoch is None else run.steps_in(epoch)
    if step:
        first, last = _bounds(step)
        numbers = range(of_epoch.start + first - 1, of_epoch.start + last)
        if epoch is not None and last > len(of_epoch):
            raise ConfigError(
                f"epoch {epoch} has the steps 1 to {len(of_epoch):,}, and no step {last:,}"
            )
    else:
        numbers = of_epoch
    for number in (numbers.start, numbers.stop - 1):
        run.check_step(number)
    if len(numbers) > 1:
        shown = [number for number in numbers if not run.is_skipped(number)]
    else:
        shown = list(numbers)
    return [
        place for number in shown for place in run.micro_batches(number, rank, micro)
    ]


def _bounds(step: str) -> tuple[int, int]:
    """The first and the last step of `N` or `N..M`."""
    first, dots, last = step.replace(",", "").replace("_", "").partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise ConfigError(
            f"--step must be a step, N, or several, FIRST..LAST, got {step!r}"
        )
    bounds = int(first), int(last) if dots else int(first)
    if bounds[1] < bounds[0]:
        raise ConfigError(f"--step {step} ends before it begins")
    return bounds


def _written(replay: Replay, places: list[MicroBatchId], output: str) -> dict[str, Any]:
    """Write the rows of micro-batches to a file of JSON lines."""
    num_rows = 0
    try:
        with Path(output).open("w") as file:
            for line in _lines(replay, places):
                file.write(line)
                num_rows += 1
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    return {"rows": num_rows, "output": output}


def _lines(replay: Replay, places: list[MicroBatchId]) -> Iterator[str]:
    for place in places:
        for row in replay.samples_of(place):
            yield json.dumps(row) + "\n"


def _picture(replay: Replay, places: list[MicroBatchId], output: str) -> dict[str, Any]:
    """Write the picture of micro-batches, as far as it has room; say why if their pixels cannot be made."""
    if not output.endswith(".png") or not Path(output).parent.is_dir():
        raise ConfigError(
            f"--output must be a .png or a .jsonl in an existing folder, got {output}"
        )
    try:
        groups, names = _groups(replay, places)
    except RaypipeError as error:
        return {"output": None, "no_picture": str(error)}
    from raypipe.commands.picture import draw_sheet

    title = f"{replay.run.address}: {_titled(replay, places[0])}"
    if len(places) > 1:
        title += f" to {_titled(replay, places[-1])}"
    per_line = max(1, _TILES_A_LINE // len(names))
    picture = draw_sheet(groups, title, names, per_line)
    try:
        picture.save(output, optimize=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be written: {error}") from error
    return {"output": output, "pictured": len(groups)}


def _titled(replay: Replay, place: MicroBatchId) -> str:
    """The place of a micro-batch for a title, with its name in logs."""
    if place.split == "val":
        return str(place)
    return f"step {replay.run.step_of(place)}, micro-batch {place.micro} ({place})"


def _groups(
    replay: Replay, places: list[MicroBatchId]
) -> tuple[list[list[Tile]], list[str]]:
    """The tiles of each sample, and their names."""
    from raypipe.commands.preview_tiles import Preview
    from raypipe.config import AugmentConfig

    groups: list[list[Tile]] = []
    names: list[str] = []
    previews: dict[int, Preview] = {}
    for place in places:
        room = _MAX_PICTURES - len(groups)
        if not room:
            break
        stream = replay.run.stream_of(place)
        batch = replay.on_cpu(place)
        if id(stream) not in previews:
            augment = stream.augment or AugmentConfig()
            previews[id(stream)] = Preview(stream.spec, augment)
        tiles, names = previews[id(stream)].of_micro_batch(batch, room)
        if stream.augment is None and "augmented" in names:
            # the model saw what the CPU made
            tiles = [group[:1] for group in tiles]
            names = names[:1]
        for row, group in zip(replay.samples_of(place), tiles, strict=False):
            groups.append(_captioned(row, group))
    return groups, names


def _captioned(row: dict[str, Any], group: list[Tile]) -> list[Tile]:
    """The tiles of a sample, above its place, its drawn numbers and its partner."""
    label = row["class"] if row["class"] is not None else row["label"]
    shown = "" if label is None else f": {label}"
    drawn = map(_operation, row["drawn"])
    first = (f"step {row['step']}, sample {row['index']}{shown}", *drawn)
    last = group[-1].lines
    if row["mixed"]:
        last = (*last, _mix(row["mixed"]))
    last = (*last, *map(_operation, row["augmented"]))
    tiles = [changed(group[0], lines=first), *group[1:]]
    if len(tiles) > 1:
        tiles[-1] = changed(tiles[-1], lines=last)
    return tiles


def _operation(entry: dict[str, Any]) -> str:
    """An operation and its numbers on one line."""
    named = {name: value for name, value in entry.items() if name not in ("op", "view")}
    numbers = " ".join(
        (_numbers(value) if name == "numbers" else f"{name} {_numbers(value)}")
        for name, value in named.items()
    )
    return " ".join(filter(None, [entry.get("view", ""), entry["op"], numbers]))


def _numbers(value: Any) -> str:
    if not isinstance(value, list):
        return f"{value:.4g}"
    shown = " ".join(map(_numbers, value[:_MAX_NUMBERS]))
    return shown + (" …" if len(value) > _MAX_NUMBERS else "")


def _mix(mix: dict[str, Any]) -> str:
    box = f", box {_numbers(list(mix['box']))}" if mix["box"] else ""
    return f"mixed with row {mix['partner']} (sample {mix['sample']}), share {mix['share']:.2f}{box}"


def _compared(first: Replay, second: Replay) -> dict[str, Any]:
    from raypipe.history.compared import compare_runs

    found = compare_runs(first, second)
    return {
        "run_dir": first.run.address,
        "with": second.run.address,
        "differences": [*first.differences, *second.differences],
        **found,
    }


def print_replay(result: dict[str, Any]) -> None:
    """Print a table of samples, or where two runs part."""
    for sentence in result["differences"]:
        print(printable(f"changed: {sentence}"))
    if "with" in result:
        _print_compared(result)
        return
    if "samples" in result:
        rows = [_cells(row) for row in result["samples"]]
        print_rows(list(_COLUMNS), rows)
    if result.get("no_picture"):
        print(printable(f"no picture: {result['no_picture']}"))
    names = ("micro_batches", "rows", "pictured", "output")
    shown = {name: result[name] for name in names if result.get(name) is not None}
    print_table(result["run_dir"], shown)


def _cells(row: dict[str, Any]) -> list[str]:
    """The texts of a row's columns."""
    label = "" if row["label"] is None else str(row["label"])
    if row["class"] not in (None, label):
        label = f"{label} {row['class']}"
    drawn = [*map(_operation, row["drawn"]), *map(_operation, row["augmented"])]
    if row["mixed"]:
        drawn.append(_mix(row["mixed"]))
    if row["bad"]:
        drawn.insert(0, f"stands in for a bad sample ({row['bad']})")
    texts = {
        "label": label,
        "weight": f"{row['weight']:g}",
        "seed": row["seed"][:_SEED_LETTERS],
        "drawn": "; ".join(drawn),
    }
    return [texts.get(name, str(row[name])) for name in _COLUMNS]


def _print_compared(result: dict[str, Any]) -> None:
    for name, (one, other) in result["settings"].items():
        print(printable(f"{name}: {one} and {other}"))
    if result["order"] is not None:
        print(f"samples: they part at step {result['order']:,}")
    else:
        print(f"samples: the same for {result['compared_steps']:,} steps")
    made = result["made_steps"]
    if result["unknown"]:
        print(printable(f"pixels: not compared: {result['unknown']}"))
    elif result["pixels"] is not None:
        print(f"pixels: other ones at step {result['pixels']:,}")
    elif made:
        numbers = ", ".join(f"{number:,}" for number in made)
        print(f"pixels: the same at the steps {numbers}")
    if result["loss"] is not None:
        print(f"loss: the records differ from step {result['loss']:,} on")
