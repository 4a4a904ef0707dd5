"""What is kept for a machine with a GPU: its script, and benchmarks/results/gpu.md's list of what was not run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from eager_cuda import LONG, UNLIKE, EagerCuda

from raypipe.device.fused import PRESETS

from waiting import waiting_is_an_error  # isort: skip

ROOT = Path(__file__).parents[2]
TESTS = {
    path.stem: path.read_text()
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
}
SCRIPT = (ROOT / "tests" / "gpu" / "run").read_text()
STEPS = [
    shlex.split(line.partition("step ")[2])
    for line in SCRIPT.splitlines()
    if re.match(r"(SHOWN=\d+ )?step ", line)
]


def rows() -> str:
    """The table of what was not run."""
    return (
        (ROOT / "benchmarks" / "results" / "gpu.md")
        .read_text()
        .partition("\n## What was not run\n")[2]
    )


def skipped_where(condition: str) -> set[str]:
    """Tests that are skipped by a condition."""
    found: set[str] = set()
    for text in TESTS.values():
        names = re.findall(
            rf"^(\w+) = pytest.mark.skipif\({condition}", text, re.MULTILINE
        )
        marks = "|".join([rf"pytest\.mark\.skipif\({condition}", *names])
        found |= set(
            re.findall(
                rf"^@(?:{marks}).*\n(?:@.*\n)*def (test_\w+)", text, re.MULTILINE
            )
        )
    return found


def test_the_script_ends_within_40_minutes_and_what_it_runs_is_there() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "tests" / "gpu" / "run")], check=True)
    assert [name for name, *_ in STEPS] == [
        "doctor",
        "tests",
        "cluster-tests",
        "first-run",
        "benchmark",
    ]
    assert sum(int(limit) for _, limit, *_ in STEPS) <= 40 * 60
    for _, _, *command in STEPS:
        for word in command:
            assert (
                "/" not in word or word.startswith("$logs") or (ROOT / word).exists()
            ), word


def test_the_script_names_what_an_offline_machine_needs() -> None:
    """All that raypipe needs, by the names of wheels; pytest with what its options here ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w-]+", each)[0].lower() for each in project["dependencies"]}  # type: ignore[index]
    known = {"opencv-python-headless": "opencv", "ray": "ray"}
    named = set(re.findall(r"[\w-]+", SCRIPT.lower().replace("_", "-")))
    assert {known.get(each, each) for each in needed} | {
        "pytest-timeout",
        "pytest-xdist",
    } <= named


def test_the_page_lists_what_needs_a_gpu_and_how_to_prove_it() -> None:
    listed = set(
        re.findall(r"`(test_\w+)(?:\.py)?[^`]*`|tests/gpu/(test_\w+)\.py", rows())
    )
    names = {one or other for one, other in listed}
    of_two_gpus = skipped_where(r"torch\.cuda\.device_count\(\) < 2")
    assert of_two_gpus and of_two_gpus <= names
    for row in rows().splitlines():
        if row.startswith("| ") and not row.startswith(("| what", "| ---")):
            assert "`" in row.rpartition(" | ")[2] or row.startswith("| **"), (
                f"no command: {row}"
            )


def test_what_the_page_and_the_pretended_device_name_is_there() -> None:
    for name in (
        {name.partition("[")[0] for name in UNLIKE}
        | LONG
        | set(re.findall(r"`(test_\w+)`", rows()))
    ):
        assert name in TESTS or any(
            f"def {name}(" in text for text in TESTS.values()
        ), name


def test_the_pretended_device_finds_what_cuda_would_not_do() -> None:
    with EagerCuda().installed():
        there, here = torch.arange(6.0, device="cuda").view(2, 3), torch.ones(3)
        assert (
            there.is_cuda
            and there.device == torch.device("cuda", 0)
            and (there + 1).sum().item() == 21
        )
        with pytest.raises(RuntimeError, match="on the same device"):
            there + here
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        with waiting_is_an_error():
            there.copy_(here, non_blocking=True)
            for waits in (
                there.sum().item,
                there.cpu,
                lambda: there[there > 1],
                lambda: here.to("cuda"),
            ):
                with pytest.raises(RuntimeError, match="synchronizing"):
                    waits()


def test_the_pretended_device_finds_a_stream_that_nothing_orders() -> None:
    for is_ordered in (True, False):
        cuda = EagerCuda()
        with cuda.installed():
            other, there = torch.cuda.Stream(), torch.zeros(3, device="cuda")
            if is_ordered:
                other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                there.add_(1)
        assert (not cuda.errors) == is_ordered


@pytest.mark.soak
@pytest.mark.cluster
def test_the_benchmark_runs_to_its_end_on_a_cpu() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "cpu",
        "--quick",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"].startswith("CPU (")
    parts = ("resident", "ring", "augmented", "stream", "stream_inline", "small_stream")
    assert all(found[f"{part}_images_per_s"] > 0 for part in parts)
    assert all(found[f"preset_{preset}_host_ms"] > 0 for preset in PRESETS)
    assert found["beside"] > 0 and found["beside_inline"] > 0
