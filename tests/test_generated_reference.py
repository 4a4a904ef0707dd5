"""docs/reference.md, llms.txt and llms-full.txt: complete, and as .ci/reference.py writes them."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

from documented import ROOT

import raypipe
from raypipe import config
from raypipe.config import PlanConfig, PoolConfig
from raypipe.device.prefetcher import Batch
from raypipe.environment import VARIABLES
from raypipe.section import Section, kinds_of
from raypipe.streaming.loader import Loader

TEXT = (ROOT / "docs" / "reference.md").read_text()
LLMS = (ROOT / "llms.txt").read_text()
SOURCES = (".py", ".yaml", ".yml", ".json", ".h", ".c", ".sh")


def named(heading: str) -> set[str]:
    """What stands between backticks in a section; of `a.b(c) -> d` also what comes before (."""
    text = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    code = re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    )
    return {*code, *(part.partition("(")[0] for part in code)}


def test_the_reference_and_llms_full_are_those_that_the_code_has_now() -> None:
    names = runpy.run_path(str(ROOT / ".ci" / "reference.py"))
    for path, made in (
        ("docs/reference.md", names["reference"]()),
        ("llms-full.txt", names["llms_full"]()),
    ):
        assert (ROOT / path).read_text() == made, (
            f"{path} is stale: run `uv run --group dev .ci/reference.py`"
        )


def test_the_reference_has_every_environment_variable() -> None:
    files = [
        *(ROOT / "raypipe").rglob("*.py"),
        *(ROOT / "deploy").glob("*.py"),
        ROOT / "hatch_build.py",
    ]
    source = "".join(path.read_text() for path in files)
    assert (
        set(re.findall(r"\bRAYPIPE_[A-Z_]+[A-Z]\b", source))
        == set(VARIABLES)
        <= named("Environment variables")
    )
    source = "".join(path.read_text() for path in (ROOT / "raypipe").rglob("*.py"))
    read = re.findall(
        r'environ(?:ment)?(?:\.get|\.setdefault)?[([]"([A-Z_a-z]+)"', source
    )
    read += re.findall(r'"([A-Z_]+)" (?:not )?in os\.environ', source)
    assert {"RAY_ADDRESS", "AWS_REGION"} <= set(read) <= named("Environment variables")


def test_the_reference_has_every_public_name_and_section_of_settings() -> None:
    assert {f"raypipe.{name}" for name in raypipe.__all__} <= named("Python API")
    found = [
        each
        for each in vars(config).values()
        if inspect.isclass(each) and issubclass(each, Section)
    ]
    names = {each.__name__ for each in found if each.__module__ == config.__name__}
    assert len(names) >= 8 and names <= {
        name.rpartition(".")[2] for name in named("Python API")
    }


def test_what_llms_txt_says_to_write_is_there() -> None:
    text = re.sub(r"^\| .*? \| ", "", LLMS, flags=re.M)  # the column of what is wrong
    for name, kind in (("batch", Batch), ("loader", Loader)):
        attributes = {
            *dir(kind),
            *getattr(kind, "__dataclass_fields__", ()),
            "device",
            "global_step",
        }
        assert set(re.findall(rf"\b{name}\.(\w+)", text)) <= attributes
    for kind in (PlanConfig, PoolConfig):
        for arguments in re.findall(rf"{kind.__name__}\(([^)]*)\)", text):
            assert set(re.findall(r"(\w+)=", arguments)) <= {*kinds_of(kind)}
    for name in re.findall(r"\braypipe\.([a-z_]+|[A-Z]\w+)(?=[(.`\n ])", text):
        assert hasattr(raypipe, name) or (ROOT / "raypipe" / name).is_dir(), name


def test_llms_txt_links_every_page_of_the_documentation() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", LLMS))
    assert {path.name for path in Path(ROOT, "docs").glob("*.md")} - {
        "README.md"
    } == linked


def test_pages_that_the_code_names_are_there() -> None:
    folders = ("raypipe", "jobs", "deploy", "benchmarks", "tests")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES
    ]
    for path in [*files, ROOT / "deploy" / "Dockerfile"]:
        for page in re.findall(
            r"\b(?:docs|benchmarks/results)/[\w-]+\.md\b", path.read_text()
        ):
            assert (ROOT / page).exists(), f"{path} names {page}"
