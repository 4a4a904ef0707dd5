from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raypipe
from raypipe import errors

ROOT = Path(raypipe.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if path != ROOT / "__init__.py"
)

# A module imports from earlier lines only.
LAYERS = [
    {"errors", "order", "console", "logs", "jpeg_extension", "local_file"},
    {"admission", "failures", "interrupts"},
    {"cursor", "filesystem", "file_lock", "rank_group", "stores.hdf5_reader"},
    {
        "lookup",
        "stores.base",
        "stores.checks",
        "stores.record",
        "stores.splits",
        "whole_file",
        "remote_file",
        "owner",
    },
    {"stores.metadata", "stores.plain_pickle", "stores.wire", "stores.tfrecord_index", "stores.hdf5"},
    {"digest_file", "shard_folder", "stores.remote", "stores.members", "stores.example", "transform_steps"},
    {"stores.webdataset", "stores.zip_index", "stores.file_list", "stores.parquet_pages"},
    {"stores.tar_index", "stores.tar_writer"},
    {"download"},
    {"local_cache", "stores.lmdb_pages"},
    {
        "stores.lmdb_shard",
        "stores.lmdb_entries",
        "stores.parquet_files",
        "stores.parquet_writer",
        "stores.archive",
    },
    {"stores.lmdb_layouts"},
    {"stores.lmdb_foreign"},
    {"stores.lmdb_remote"},
    {
        "stores.folder",
        "stores.lmdb",
        "stores.memory",
        "stores.parquet",
        "stores.tar",
        "stores.tfrecord",
        "stores.zip",
    },
    {"stores"},
    {"stores.atomic", "stores.upload"},
    {"image_header"},
    {"plan", "decode", "picture", "page", "pool_size", "presets", "crop_first", "completion"},
    {"config", "sample_transform", "targets"},
    {"crop_decode", "sample_cache", "records", "encoded", "quarantine", "checkpoints", "lease", "submit"},
    {"transform"},
    {"encoded_transform", "target_transform", "tasks"},
    {"bad_list", "measured", "report", "runlog"},
    {"capacity"},
    {"metrics", "mixing", "kornia_ops", "node_limits", "telemetry", "memory_watch", "streams"},
    {"augment", "device_decode", "ordered_sum", "models", "ring", "policies"},
    {"prefetcher"},
    {
        "digits",
        "cluster",
        "pool_watch",
        "autoscaler",
        "inline_metadata",
        "supervisor",
        "shard_copy",
        "sample_check",
    },
    {"ingest", "inspection", "store_page", "backpressure", "guard", "lean", "source"},
    {"worker", "rank_stream"},
    {"pipeline", "handover"},
    {"digest", "train", "trainer", "preview"},
    {"launch", "bench", "resume_bench", "doctor"},
    {"trial"},
    {"trial_queue"},
    {"tune"},
    {"cli_audit", "cli_bench", "cli_capacity", "cli_cluster"},
    {"cli"},
]
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}

