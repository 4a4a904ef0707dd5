"""The command `when`, which finds the steps of a run that draw a sample. Starts no Ray."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from raypipe.errors import ConfigError
from raypipe.printing import print_rows, printable

if TYPE_CHECKING:
    from raypipe.history.drawn_at import SampleHistory

_MAX_ROWS = 40


def when(
    folder: str,
    sample: str = "",
    *,
    bad: bool = False,
    flagged: bool = False,
    split: Literal["train", "val"] = "train",
    train: str | dict[str, str] = "",
    val: str = "",
    trust_run_code: bool = False,
) -> dict[str, Any]:
    """Find the steps of a run that drew a sample, and those that will draw it.

    Steps are counted as in metrics.jsonl and by `raypipe replay`. All draws of the run are made to find the
    sample's, some ten million a second. A name is looked for among all names of the store.

    Examples:
        raypipe when runs/20261121-104600-3fa2 48211
        raypipe when runs/20261121-104600-3fa2 cat/0001.jpg --json
        raypipe when runs/20261121-104600-3fa2 --bad
        raypipe when runs/20261121-104600-3fa2 --flagged

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.
        sample: the sample's index, or the store's name for it, or the end of the name, such as cat/0001.jpg; in a
            mixture the index counts through all stores.
        bad: find all samples that the run could not use instead, which its quarantine/ records.
        flagged: list the micro-batches that the loop has flagged instead, by `loader.flag`.
        split: the store that has the sample, train or val.
        train: the training store, where it is now; {NAME: STORE, …} of a mixture.
        val: the validation store, where it is now.
        trust_run_code: open the folder although another user owns it, and run the code that it names.

    Returns:
        `run_dir`, `step` (the steps that are done), `to_step` (the last one), and `samples`: `index`, `name`,
        `split`, `error` (why it is bad), `num_drawn`, `num_to_come`, and its `draws`. A draw has `epoch`, `step`,
        `rank`, `micro`, `row`, `has_come`, `was_bad`, and `replaced_by` or `instead_of` where one was replaced.
        With `flagged`, `flags` instead: `epoch`, `step`, `rank`, `micro`, `reason`, `samples`.

    Raises:
        ConfigError: there is no such run or sample.
    """
    from raypipe.history.drawn_at import History
    from raypipe.history.recorded import given_of, open_run
    from raypipe.metrics.flags import read_flags
    from raypipe.storage.filesystem import as_uri

    if [bool(sample), bad, flagged].count(True) != 1:
        raise ConfigError(
            "raypipe when needs one of: a sample, --bad for all bad ones, --flagged for what the loop has flagged"
        )
    run = open_run(folder, trust_run_code=trust_run_code, **given_of(train, val))
    history = History(run)
    samples: list[SampleHistory] = []
    flags: list[dict[str, Any]] = []
    if bad:
        samples = history.bad()
    elif flagged:
        flags = read_flags(as_uri(run.address))
    else:
        samples = [history.of(index_or_name(sample), split)]
    return {
        "run_dir": folder,
        "step": history.num_done,
        "to_step": run.num_steps,
        "differences": run.differences,
        "flags": flags if flagged else None,
        "samples": [_plain(each) for each in samples],
    }


def index_or_name(text: str) -> int | str:
    """Return an index as a number, also a negative one, for the error; with leading zeros it is a name."""
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and digits == str(int(digits))
    return int(text) if is_number else text


def _plain(sample: SampleHistory) -> dict[str, Any]:
    return {
        "index": sample.index,
        "name": sample.name,
        "split": sample.split,
        "error": sample.error,
        "num_drawn": sample.num_drawn,
        "num_to_come": sample.num_to_come,
        "draws": [asdict(draw) for draw in sample.draws],
    }


def print_when(result: dict[str, Any]) -> None:
    """Print the result of `when`: the draws of a sample, or a line for each bad one."""
    print(f"{result['run_dir']}: step {result['step']:,} of {result['to_step']:,}")
    for sentence in result["differences"]:
        print(printable(f"note: {sentence}"))
    if result["flags"] is not None:
        _print_flags(result["flags"])
        return
    samples = result["samples"]
    if len(samples) == 1:
        _print_draws(samples[0])
        return
    if not samples:
        print("no bad samples")
        return
    header = ["index", "name", "store", "drawn", "to come", "steps", "error"]
    rows = [
        [
            str(sample["index"]),
            sample["name"],
            sample["split"],
            str(sample["num_drawn"]),
            str(sample["num_to_come"]),
            _some_steps(sample["draws"]),
            sample["error"],
        ]
        for sample in samples
    ]
    print_rows(header, rows)


def _print_flags(flags: list[dict[str, Any]]) -> None:
    if not flags:
        print("nothing was flagged")
        return
    names = ["epoch", "step", "rank", "micro", "reason"]
    rows = [[str(flag[name]) for name in names] for flag in flags]
    print_rows(names, rows)


def _some_steps(draws: list[dict[str, Any]]) -> str:
    steps = [f"{draw['step']:,}" for draw in draws]
    return " ".join(steps[:3]) + (" …" if len(steps) > 3 else "")


def _print_draws(sample: dict[str, Any]) -> None:
    """Print a sample's draws, those around the run's place if there are many."""
    title = f"sample {sample['index']}"
    if sample["name"]:
        title += f" ({sample['name']})"
    if sample["error"]:
        title += f", bad: {sample['error']}"
    print(printable(title))
    print(f"drawn {sample['num_drawn']} times, {sample['num_to_come']} to come")
    draws = sample["draws"]
    first = max(0, min(sample["num_drawn"] - _MAX_ROWS // 2, len(draws) - _MAX_ROWS))
    rows = [
        [
            str(draw["epoch"]),
            f"{draw['step']:,}",
            str(draw["rank"]),
            str(draw["micro"]),
            str(draw["row"]),
            _state(draw),
        ]
        for draw in draws[first : first + _MAX_ROWS]
    ]
    if rows:
        print_rows(["epoch", "step", "rank", "micro", "row", ""], rows)
    if len(draws) > len(rows):
        print(f"{len(draws) - len(rows)} more: --json has all")


def _state(draw: dict[str, Any]) -> str:
    """Say in words whether a draw has come."""
    if draw["instead_of"] is not None:
        return f"in place of bad sample {draw['instead_of']}"
    if not draw["has_come"]:
        return "to come"
    if not draw["was_bad"]:
        return "drawn"
    if draw["replaced_by"] is None:
        return "left out, with weight 0"
    return f"replaced by {draw['replaced_by']}"
