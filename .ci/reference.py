"""Write docs/reference.md and llms-full.txt: uv run --group dev .ci/reference.py

The first is .ci/reference_template.md with tables from the code; the second is llms.txt and the first.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from pydoc import locate
from types import SimpleNamespace
from typing import Any

import albumentations

from raypipe.commands import cli
from raypipe.commands.parser import Parser
from raypipe.config import ColumnOptions, RunConfig
from raypipe.device import augment
from raypipe.device.prefetcher import Batch
from raypipe.environment import VARIABLES
from raypipe.metrics.prometheus import METRICS
from raypipe.section import expected, is_section, kinds_of, texts_of
from raypipe.transform import presets, views

ROOT = Path(__file__).parents[1]
_HEADS = ("setting", "type", "default", "meaning")
# Arguments that matter even at the library's default; and arguments and values that a reader need not see.
_TELLING = ("p", "scale", "ratio", "blur_limit", "threshold_range")
_QUIET = ("fill_mask", "interpolation", ("p", 1), ("blur_limit", 0))
# The operations of a device preset in their order, by the names of their probabilities.
_OPERATIONS = {
    "flip": "flip horizontally",
    "affine": "rotate by up to {degrees}°, shift by up to {translate[0]} of the side, scale by {scale}",
    "blur": "blur with a sigma of {sigma} pixels",
    "jitter": "multiply brightness by {brightness}, contrast by {contrast} and saturation by {saturation}{hue}",
    "gray": "convert to gray",
    "erase": "erase a box of {area} of the image, with a height of {ratio} times the width",
}


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        heads,
        ["---"] * len(heads),
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def linked(text: str) -> str:
    """A text as Markdown, with a link for each page that it names."""
    return re.sub(r"(?<![\w/])docs/([\w-]+\.md)", r"[\1](\1)", text)


def about(documented: Any) -> str:
    """The first paragraph of a docstring."""
    return linked(
        " ".join(
            inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0].split()
        )
    )


def row(name: str, kind: Any, default: Any, text: str) -> Sequence[str]:
    """A setting or an option in a table of `_HEADS`."""
    return (
        f"`{name}`",
        expected(kind),
        f"`{json.dumps(default, ensure_ascii=False)}`",
        linked(text),
    )


def settings(section: Any = RunConfig) -> str:
    default, texts, prefix = section(), texts_of(section), section._prefix
    parts, rows = [], []
    for name, kind in kinds_of(section).items():
        if is_section(kind) or name == "columns":
            parts.append(settings(kind if is_section(kind) else ColumnOptions))
        if not is_section(kind):
            rows.append(row(prefix + name, kind, getattr(default, name), texts[name]))
    heading = f"### {prefix.rstrip('.') or 'The run'}\n\n{about(section)}"
    return "\n\n".join([heading, table(_HEADS, rows), *parts])


def environment() -> str:
    return table(
        ("variable", "default", "meaning"),
        [(f"`{name}`", *text) for name, text in VARIABLES.items()],
    )


def value(argument: Any) -> str:
    """An argument of a step, for people: two numbers are a range."""
    if isinstance(argument, list | tuple):
        return (" to " if len(argument) == 2 else ", ").join(map(value, argument))
    if isinstance(argument, dict):
        return ", ".join(f"{key} {value(part)}" for key, part in argument.items())
    return f"{argument:.3g}" if isinstance(argument, float) else str(argument)


def step(entry: dict[str, dict[str, Any]]) -> str:
    """A step of a preset: its name and its numbers."""
    ((name, arguments),) = entry.items()
    defaults = inspect.signature(getattr(albumentations, name)).parameters
    arguments = {
        key: defaults[key].default for key in _TELLING if key in defaults
    } | arguments
    shown = {
        key: part
        for key, part in arguments.items()
        if key not in _QUIET and (key, part) not in _QUIET
    }
    texts = [
        f"{key} {' x '.join(map(str, p)) if 'size' in key else value(p)}"
        for key, p in shown.items()
    ]
    return ", ".join([f"`{name}`", *texts])


def transform_presets() -> str:
    rows = [("`none`", "the image as it is stored")]
    rows += [
        (f"`{name}`", "<br>".join(map(step, make(224))))
        for name, make in presets._STEPS.items()
    ]
    first = [step(entry) for entry in presets._crop_and_flip(224)]
    for name, (operation, arguments) in presets._TORCHVISION.items():
        last = (
            [f"`{operation}`, {value(arguments) or 'its defaults'}"]
            if operation
            else []
        )
        rows.append((f"`{name}`, by torchvision v2", "<br>".join(first + last)))
    for name, make in views.VIEW_PRESETS.items():
        for view, entry in make(224).items():
            for number, steps in enumerate(
                entry.get("transforms", [entry.get("transform")]), 1
            ):
                crops = (
                    f"{entry['count']} crops" if "count" in entry else f"crop {number}"
                )
                rows.append(
                    (f"`{name}`, view `{view}`, {crops}", "<br>".join(map(step, steps)))
                )
    return table(("preset", "steps, at `transform.size` 224"), rows)


def device_presets() -> str:
    rows = []
    for preset, fused in augment.PRESETS.items():
        has = vars(fused) if fused else {}
        numbers = {
            key: part if key == "translate" else value(part)
            for key, part in has.items()
        }
        numbers["hue"] = (
            f", turn the hue by {numbers['hue']}" if has and any(has["hue"]) else ""
        )
        steps = [
            f"{_OPERATIONS[key].format(**numbers)} (p {has[key]})"
            for key in _OPERATIONS
            if has.get(key)
        ]
        rows.append((f"`{preset}`", "<br>".join(steps) or "nothing"))
    return table(("preset", "operations"), rows)


def commands() -> str:
    parts = [
        table(
            ("command", "does"),
            [(f"`raypipe {name}`", about(run)) for name, run in cli.COMMANDS.items()],
        )
    ]
    for name, run in cli.COMMANDS.items():
        parser = Parser(name, run)
        rows = [
            row(f"--{key.replace('_', '-')}", *option)
            for key, option in parser.options.items()
        ]
        takes = "; takes the settings of a run" if parser.takes_run else ""
        parts.append(f"### raypipe {name}\n\n`{parser.usage}`{takes}")
        parts += [table(("option", *_HEADS[1:]), rows)] if rows else []
    return "\n\n".join(parts)


def exit_codes() -> str:
    text = " ".join((cli.__doc__ or "").partition("Exit codes: ")[2].split()).rstrip(
        "."
    )
    return table(
        ("exit code", "meaning"), [part.split(" ", 1) for part in text.split("; ")]
    )


def batch() -> str:
    texts = {
        name: about(part)
        for name, part in vars(Batch).items()
        if isinstance(part, property)
    }
    return table(
        ("field", "meaning"),
        [(f"`{name}`", text) for name, text in (texts | texts_of(Batch)).items()],
    )


def metrics() -> str:
    rows = []
    for name, metric in METRICS.items():
        unit = {"seconds": "s", "bytes": "bytes"}.get(
            name.removesuffix("_total").rpartition("_")[2], "–"
        )
        rows.append(
            (
                f"`ray_{name}`",
                "counter" if name.endswith("_total") else "gauge",
                unit,
                ", ".join(metric.labels),
                metric.meaning,
            )
        )
    return table(("name", "type", "unit", "labels", "meaning"), rows)


def stub(function: Callable[..., Any]) -> str:
    """The signature of a function or a method."""
    # kinds have quotes
    text = re.sub(
        r"""(: |-> )(['"])(.*?)\2""", r"\1\3", str(inspect.signature(function))
    )
    return function.__name__ + re.sub(r"^\(self(, )?", "(", text)


def members(kind: type) -> str:
    """The attributes, properties and methods of a class."""
    own = {
        name: part
        for name, part in vars(kind).items()
        if name[0] != "_" and part.__doc__
    }
    texts = {
        name: about(part) for name, part in own.items() if isinstance(part, property)
    }
    doc = (kind.__doc__ or "").partition("Attributes:")[2]
    texts |= texts_of(SimpleNamespace(__doc__=f"\n    Attributes:{doc}"))
    rows = [(f"`{name}`", linked(text)) for name, text in texts.items()]
    rows += [
        (f"`{stub(part)}`", about(part))
        for part in own.values()
        if inspect.isfunction(part)
    ]
    return table((f"`{kind.__name__}`", "meaning"), rows) if rows else ""


def api() -> str:
    """The names of .ci/api.md; the site has their whole docstrings."""
    parts = []
    for mark, name in re.findall(
        r"^(##|:::) (.+)$", (ROOT / ".ci/api.md").read_text(), re.MULTILINE
    ):
        found: Any = locate(name) if mark == ":::" else None
        parts.append(f"**`{name}`**: {about(found)}" if found else f"### {name}")
        if inspect.isfunction(found):
            code = (
                stub(found)
                if len(stub(found)) < 90
                else re.sub(r", (?=\*|\w+:)", ",\n    ", stub(found))
            )
            parts.append(f"```text\n{code}\n```")
        elif inspect.isclass(found) and not is_section(found) and found is not Batch:
            parts.append(members(found))
    return "\n\n".join(filter(None, parts))


def reference() -> str:
    """The text of docs/reference.md."""
    text = (ROOT / ".ci/reference_template.md").read_text()
    return re.sub(
        r"^\{\{(\w+)\}\}$",
        lambda match: globals()[match[1]](),
        text,
        flags=re.MULTILINE,
    )


def llms_full() -> str:
    """The text of llms-full.txt."""
    text = re.sub(r"\]\(([\w-]+\.md)", r"](docs/\1", reference())
    return f"{(ROOT / 'llms.txt').read_text()}\n{text}"


if __name__ == "__main__":
    (ROOT / "docs/reference.md").write_text(reference())
    (ROOT / "llms-full.txt").write_text(llms_full())