NEITHER_RAY_NOR_TORCH = {
    "completion",
    "cursor",
    "filesystem",
    "rank_group",
    "bad_list",
    "capacity",
    "measured",
    "digest_file",
    "download",
    "whole_file",
    "logs",
    "file_lock",
    "local_file",
    "local_cache",
    "pool_size",
    "remote_file",
    "shard_folder",
    "errors",
    "jpeg_extension",
    "page",
    "report",
    "store_page",
    "order",
    "lookup",
    "plan",
    "policies",
    "config",
    "decode",
    "image_header",
    "crop_first",
    "crop_decode",
    "presets",
    "sample_cache",
    "sample_check",
    "sample_transform",
    "encoded",
    "encoded_transform",
    "quarantine",
    "shard_copy",
    "target_transform",
    "targets",
    "transform",
    "transform_steps",
    *(module for module in MODULES if module.split(".")[0] == "stores"),
}
TORCH_BUT_NOT_RAY = {
    "metrics",
    "mixing",
    "kornia_ops",
    "preview",
    "augment",
    "device_decode",
    "ordered_sum",
    "models",
    "ring",
    "prefetcher",
    "streams",
}
BOTH = {"handover", "train"}


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def imports(module: str, lazy: bool) -> set[str]:
    """Modules that a module of raypipe imports: at its top level, or, lazy, anywhere; types apart."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.FunctionDef) and not lazy:
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{module} has a relative import"
                assert child.module is not None
                within = child.module == "raypipe"
                yield from (f"raypipe.{alias.name}" for alias in child.names) if within else (child.module,)
            else:
                yield from walk(child)

    return set(walk(ast.parse(source.read_text())))


def roots(module: str, lazy: bool = False) -> set[str]:
    return {name.split(".")[0] for name in imports(module, lazy)}


# The public names


def test_the_public_names_are_pinned() -> None:
    assert raypipe.__all__ == [
        "AugmentConfig",
        "Cursor",
        "Plan",
        "PlanConfig",
        "PoolConfig",
        "RaypipeError",
        "StreamSpec",
        "TransformConfig",
        "connect",
        "feed",
        "open_store",
        "prefetch",
        "read_lmdb",
        "stream",
    ]


def test_every_public_name_is_there_listed_and_described() -> None:
    for name in raypipe.__all__:
        value = getattr(raypipe, name)
        assert value.__module__.startswith("raypipe")
        assert inspect.getdoc(value), name
        assert name in dir(raypipe)


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'raypipe' has no attribute 'steam'"):
        raypipe.steam  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import raypipe",
        "import raypipe; raypipe.PlanConfig(), raypipe.PoolConfig(), raypipe.open_store, raypipe.Plan",
        "import " + ", ".join(f"raypipe.{module}" for module in sorted(NEITHER_RAY_NOR_TORCH)),
    ],
    ids=["import raypipe", "the plan's names", "plan, stores, transform"],
)
def test_heavy_imports_stay_unimported_until_used(code: str) -> None:
    heavy = "{'ray', 'torch', 'torchvision', 'albumentations', 'kornia'}"
    assert fresh(f"{code}\nimport sys; print(sorted({heavy} & set(sys.modules)))") == "[]"


# The direction of imports


def test_every_module_has_its_layer() -> None:
    assert set(LAYER_OF) == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_upward_only(module: str) -> None:
    for name in imports(module, lazy=True):
        if name.split(".")[0] != "raypipe":
            continue
        imported = name.removeprefix("raypipe.")
        assert LAYER_OF[imported] < LAYER_OF[module], f"{module} imports {imported}, which is not above it"


def test_each_side_knows_only_its_own_framework() -> None:
    for module in NEITHER_RAY_NOR_TORCH:
        assert not roots(module) & {"ray", "torch", "torchvision"}, module
        assert "ray" not in roots(module, lazy=True), module
    for module in TORCH_BUT_NOT_RAY:
        assert "torch" in roots(module) and "ray" not in roots(module, lazy=True), module
    assert {module for module in MODULES if {"ray", "torch"} <= roots(module)} == BOTH


# The error tree


def test_every_error_is_in_the_tree_and_survives_pickling() -> None:
    found = [error for _, error in inspect.getmembers(errors, inspect.isclass)]
    assert len(found) == 7
    for error in found:
        assert issubclass(error, errors.RaypipeError)
        assert error.__name__ in (errors.__doc__ or "")
        again = pickle.loads(pickle.dumps(error("what to mend")))
        assert type(again) is error and str(again) == "what to mend"
    assert issubclass(errors.ConfigError, ValueError)


def test_public_modules_import_by_name() -> None:
    for module in sorted(NEITHER_RAY_NOR_TORCH):
        assert importlib.import_module(f"raypipe.{module}").__doc__


def test_no_checkpoint_is_unpickled() -> None:
    loads = [call for path in ROOT.rglob("*.py") for call in re.findall(r"torch\.load\(.*\)", path.read_text())]
    assert loads and all("weights_only=True" in call for call in loads), loads
