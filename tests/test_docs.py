"""Commands, settings, code and links of README.md and docs/: all are parsed, programs of some pages are run."""

from __future__ import annotations

import ast
import functools
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
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
from raypipe.stores import Store, digits_stores
from raypipe.streaming.maker import MicroBatchMaker
from raypipe.transform.presets import PRESETS, check_transform

from pictures import samples, write_tar  # isort: skip

SEARCH = runpy.run_path(str(ROOT / "jobs" / "tune.py"))["search"]


def test_there_are_commands_of_every_kind() -> None:
    assert {words[0] for words in commands()} == {
        "raypipe",
        "jobs/train.py",
        "jobs/tune.py",
    }
    assert {words[1] for words in commands() if words[0] == "raypipe"} >= {
        "convert",
        "digest",
        "train",
    }


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
            check_transform(
                transform, run.transform.size, run.transform.decode == "array"
            )


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


def test_guides_are_short_and_each_begins_with_something_that_runs() -> None:
    guides = [
        page
        for page in PAGES
        if page.parent.name == "docs" and page.stem not in ("README", "reference")
    ]
    for page in guides:
        prose, *_ = re.subn(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        assert len(prose.split()) <= 1200, page.name
        assert prose.count("![") + prose.count("<img") <= 3, page.name
        first_section = page.read_text().partition("\n## ")[0]
        assert "```console" in first_section or "```python" in first_section, page.name
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_result_is_in_the_index_of_results() -> None:
    index = (ROOT / "benchmarks" / "results" / "README.md").read_text()
    assert {page.name for page in RESULTS} - {"README.md"} <= set(
        re.findall(r"\]\(([\w-]+\.md)", index)
    )


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


@pytest.mark.pages
@pytest.mark.cluster
def test_the_sweep_of_docs_concepts_gives_each_trial_all_images(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = program("concepts.md", monkeypatch, tmp_path)["results"]
    assert not results.errors
    images = [result.metrics["images"] for result in results]
    assert len(images) == 2 and images[0] == images[1] > 1000


@pytest.mark.pages
def test_the_program_of_llms_txt_trains_and_its_check_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trainer is that of the own loop, below."""
    import ray.train
    import torch

    program_, check = blocks("python", ROOT / "llms.txt")
    exec(compile(check, "llms.txt", "exec"), {})
    assert (
        capsys.readouterr().out == "0 44 {torch.Size([32, 3, 32, 32])} tensor(360.)\n"
    )
    names: dict[str, Any] = {"__name__": "llms"}
    exec(compile(program_, "llms.txt", "exec"), names)
    names["spec"] = replace(names["spec"], pool=raypipe.PoolConfig(engine="inline"))
    reported: list[dict[str, float]] = []
    monkeypatch.setattr(
        ray.train, "report", lambda metrics, checkpoint: reported.append(metrics)
    )
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: [])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    with (
        one_thread(),
        only_rank(),
    ):
        # several wait for one another for minutes where the cores are busy
        names["train_fn"]({})
    assert len(reported) == 2 and reported[-1]["accuracy"] > 0.7


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
def test_the_ray_train_loop_of_docs_integrations_reports_and_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its ranks are killed in tests/test_own_loop.py."""
    import ray.train

    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names = defined("integrations.md", "train_ray")
    names["spec"] = replace(names["spec"], pool=raypipe.PoolConfig(engine="inline"))
    reported: list[tuple[dict[str, float], set[str]]] = []

    def report(metrics: dict[str, float], checkpoint: Any) -> None:
        reported.append(
            (metrics, {path.name for path in Path(checkpoint.path).iterdir()})
        )

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: [])
    with only_rank():
        names["train_ray"]({})
    # after steps 8, 11, 16 and 22
    assert [len(metrics) for metrics, _ in reported] == [
        0,
        1,
        0,
        1,
    ]
    assert all(files == {"state.pt", "cursor.json"} for _, files in reported)
    assert reported[-1][0]["accuracy"] > 0.5


@pytest.mark.pages
def test_docs_sampling_draws_shares_learns_on_buckets_and_balance_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    with one_thread():
        names = program("sampling.md", monkeypatch, tmp_path)
    assert (
        names["sources"] == {0: 48, 1: 16}
        and names["mixture"].kept["train"].num_left_out > 100
    )
    folds = names["folds"]
    assert folds.num_val == 287 and folds.num_train == 1437
    assert folds.steps_per_epoch == (1437 - 287) // 32
    assert names["shares"] == {(35, 15): 5 * 28} and names["accuracies"][-1] > 0.9
    assert names["sizes"][0] == 150 and names["sizes"][-1] == 3
    sizes, (uniform, balanced) = torch.tensor(names["sizes"]), names["results"].values()
    for drawn, _ in uniform:  # 4,096 draws of 420 samples
        assert (
            drawn.sum() == 4096
            and (drawn >= 9 * sizes).all()
            and (drawn <= 10 * sizes).all()
        )
    for drawn, _ in balanced:  # in each of 8 epochs 51 or 52
        assert (
            drawn.sum() == 4096 and (drawn >= 8 * 51).all() and (drawn <= 8 * 52).all()
        )
    with_balance, without = (
        torch.stack([accuracies for _, accuracies in runs])
        for runs in (balanced, uniform)
    )
    assert (
        with_balance.mean() > without.mean()
        and with_balance[:, 5:].mean() > without[:, 5:].mean() + 0.03
    )
    # Of 40 pictures each: five micro-batches an epoch, of which one in all makes no step; learnt in all shapes.
    shapes = names["batch_shapes"]
    assert (
        set(shapes) == {(12, 16), (14, 14), (16, 12)} and sum(shapes.values()) == 4 * 14
    )
    assert max(shapes.values()) <= 20 and np.mean(names["right"][-14:]) > 0.9


@pytest.mark.pages
def test_docs_performance_has_each_image_on_the_device_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/streaming/test_resident.py has the crops, the flips and the order."""
    shutil.copy(digits_stores()[0], tmp_path / "train.lmdb")
    names = program("performance.md", monkeypatch, tmp_path)
    data, last = names["data"], names["batch"]
    assert data.images.shape == (1437, 3, 32, 32) and len(data) == 1437
    assert last.index[-1] == 1436 and last.image.dtype.is_floating_point
    assert [batch.index.shape for batch in data.epoch(1)] == [(512,), (512,)]


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_docs_lmdb_gives_a_dataset_of_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = program("lmdb.md", monkeypatch, tmp_path)["dataset"]
    (row,) = dataset.limit(1).take_all()
    assert (
        dataset.count() == 1437
        and row["class_name"] == str(row["label"])
        and row["width"] == 8
    )


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("one_cpu")
def test_docs_formats_converts_from_python_and_streams_a_store_of_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = program("formats.md", monkeypatch, tmp_path)
    samples = raypipe.open_store("samples.lmdb")
    assert len(samples) == 100 and tuple(samples.schema.names) == (
        "image",
        "label",
        "name",
        "width",
        "height",
    )
    assert samples.classes == tuple("0123456789")
    labels = raypipe.open_store("dataset.parquet").read(np.arange(100))["label"]
    assert labels.tolist() == [i % 10 for i in range(100)]
    assert isinstance(names["store"], Store) and isinstance(
        names["ChunkedStore"]("digits.sqlite"), Store
    )
    assert names["num_bad"] == 1 and names["findings"]["bad_samples"] == 1
    assert {"index": 7, "name": "", "samples": 1}.items() <= names["findings"][
        "reasons"
    ][0].items()
    copy = raypipe.open_store("digits.lmdb")
    assert len(copy) == 1436 and copy.classes == names["store"].classes


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("two_cpus")
def test_the_digests_of_docs_reproducibility_are_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "reproducibility.md"
    shown = []
    *digests, diff = commands(page)
    assert digests[:2] == [
        words for words in commands(ROOT / "README.md") if "digest" in words
    ]
    # One of them on a cluster: that it is equal to the others says the most.
    for number, words in enumerate(digests):
        cli.main([*words[1:], *([] if number == 1 else ["--pool.engine=inline"])])
        shown.append(capsys.readouterr().out)
    with pytest.raises(SystemExit, match="1"):
        cli.main([*diff[1:], "--pool.engine=inline"])
    shown.append(capsys.readouterr().out)
    second, last = json.loads(shown[1]), json.loads(shown[2])
    assert len(digests) == 2 and (second["equal"], second["compared"]) == (True, 16)
    assert (last["different"], last["compared"], last["first_different"]) == (
        44,
        56,
        "train-e0000-s000000-m000",
    )
    assert last["settings"].keys() == {"plan", "plan.seed"}


NOTEBOOK = ROOT / "docs" / "preview.ipynb"


def cells() -> list[dict[str, Any]]:
    return [
        cell
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]


def test_the_notebook_is_small_and_shows_pictures() -> None:
    assert NOTEBOOK.stat().st_size < 300 << 10
    outputs = [output for cell in cells() for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3


@pytest.mark.soak  # what it calls is called by the pages' programs too
def test_the_notebook_runs_as_plain_python_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells():
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
    # tests/test_moving.py has the scripts
    ours = [code for code in ours if "sys.argv" not in code]
    assert len(ours) == 4
    for code in ours:
        names: dict[str, Any] = {"raypipe": raypipe, "pipeline": pipeline}
        for page, test in small.items():
            code = code.replace(page, test)
        exec(compile(code, "moving.md", "exec"), names)
        if "spec" in names:
            assert len(names["spec"].stores["train"]) == (
                40 if "photos" in code else 100
            )
        if "image" in names:
            shape = (16, 3, 16, 16) if "photos" in code else (16, 16, 16, 3)
            assert names["image"].shape == shape and names.get(
                "label", names.get("target")
            ).shape == (16,)


@pytest.mark.pages
def test_what_docs_transforms_has_makes_images(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "transforms.md"
    own, given, *_ = blocks("python", page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_transforms", raising=False)
    shutil.copy(stores["train"], tmp_path / "train.lmdb")
    (tmp_path / "my_transforms.py").write_text(own)
    names: dict[str, Any] = {}
    exec(compile(given, "transforms.md", "exec"), names)

    def first(**changes: Any) -> np.ndarray:
        made = raypipe.open_stream(
            "train.lmdb", plan=names["spec"].plan.config, **changes
        )
        return MicroBatchMaker(made).batch(
            next(made.plan.micro_batches(made.plan.start()))
        )["image"]

    (tmp_path / "run.yaml").write_text(blocks("yaml", page)[1])
    saved = parse_run([f"--config={tmp_path / 'run.yaml'}"], None)
    image = first(transform=saved.transform)
    assert image.shape == (16, 32, 32, 3)
    assert np.array_equal(image, first(train_transform=saved.transform.train))
    spec = names["spec"]
    at = next(spec.plan.micro_batches(spec.plan.start()))
    assert MicroBatchMaker(spec).batch(at)["image"].shape == (16, 32, 32, 3)
    (tmp_path / "run.yaml").write_text(blocks("yaml", page)[2])
    mine = parse_run([f"--config={tmp_path / 'run.yaml'}"], None)
    for name in (mine.transform.train, mine.transform.val, "my_transforms:turned"):
        given = replace(mine.transform, train=name)
        assert first(transform=given).shape == (16, 32, 32, 3), name


def test_docs_transforms_has_every_preset() -> None:
    page = (ROOT / "docs" / "transforms.md").read_text()
    named = re.findall(r"^\| `([a-z-]+)` \| (?:any|training|validation)", page, re.M)
    assert named == ["none", *PRESETS]


@pytest.mark.pages
def test_the_views_of_docs_transforms_are_learned_from(
    tmp_path: Path, stores: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(stores["train"], tmp_path / "train.lmdb")
    with one_thread():
        names = program("transforms.md", monkeypatch, tmp_path)
    num, shapes = 128, names["shapes"]
    assert shapes == {
        "global": (num, 2, 3, 16, 16),
        "local": (num, 8, 3, 8, 8),
        "whole": (num, 3, 16, 16),
    }
    accuracies = names["accuracies"]
    assert len(accuracies) == 4 and accuracies[-1] > accuracies[0] + 0.03 > 0.5
    patches = {name: tuple(view.shape) for name, view in names["patches"].items()}
    assert patches == {"patch": (num, 3, 4, 4), "others": (num, 2, 3, 4, 4)}


@pytest.mark.pages
@pytest.mark.cluster
@pytest.mark.usefixtures("one_cpu")
def test_docs_targets_learns_masks_captions_and_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with one_thread():
        names = program("targets.md", monkeypatch, tmp_path)
    losses, targets = names["losses"], names["targets"]
    assert len(losses) == 90 and sum(losses[-8:]) < 0.5 * sum(losses[:8])
    assert len(targets) == 16 and {tuple(each["boxes"].shape) for each in targets} <= {
        (0, 4),
        (1, 4),
    }
    assert names["visible"].shape == (16, 4) and 0 < names["visible"].sum() < 32
    assert len(names["hits"]) == 120 and names["retrieved"] > 0.7  # by chance 1 / 12
    outputs = names["torch"].zeros(2, 40)
    assert (
        names["per_attribute"](outputs, outputs).shape
        == names["squared"](outputs, outputs[:, 0]).shape
        == (2,)
    )
    assert names["explained"] > 0.8 and names["batch"].image.shape == (32, 4, 24, 24)
    verify, *others = commands(ROOT / "docs" / "targets.md")
    capsys.readouterr()
    cli.main(verify[1:])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["samples"], found["bad_samples"]) == (720, 0)
    for words in others:
        cli.main(
            [*words[1:], *(["--pool.engine=inline"] if words[1] == "digest" else [])]
        )
    assert Path("grid.png").stat().st_size > 10_000
