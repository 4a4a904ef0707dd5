"""FSDP2 as docs/own-loop.md has it, in two processes; tests/test_docs.py runs the rest of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documented import ROOT, blocks
from watched import lines, planned

EVERY, DIES_AT = 8, 18


@pytest.mark.cluster
@pytest.mark.soak  # 60 s; tests/test_docs.py has a program that fails and goes on
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("two_cpus")
def test_sharded_training_of_two_ranks_that_is_killed_in_mid_epoch_goes_on_with_the_samples_of_an_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    page = blocks("python", ROOT / "docs" / "own-loop.md")
    (sharded,) = (code for code in page if "fully_shard" in code)
    watched = f"import watched\n{sharded}".replace("raypipe.loader(", f"watched.loader({str(tmp_path)!r}, 18, 0, ")
    for code in [*(code for code in page[:3] if "TorchTrainer(" not in code), watched]:
        exec(compile(code, "own-loop.md", "exec"), names)
    result = (
        names["TorchTrainer"](
            names["train_sharded"],
            train_loop_config={},
            scaling_config=names["ScalingConfig"](num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=names["RunConfig"](
                name="sharded",
                storage_path=str(tmp_path / "runs"),
                failure_config=names["FailureConfig"](max_failures=1),
            ),
        )
    ).fit()
    plan = names["spec"].plan
    assert plan.steps_per_epoch == 11 and plan.config.epochs == 2
    for rank in range(2):
        seen = lines(tmp_path, f"seen-{rank}")
        resumed = next(i for i in range(1, len(seen)) if seen[i] in seen[:i])
        before, after = seen[:resumed], seen[resumed:]
        assert before == planned(plan, rank, 2)[: len(before)]
        assert after == planned(plan, rank, 2, from_step=2 * EVERY)
    assert result.metrics["accuracy"] > 0.5
