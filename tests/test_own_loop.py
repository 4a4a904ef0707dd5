"""Train functions of the pages that two processes run, and hooks of DDP; tests/test_docs.py runs the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documented import ROOT, blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watched import lines, planned

EVERY, DIES_AT = 8, 18
FUNCTIONS = {"train_sharded": "own-loop.md", "train_ray": "integrations.md"}


def gradients_with_hooks(rank: int, world_size: int, folder: str) -> None:
    """In a rank of gloo: the page's hooks give the average of the ranks, as closely as each is meant to."""
    (code,) = (code for code in blocks("python", ROOT / "docs" / "own-loop.md") if "register_comm_hook" in code)
    names: dict[str, Any] = {}
    exec(compile(code, "own-loop.md", "exec"), names)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size)
    try:
        found = {}
        for kind, options in {"plain": None, "bf16": {}, "power": {"rank": 2, "after_steps": 3}}.items():
            torch.manual_seed(0)
            parallel = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)))
            if options is not None:
                names["compress_gradients"](parallel, **options)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(5):
                parallel.zero_grad()
                with parallel.no_sync():
                    parallel(torch.randn(16, 64, generator=generator)).square().mean().backward()
                parallel(torch.randn(16, 64, generator=generator)).square().mean().backward()
                own = torch.cat([p.grad.flatten() for p in parallel.parameters() if p.grad is not None])
                found.setdefault(kind, []).append(own)
            each = [torch.empty_like(own) for _ in range(world_size)]
            dist.all_gather(each, own)
            assert all(torch.equal(own, other) for other in each), "ranks with different gradients"
        for plain, bf16 in zip(found["plain"], found["bf16"], strict=True):
            torch.testing.assert_close(bf16, plain, rtol=2**-6, atol=float(plain.abs().max()) * 2**-7)
            assert torch.equal(bf16, bf16.bfloat16().float()) and not torch.equal(bf16, plain)
        equal = [torch.allclose(power, plain) for power, plain in zip(found["power"], found["plain"], strict=True)]
        assert equal[:3] == [True] * 3 and not equal[4]  # then the matrices are of rank 2
        first = found["power"][4][: 64 * 32].view(32, 64)
        assert torch.linalg.matrix_rank(first, rtol=1e-4) == 2
    finally:
        dist.destroy_process_group()


def test_the_hooks_of_ddp_compress_the_gradient_of_each_step(tmp_path: Path) -> None:
    gradients_with_hooks(0, 1, str(tmp_path))


@pytest.mark.soak  # 20 s for two more processes
def test_the_hooks_of_ddp_give_two_ranks_the_average_of_their_gradients(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(gradients_with_hooks, (2, str(tmp_path)), nprocs=2)


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
        assert after == planned(plan, rank, 2, from_step=2 * EVERY)
    assert result.metrics["accuracy"] > 0.5
