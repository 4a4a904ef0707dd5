"""Proofs that a micro-batch is in a run's record, which need only the root of its epoch to be checked."""

from __future__ import annotations

from typing import Any

from raypipe.errors import ConfigError
from raypipe.history.audited import AuditedRecord
from raypipe.history.record_checks import damage_told, whole_number
from raypipe.history.recorded import place_of
from raypipe.plan.places import MicroBatchId
from raypipe.storage.files import read_json
from raypipe.streaming import merkle
from raypipe.streaming.digest_log import leaf_of


def proof_of(record: AuditedRecord, place: MicroBatchId) -> dict[str, Any]:
    """Return the proof that a micro-batch and its hash are under the root of their epoch, as JSON.

    Raises:
        ConfigError: it is not in the record.
    """
    leaves = record.epoch_record(place.epoch).leaves()
    places = [of_leaf for of_leaf, _ in leaves]
    if place not in places:
        raise ConfigError(f"{place} is not in the record of {record.run.address}")
    index = places.index(place)
    contents = [content for _, content in leaves]
    return {
        "micro_batch": str(place),
        "hash": contents[index].decode().rpartition(" ")[2],
        "index": index,
        "micro_batches": len(leaves),
        "path": [node.hex() for node in merkle.proof(contents, index)],
        "root": merkle.root(contents).hex(),
    }


def read_proofs(address: str) -> list[dict[str, Any]]:
    """Read the proofs of a file that `raypipe audit --proof` wrote.

    Raises:
        ConfigError: it cannot be read, or has no proofs.
    """
    content = read_json(address)
    proofs = content.get("proofs") if isinstance(content, dict) else None
    if not isinstance(proofs, list) or not proofs:
        raise ConfigError(
            f"{address} has no proofs: make it with `raypipe audit RUN --proof STEP --output FILE`"
        )
    return proofs


def holds(proof: dict[str, Any]) -> bool:
    """Return whether a proof's path leads from its micro-batch and hash to its root.

    Raises:
        ConfigError: it is not a proof.
    """
    with damage_told(f"the proof {str(proof)[:200]}"):
        place = place_of(str(proof["micro_batch"]))
        path = [bytes.fromhex(node) for node in proof["path"]]
        index = whole_number(proof["index"], "index")
        num_leaves = whole_number(proof["micro_batches"], "micro_batches")
        leaf = leaf_of(place, str(proof["hash"]))
        root = bytes.fromhex(proof["root"])
    return merkle.is_proven(leaf, index, num_leaves, path, root)
