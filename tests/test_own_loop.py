"""Train functions of the pages, in two processes that are killed; tests/test_docs.py runs their other code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documented import ROOT, blocks
from watched import lines, planned

EVERY, DIES_AT = 8, 18
FUNCTIONS = {"train_sharded": "own-loop.md", "train_ray": "integrations.md"}


@pytest.mark.cluster
@pytest.mark.soak  # 60 s each; tests/test_docs.py has a program that fails and goes on
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("two_cpus")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_ranks_that_are_killed_in_mid_epoch_go_on_with_the_samples_of_an_unbroken_run(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2, and Ray Train's own utilities."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    own_loop = blocks("python", ROOT / "docs" / "own-loop.md")
    page = blocks("python", ROOT / "docs" / FUNCTIONS[function])
    (code,) = (code for code in page if f"def {function}" in code)
    watched = f"import watched\n{code}".replace(
        "raypipe.loader(", f"watched.loader({str(tmp_path)!r}, {DIES_AT}, 0, "
    )
    needed = [code for code in own_loop[:3] if "TorchTrainer(" not in code] if page == own_loop else []
    for code in [own_loop[0], *(needed or page[:1]), watched]:
        exec(compile(code, FUNCTIONS[function], "exec"), names)
    result = (
        names["TorchTrainer"](
            names[function],
            train_loop_config={},
            scaling_config=names["ScalingConfig"](num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=names["RunConfig"](
                name=function,
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
        # Where Ray Train has not seen the checkpoint of step 16 yet, it has that of the first epoch's end.
        assert after in [planned(plan, rank, 2, from_step=step) for step in (2 * EVERY, plan.steps_per_epoch)]
    assert result.metrics["accuracy"] > 0.5
