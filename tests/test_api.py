from __future__ import annotations

import ast
import functools
import graphlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypipe
import raypipe.kernel
from raypipe import errors

ROOT = Path(raypipe.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
)

# Each imports only from those before it, and within a package no modules import one another in a circle.
PACKAGES = [
    "kernel",
    "errors",
    "background",
    "mistakes",
    "environment",
    "packages",
    "importing",
    "library_settings",
    "cpus",
    "printing",
    "logs",
    "progress",
    "section",
    "config",
    "storage",
    "stores",
    "plan",
    "transform",
    "metrics",
    "device",
    "rayext",
    "streaming",
    "history",
    "integrations",
    "train",
    "launch",
    "commands",
]
WITHOUT_RAY_AND_TORCH = {
    "storage",
    "stores",
    "plan",
    "transform",
    "errors",
    "environment",
    "section",
    "config",
    "logs",
    "kernel",
}


LIGHT_MODULES = [
    module for module in MODULES if module.split(".")[0] in WITHOUT_RAY_AND_TORCH
]


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@functools.cache
def imports(module: str, lazy: bool = True) -> set[str]:
    """What a module of raypipe imports: anywhere, annotations included, or, not lazy, when it is imported."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ImportFrom):
                assert child.level == 0 and child.module is not None, (
                    f"{module} has a relative import"
                )
                inside = {
                    f"{child.module}.{alias.name}".removeprefix("raypipe.")
                    for alias in child.names
                }
                yield from (
                    (f"raypipe.{name}" for name in inside & set(MODULES))
                    if inside & set(MODULES)
                    else (child.module,)
                )
            elif isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif lazy or (
                not isinstance(child, ast.FunctionDef) and not _is_for_types(child)
            ):
                yield from walk(child)

    return set(walk(ast.parse(source.read_text())))


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def roots(module: str, lazy: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(module, lazy)}


# The public names


def test_the_public_names_are_pinned() -> None:
    assert raypipe.__all__ == [
        "AugmentConfig",
        "Cursor",
        "DataLoader",
        "LMDBDatasource",
        "Plan",
        "PlanConfig",
        "PoolConfig",
        "Population",
        "RaypipeError",
        "Sampler",
        "StreamSpec",
        "TransformConfig",
        "check_resources",
        "connect",
        "convert",
        "dataset",
        "describe",
        "lease",
        "loader",
        "open_store",
        "open_stream",
        "plain_loaders",
        "preview",
        "read_checkpoint",
        "read_lmdb",
        "replay",
        "resident",
        "verify",
    ]


def documented_names() -> set[str]:
    """The names on the page of the Python API."""
    page = (ROOT.parent / ".ci" / "api.md").read_text()
    return set(re.findall(r"^::: (\S+)", page, flags=re.MULTILINE))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "train").glob("*.py")), ids=lambda path: path.stem
)
def test_the_training_loop_imports_only_public_names(path: Path) -> None:
    """Whoever writes a loop can import whatever it imports. There is no exception."""
    public = documented_names() | {f"raypipe.{name}" for name in raypipe.__all__}
    tree = ast.parse(path.read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {
        f"{node.module}.{alias.name}"
        for node in froms
        for alias in node.names
        if node.module and node.module.partition(".")[0] == "raypipe"
    }
    inside = {name for name in imported if name.startswith("raypipe.train.")}
    assert imported - inside <= public
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not {name for name in modules if name.startswith("raypipe.")}


def test_every_public_name_is_there_listed_and_described() -> None:
    for name in raypipe.__all__:
        value = getattr(raypipe, name)
        assert value.__module__.startswith("raypipe")
        assert inspect.getdoc(value), name
        assert name in dir(raypipe)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"no attribute 'loadr'; did you mean raypipe\.loader"
    ):
        raypipe.loadr  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import raypipe",
        "import raypipe; raypipe.PlanConfig(), raypipe.PoolConfig(), raypipe.open_store, raypipe.Plan",
        "import " + ", ".join(f"raypipe.{module}" for module in LIGHT_MODULES),
    ],
    ids=["import raypipe", "the plan's names", "plan, stores, transform"],
)
def test_heavy_imports_stay_unimported_until_used(code: str) -> None:
    heavy = "{'ray', 'torch', 'torchvision', 'albumentations', 'kornia'}"
    assert (
        fresh(f"{code}\nimport sys; print(sorted({heavy} & set(sys.modules)))") == "[]"
    )


# The direction of imports


def test_each_package_imports_only_from_those_before_it() -> None:
    place = {package: number for number, package in enumerate(PACKAGES)}
    for module in MODULES:
        for name in imports(module):
            if name.startswith("raypipe."):
                imported = name.split(".")[1]
                assert place[imported] <= place[module.split(".")[0]], (
                    f"{module} imports {name}"
                )


def test_imports_have_no_circle_and_no_chain_beyond_sixteen() -> None:
    graph = {
        m: {n.removeprefix("raypipe.") for n in imports(m) if n.startswith("raypipe.")}
        for m in MODULES
    }
    graph["kernel"] = set()  # to the others it is a library
    chain: dict[str, int] = {}
    for module in graphlib.TopologicalSorter(graph).static_order():
        chain[module] = 1 + max(
            (chain[name] for name in graph.get(module, ())), default=0
        )
    assert max(chain.values()) <= 16, max(chain, key=chain.__getitem__)


def test_contributing_lists_the_types_and_modules_of_the_road() -> None:
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    _, _, page = page.partition("The types on the way")
    types, _, page = page.partition("A stream's description")
    listed = re.findall(r"^\| `(\w+)` \|", types, re.M)
    sources = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    assert 0 < len(listed) <= 12
    assert set(listed) <= set(re.findall(r"^class (\w+)", sources, re.M))
    rows = re.findall(r"^\| (`.*?) \|", page.partition("`stream_fields`")[0], re.M)
    modules = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(modules) <= 20
    takes_spec = re.compile(r"\b(spec|passed): (StreamSpec|\"StreamSpec\")")
    streaming = (ROOT / "streaming").rglob("*.py")
    found = {path.stem for path in streaming if takes_spec.search(path.read_text())}
    # other ways to begin
    assert found - {"dataset", "resident"} == set(modules)


def test_the_places_where_contributing_adds_things_exist() -> None:
    page = (ROOT.parent / "CONTRIBUTING.md").read_text()
    table = page.partition("## Where to add what")[2].partition("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| a ")]
    assert len(rows) == 10
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    for row in rows:
        for file in re.findall(r"`([\w/]+\.py)`", row):
            assert any(str(path).endswith(f"/{file}") for path in sources), file
        for constant in re.findall(r"`([A-Z_]{4,})`", row):
            assert any(f"\n{constant}" in text for text in sources.values()), constant


def test_each_side_knows_only_its_own_framework() -> None:
    for module in MODULES:
        package = module.split(".")[0]
        if package in WITHOUT_RAY_AND_TORCH:
            assert not roots(module) & {"ray", "torch", "torchvision"}, module
            assert "ray" not in roots(module, lazy=True), module
        if package == "device":
            assert "ray" not in roots(module, lazy=True), module


def test_rays_inside_is_named_in_one_package_only() -> None:
    inside = re.compile(r"\bray(\.\w+)*\.(_\w+|v2)\b|\._coord_actor|\"_coord_actor\"")
    for path in ROOT.rglob("*.py"):
        if path.parent.name != "rayext":
            assert not inside.search(path.read_text()), path


# The error tree


def test_every_error_is_in_the_tree_and_survives_pickling() -> None:
    found = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
    assert len(found) == 11
    for error in found:
        assert issubclass(error, errors.RaypipeError)
        assert error.__name__ in (errors.__doc__ or "")
        again = pickle.loads(pickle.dumps(error("what to mend")))
        assert type(again) is error and str(again) == "what to mend"
    assert issubclass(errors.ConfigError, ValueError)


def test_no_checkpoint_is_unpickled() -> None:
    loads = [
        call
        for path in ROOT.rglob("*.py")
        for call in re.findall(r"torch\.load\(.*\)", path.read_text())
    ]
    assert loads and all("weights_only=True" in call for call in loads), loads
