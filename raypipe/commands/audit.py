"""The command `audit`, which checks a run's record of hashes, and makes micro-batches of it again."""

from __future__ import annotations

import secrets
import time

from raypipe.config import ByStore
from raypipe.printing import Result, print_table, told


def audit(
    folder: str,
    *,
    samples: int = 20,
    all: bool = False,
    seed: int = 0,
    root: str = "",
    train: ByStore = "",
    val: str = "",
    train_transform: str = "",
    val_transform: str = "",
    augment: str = "",
    trust_run_code: bool = False,
) -> Result:
    """Check a run's hashes, and make random micro-batches again to compare them.

    A run records them with train.log "digest", your own loop with raypipe.loader(…, log_digest=True). The exit
    code is 1 if anything is wrong.

    Examples:
        raypipe audit runs/20261121-104600-3fa2
        raypipe audit runs/20261121-104600-3fa2 --all

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.
        samples: micro-batches to make again, chosen at random; 0 = check only the record.
        all: make all of them again.
        seed: seed of the choice; 0 = a new one each time.
        root: the run's root, or that of one of its epochs, as it was published.
        train: the training store, where it is now; {NAME: STORE, …} of a mixture.
        val: the validation store, where it is now.
        train_transform: MODULE:NAME of a transform that was an object.
        val_transform: the same for validations.
        augment: MODULE:NAME of a device augmentation that was an object.
        trust_run_code: audit a run whose folder another user owns, with the code that it names.
    """
    from rich.console import Console
    from rich.progress import track

    # they import torch
    from raypipe.history.audited import AuditedRecord
    from raypipe.history.recorded import RecordedRun, given_of

    begun = time.perf_counter()
    given = given_of(
        train=train,
        val=val,
        train_transform=train_transform,
        val_transform=val_transform,
        augment=augment,
    )
    run = RecordedRun(folder, trust_run_code, **given)
    record = AuditedRecord(run)
    record.check_record()
    if root:
        record.check_root(root)
    seed = seed or secrets.randbelow(1 << 31) + 1
    places = record.places if all else record.choose(samples, seed)
    console = Console(stderr=True)
    text = "making micro-batches again"
    record.compare(track(places, text, console=console, transient=True))
    return {
        "run_dir": folder,
        "ok": not record.findings,
        "root": record.root,
        "epochs": {str(number): epoch for number, epoch in record.epochs.items()},
        "recorded": len(record.places),
        "compared": record.num_compared,
        "compared_finished": record.num_finished,
        "not_compared_finished": record.uncompared,
        "seed": None if all else seed,
        "findings": [finding._asdict() for finding in record.findings],
        "differences": run.differences,
        "seconds": time.perf_counter() - begun,
    }


def print_audit(result: Result) -> None:
    """Print what was checked, each finding, and the verdict."""
    rows = told(result, "run_dir", "epochs", "findings", "differences", "ok")
    epochs = result["epochs"].values()
    num_whole = sum(epoch["is_complete"] for epoch in epochs)
    rows["epochs"] = f"{len(epochs)}, {num_whole} with all of their micro-batches"
    if "seed" in rows:
        rows["seed"] = str(rows["seed"])
    print_table(result["run_dir"], rows)
    for finding in result["findings"]:
        print(f"{finding['kind']}: {finding['text']}")
    for sentence in result["differences"]:
        print(sentence)
    print(_verdict(result))


def _verdict(result: Result) -> str:
    num = len(result["findings"])
    if num:
        return f"{num} finding{'s' if num > 1 else ''}"
    compared = result["compared"]
    if compared == result["recorded"]:
        return "the record is whole, and all micro-batches are as it says"
    if not compared:
        return "the record is whole; no micro-batch was made again"
    least = 1 - 0.05 ** (1 / compared)
    return (
        f"the record is whole, and {compared} random micro-batches are as it says: if {least:.0%} or more of them "
        "were altered, this would have been seen with 95 %"
    )
