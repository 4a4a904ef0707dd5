"""Commands, settings, code and links of README.md and docs/: all are parsed, programs of some pages are run."""

from __future__ import annotations

import ast
import functools
import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from documented import PAGES, ROOT, blocks, commands, defined
from small_runs import parse_run
from tiers import is_soak
from without_ray import one_thread, only_rank

import raypipe
from raypipe.commands import cli, settings
from raypipe.config import RunConfig
from raypipe.metrics.records import read_records
from raypipe.stores import digits_stores
from raypipe.transform.presets import build_transform

from pictures import samples, write_tar  # isort: skip

SEARCH = runpy.run_path(str(ROOT / "jobs" / "tune.py"))["search"]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_understood(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.yaml", "policy.yaml"):
        (tmp_path / name).write_text(blocks("yaml", ROOT / "README.md")[0])
    if words[0] != "raypipe":
        args = [
            f"{tmp_path}/run.yaml" if word.endswith("best.yaml") else word
            for word in words[1:]
        ]
        # which is not asked for here
        args = [word.replace("s3://bucket/runs/", f"{tmp_path}/") for word in args]
        own = settings.parse_command(
            "", SEARCH if words[0].endswith("tune.py") else cli.COMMANDS["train"], args
        )
        assert isinstance(own["run"], RunConfig)
        return
    called = []

    def recorded(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def record(*_: Any, **__: Any) -> dict[str, Any]:
            called.append(command)
            return {}

        return record

    (tmp_path / "runs" / "20261121-104600-3fa2").mkdir(parents=True)
    shutil.copy(
        tmp_path / "run.yaml",
        tmp_path / "runs" / "20261121-104600-3fa2" / "config.yaml",
    )
    monkeypatch.setattr(
        cli,
        "COMMANDS",
        {name: recorded(command) for name, command in cli.COMMANDS.items()},
    )
    cli.main(words[1:])
    assert len(called) == 1


def test_all_settings_are_settings(tmp_path: Path) -> None:
    for block in blocks("yaml"):
        (tmp_path / "some.yaml").write_text(block)
        run = parse_run([f"--config={tmp_path / 'some.yaml'}"], None)
        assert set(yaml.safe_load(block)) <= set(vars(run))
        for transform in (run.transform.train, run.transform.val):
            if ":" not in str(transform):  # the reader's own code
                is_array = run.transform.decode == "array"
                build_transform(transform, run.transform.final_size, is_array)


@pytest.mark.parametrize("code", blocks("python"))
def test_all_code_is_python_and_knows_what_there_is(code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "raypipe"
        ):
            assert hasattr(raypipe, node.attr), node.attr


def anchors(page: Path) -> set[str]:
    """What a link may lead to within a page: its headings, as GitHub names them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *RESULTS]


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_index_has_every_page() -> None:
    linked = set(
        re.findall(
            r"\]\(([\w-]+\.(?:md|ipynb))\)", (ROOT / "docs" / "README.md").read_text()
        )
    )
    there = {
        path.name
        for path in (ROOT / "docs").iterdir()
        if path.suffix in (".md", ".ipynb")
    }
    assert linked == there - {"README.md"}


def program(
    name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, **instead: str
) -> dict[str, Any]:
    """Run a page's blocks of Python one after another in an empty folder; what they have defined.

    Args:
        instead: keyword arguments that stand once in the page, with other values.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAYPIPE_CACHE", str(folder / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks("python", ROOT / "docs" / name):
        for argument, value in instead.items():
            code = re.sub(rf"\b{argument}=\w+", f"{argument}={value}", code)
        exec(compile(code, name, "exec"), names)
    return names


@pytest.mark.pages
def test_the_code_of_docs_quickstart_trains_a_model_of_ones_own() -> None:
    """README.md's own code is run by tests/test_own_loop.py."""
    import torch

    *_, own = blocks("python", ROOT / "docs" / "quickstart.md")
    names: dict[str, Any] = {"raypipe": raypipe}
    exec(compile(own, "quickstart.md", "exec"), names)
    net = names["model"](5)
    logits = net(torch.randn(3, 3, 224, 224))
    assert names["loss"](logits, torch.arange(3)).shape == (3,)
    names["optimizer"](
        [{"params": net.parameters()}], lr=names["schedule"](1, 10, 0, 0.1)
    ).step()


CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "concepts.md": lambda names: not names["results"].errors,
    "formats.md": lambda names: names["num_bad"] == 1 and len(names["store"]) > 1000,
    "lmdb.md": lambda names: names["dataset"].count() == 1437,
    "performance.md": lambda names: len(names["data"]) == 1437,
    "sampling.md": lambda names: (
        names["sources"] == {0: 48, 1: 16} and names["accuracies"][-1] > 0.9
    ),
    "tables.md": lambda names: (
        names["ages"].read([5], ("label",))["label"] == 25
        and len(names["val"].classes) == 2
        and len(names["detection"].stores["train"]) == 1
    ),
    "targets.md": lambda names: names["retrieved"] > 0.7 and names["explained"] > 0.8,
    "transforms.md": lambda names: names["accuracies"][-1] > 0.5,
}
"""What the programs of a page find in the end."""


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("page", CHECKS)
def test_the_programs_and_then_the_commands_of_a_page_run(
    page: str,
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"performance.md": digits_stores()[0], "transforms.md": stores["train"]}
    if page in given:
        shutil.copy(given[page], tmp_path / "train.lmdb")
    with one_thread():
        names = program(page, monkeypatch, tmp_path)
    assert CHECKS[page](names)
    if page in ("tables.md", "targets.md"):  # of what its programs have written
        for words in commands(ROOT / "docs" / page):
            is_stream = words[1] == "digest"
            cli.main([*words[1:], *(["--pool.engine=inline"] if is_stream else [])])


@pytest.mark.pages
def test_the_check_of_llms_txt_prints_what_it_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    *_, check = blocks("python", ROOT / "llms.txt")
    exec(compile(check, "llms.txt", "exec"), {})
    assert (
        capsys.readouterr().out == "0 44 {torch.Size([32, 3, 32, 32])} tensor(360.)\n"
    )


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("two_cpus")
def test_the_program_of_docs_training_loop_fails_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    # Two workers see what one sees, as tests/train/test_loop.py has it.
    soak = is_soak(request.config)
    if not soak:
        # each process of Ray's costs seconds, and tests/streaming has streams of actors
        of_actors = raypipe.open_stream
        inline = functools.partial(of_actors, pool=raypipe.PoolConfig(engine="inline"))
        monkeypatch.setattr(raypipe, "open_stream", inline)
    names = program(
        "training-loop.md", monkeypatch, tmp_path, num_workers="2" if soak else "1"
    )
    assert names["metrics"]["began_at"] == 8 and names["metrics"]["steps"] == 22
    assert names["metrics"]["accuracy"] > 0.5
    assert (
        names["batch"].position.split == "val"
        and sum(names["sizes"]) == 32 * len(names["epoch"].train) == 32 * 4
    )
    # by nobody but the loader
    records = read_records((tmp_path / "runs" / "own-loop").as_uri())
    of_kind = {record["kind"]: record for record in records}
    assert [record["kind"] for record in records].count("start") == 2
    assert (
        of_kind["train"]["images_per_s"] > 0
        and "accuracy" in of_kind["report"]["values"]
    )
    assert of_kind["diagnosis"]["step"] == 22
    assert "images/s; the time of a trainer is" in of_kind["diagnosis"]["text"]


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("two_cpus")
def test_the_loops_of_docs_integrations_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = program("integrations.md", monkeypatch, tmp_path)
    import torch

    torch.manual_seed(0)  # the models of the page
    assert names["result"].metrics["accuracy"] > 0.5
    # The others in this process, without a cluster, as the page's end has it.
    names["spec"] = replace(names["spec"], pool=raypipe.PoolConfig(engine="inline"))
    assert names["train_accelerate"]({"folder": str(tmp_path)}) > 0.5
    given = {"folder": str(tmp_path / "trainer")}
    losses, again = (
        [
            entry["eval_loss"]
            for entry in names["train_transformers"](given | more)
            if "eval_loss" in entry
        ]
        for more in (
            {},
            {"resume": True},
        )  # from its last checkpoint, after which there is nothing to train
    )
    assert len(losses) == 2 and losses[1] < losses[0] == again[0]


@pytest.mark.pages
@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(
    ("page", "function"),
    [("integrations.md", "train_ray"), ("training-loop.md", "train_sharded")],
)
def test_loops_of_pages_report_to_ray_train_and_learn(
    page: str, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.train

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names = defined(page, function, "net", "accuracy")
    names["spec"] = replace(names["spec"], pool=raypipe.PoolConfig(engine="inline"))
    reported: list[dict[str, float]] = []

    def report(metrics: dict[str, float], checkpoint: Any) -> None:
        reported.append(metrics)
        assert (Path(checkpoint.path) / "cursor.json").is_file()

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: [])
    with only_rank():
        names[function]({})
    # within each epoch, and at its end
    assert [len(metrics) for metrics in reported] == [0, 1, 0, 1]
    assert reported[-1]["accuracy"] > 0.5


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("two_cpus")
def test_the_digests_of_docs_reproducibility_are_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second, diff = commands(ROOT / "docs" / "reproducibility.md")

    def shown(words: list[str], *options: str) -> dict[str, Any]:
        cli.main([*words[1:], *options])
        return json.loads(capsys.readouterr().out)

    shown(first, "--pool.engine=inline")
    # One of them on a cluster: that it is equal to the others says the most.
    assert shown(second)["equal"]
    with pytest.raises(SystemExit, match="1"):
        shown(diff, "--pool.engine=inline")
    differences = json.loads(capsys.readouterr().out)
    assert (differences["different"], differences["compared"]) == (44, 56)
    assert differences["settings"].keys() == {"plan", "plan.seed"}


NOTEBOOK = ROOT / "docs" / "preview.ipynb"


@pytest.mark.soak  # what it calls is called by the pages' programs too
def test_the_notebook_runs_as_plain_python_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
        shown = [
            "".join(output["text"])
            for output in cell["outputs"]
            if output.get("name") == "stdout"
        ]
        assert capsys.readouterr().out == "".join(shown)


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("one_cpu")
def test_what_docs_moving_has_instead_of_other_loaders_runs(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import albumentations

    monkeypatch.chdir(tmp_path)
    shutil.copy(stores["train"], tmp_path / "train.lmdb")
    for number in range(10):
        write_tar(tmp_path / f"train-{number:04d}.tar", samples(10, first=10 * number))
    pipeline = albumentations.Compose([albumentations.RandomResizedCrop((16, 16))])
    for number, sample in enumerate(samples(40)):
        place = tmp_path / "photos" / str(sample["label"]) / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(sample["image"])
    small = {
        "epochs=90, micro_batch_size=128": "epochs=2, micro_batch_size=16",
        "0099": "0009",
    }
    ours = [
        code
        for code in blocks("python", ROOT / "docs" / "moving.md")
        if "import raypipe" in code
    ]
    # tests/test_moving.py has the scripts, tests/streaming/test_data_loader.py the others
    ours = [code for code in ours if "sys.argv" not in code]
    ours = [code for code in ours if "DataLoader(" not in code]
    assert len(ours) == 4
    for code in ours:
        for page, test in small.items():
            code = code.replace(page, test)
        names: dict[str, Any] = {"raypipe": raypipe, "pipeline": pipeline}
        exec(compile(code, "moving.md", "exec"), names)
        assert len(names.get("image", range(16))) == 16
