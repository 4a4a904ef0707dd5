"""The command `audit`, which checks a run's record of hashes, and makes micro-batches of it again."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from raypipe.errors import ConfigError
from raypipe.printing import print_table, printable

if TYPE_CHECKING:
    from raypipe.history.audited import AuditedRecord
    from raypipe.history.recorded import RecordedRun


def audit(
    folder: str,
    *,
    samples: int = 20,
    all: bool = False,
    seed: int = 0,
    root: str = "",
    proof: int = 0,
    check: str = "",
    output: str = "",
    train: str | dict[str, str] = "",
    val: str = "",
    train_transform: str = "",
    val_transform: str = "",
    augment: str = "",
    trust_run_code: bool = False,
) -> dict[str, Any]:
    """Check a run's hashes, and make random micro-batches again to compare them.

    A run records them with train.log_digest, your own loop with raypipe.loader(…, log_digest=True). The exit
    code is 1 if anything is wrong.

    Examples:
        raypipe audit runs/20261121-104600-3fa2
        raypipe audit runs/20261121-104600-3fa2 --all
        raypipe audit runs/20261121-104600-3fa2 --proof 48211 --output proof.json
        raypipe audit runs/20261121-104600-3fa2 --check proof.json

    Args:
        folder: the run's folder: the `run_dir` that it printed, a path or a URI.
        samples: micro-batches to make again, chosen at random; 0 = check only the record.
        all: make all of them again.
        seed: seed of the choice; 0 = a new one each time.
        root: the run's root, or with --check the epoch's, as it was published.
        proof: write proofs of this step's micro-batches, without making them; steps count from 1.
        check: a file of proofs: check it, and make its micro-batches again.
        output: the file for the proofs, a local path or a URI.
        train: the training store, where it is now; {NAME: STORE, …} of a mixture.
        val: the validation store, where it is now.
        train_transform: MODULE:NAME of a transform that was an object.
        val_transform: the same for validations.
        augment: MODULE:NAME of a device augmentation that was an object.
        trust_run_code: audit a run whose folder another user owns, with the code and the pickles that it names.
    """
    # they import torch
    from raypipe.history.recorded import open_run

    if bool(proof) != bool(output):
        raise ConfigError("--proof STEP and --output FILE go together")
    begun = time.perf_counter()
    values = {
        "train": train,
        "val": val,
        "train_transform": train_transform,
        "val_transform": val_transform,
        "augment": augment,
    }
    given = {name: value for name, value in values.items() if value}
    run = open_run(folder, trust_run_code=trust_run_code, **given)
    if check:
        result = _checked_proofs(run, check, root)
    elif proof:
        result = _written_proofs(run, proof, output)
    else:
        result = _audited(run, samples, all, seed, root)
    return {"run_dir": folder, **result, "seconds": time.perf_counter() - begun}


def _audited(
    run: RecordedRun, samples: int, all: bool, seed: int, root: str
) -> dict[str, Any]:
    from raypipe.history.audited import AuditedRecord

    record = AuditedRecord(run)
    record.check_tree()
    if root and root != record.root:
        record.find(
            "root", f"the run's root is {record.root}, and the published one is {root}"
        )
    seed = seed or secrets.randbelow(1 << 31) + 1
    if all:
        places = record.places()
    else:
        places = record.choose(samples, seed)
    _compare(record, places)
    return {
        "ok": not record.findings,
        "root": record.root,
        "epochs": {
            str(number): asdict(epoch) for number, epoch in record.epochs.items()
        },
        "recorded": record.num_recorded,
        "compared": record.num_compared,
        "compared_finished": record.num_finished,
        "not_compared_finished": record.uncompared,
        "seed": None if all else seed,
        "findings": [finding._asdict() for finding in record.findings],
        "differences": run.differences if record.findings else [],
    }


def _compare(record: AuditedRecord, places: list[Any]) -> None:
    """Make micro-batches again, with a bar of progress in a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        shown = bar.add_task("making micro-batches again", total=len(places))
        record.compare(places, lambda: bar.advance(shown))


def _written_proofs(run: RecordedRun, step: int, output: str) -> dict[str, Any]:
    from raypipe.history.audited import AuditedRecord
    from raypipe.history.proofs import proof_of
    from raypipe.storage.files import check_place, write_json

    check_place(output)
    record = AuditedRecord(run)
    proofs = [proof_of(record, place) for place in run.micro_batches(step)]
    write_json(output, {"proofs": proofs})
    return {"proofs": len(proofs), "root": proofs[0]["root"], "output": output}


def _checked_proofs(run: RecordedRun, address: str, root: str) -> dict[str, Any]:
    """Check proofs, which needs no record, and make their micro-batches again."""
    from raypipe.history.proofs import holds, read_proofs
    from raypipe.history.recorded import place_of
    from raypipe.history.replay import Replay
    from raypipe.streaming.record.hashes import stream_hash

    replayed = Replay(run)
    wrong = []
    proofs = read_proofs(address)
    for proof in proofs:
        if not holds(proof):
            name = str(proof["micro_batch"])
            wrong.append(
                f"{name}: its path does not lead to the root, so one of both was changed"
            )
        elif root and proof["root"] != root:
            wrong.append(
                f"{proof['micro_batch']}: the proof is of another root, {proof['root']}"
            )
        place = run.check_place(place_of(str(proof["micro_batch"])))
        made = stream_hash(replayed.on_cpu(place)).hex()
        if made != proof["hash"]:
            wrong.append(
                f"{place}: made again it has the hash {made}, and the proof is of {proof['hash']}"
            )
    return {
        "ok": not wrong,
        "proofs": len(proofs),
        "roots": sorted({str(proof["root"]) for proof in proofs}),
        "findings": [{"kind": "proof", "text": text} for text in wrong],
    }


def print_audit(result: dict[str, Any]) -> None:
    """Print what was checked, each finding, and the verdict."""
    rows = {
        name: value
        for name, value in result.items()
        if name not in ("run_dir", "epochs", "findings", "differences", "ok")
        and value not in ("", None)
    }
    if "epochs" in result:
        rows["epochs"] = len(result["epochs"])
    if "seed" in rows:
        rows["seed"] = str(rows["seed"])
    print_table(result["run_dir"], rows)
    for finding in result.get("findings", []):
        print(printable(f"{finding['kind']}: {finding['text']}"))
    for sentence in result.get("differences", []):
        print(printable(sentence))
    if "ok" in result:
        print(_verdict(result))


def _verdict(result: dict[str, Any]) -> str:
    num = len(result["findings"])
    if num:
        return f"{num} finding{'s' if num > 1 else ''}"
    if "proofs" in result:
        return "the proofs hold, and their micro-batches are the run's"
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
