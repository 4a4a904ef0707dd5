"""A run whose nodes have yet to come waits for them in a few lines, without a fault."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from local_head import LocalHead
from pictures import samples
from signalled import started

from raypipe.commands.status import status
from raypipe.stores.destination import write_atomically

# The autoscaler looks for requests so seldom, which is longer than two tries of Ray Train's.
_LOOK_S = 45
_LATE_ANSWER = re.compile(
    r"[^\n]*Failed to send resource request.*?GetTimeoutError[^\n]*\n", re.DOTALL
)
# Ray's line about clusters of other tests
_OTHER_CLUSTERS = "Found multiple active Ray instances"


@pytest.mark.system
@pytest.mark.cluster
def test_a_start_from_zero_nodes_is_told_in_few_lines_and_is_no_fault(
    tmp_path: Path,
) -> None:
    write_atomically(str(tmp_path / "train.parquet"), samples(64), tuple("abcde"))
    node = {
        "resources": {"CPU": 2, "object_store_memory": 100 << 20},
        "node_config": {},
        "labels": {"raypipe": "transform"},
        "min_workers": 0,
        "max_workers": 2,
    }
    head = LocalHead(0, node_types={"cpu": node})
    head.environment["AUTOSCALER_UPDATE_INTERVAL_S"] = str(_LOOK_S)
    states = set[str]()
    with head:
        environment = head.environment | {"RAY_ADDRESS": head.gcs_address}
        run = started(
            [
                f"--storage_path={tmp_path}",
                "--name=one",
                f"--store.train={tmp_path / 'train.parquet'}",
                "--train.model=small",
                "--transform.size=12",
                "--train.use_gpu=false",
                "--train.num_workers=1",
                "--plan.micro_batch_size=8",
                "--plan.global_batch_size=16",
                "--plan.epochs=1",
            ],
            environment["RAY_TMPDIR"],
            environment,
            subprocess.STDOUT,
        )
        said = list[str]()
        assert run.stdout
        for line in run.stdout:
            said.append(line)
            if "have no room" in line or "has no room" in line:
                states.add(status(str(tmp_path / "one"))["state"])
        assert run.wait() == 0, said
    begin = next(i for i, line in enumerate(said) if "starting 1 trainer" in line)
    end = next(i for i, line in enumerate(said) if "step " in line and i > begin)
    # Each of these nodes sends the lines of the whole machine. A matter of pace is how often progress is told, and
    # the warning of Ray Train, with a traceback, that its coordinator takes some seconds to answer.
    text = _LATE_ANSWER.sub("", "".join(said[begin:end]))
    sentences = {re.sub(r"\d+", "N", line) for line in text.splitlines()}
    told = [line for line in sentences if _OTHER_CLUSTERS not in line]
    assert len(told) <= 10, text
    assert states == {"waiting"}, said
    records = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in records if json.loads(line)["kind"] == "fault"]
