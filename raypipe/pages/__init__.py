"""HTML pages that need no network and no scripts, with charts as SVG.

The pages are the Jinja templates of this folder, which escape whatever text they are given. Jinja and matplotlib
are imported where they are used: they take half a second, and actors and trainers have no use for them.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raypipe.logs import number, printable

_MAX_POINTS = 400  # points of a line: more would not be distinct
_MAX_MARKED = 20  # values of a line that have a dot each
COLOURS = ("#2a7fc9", "#cc5a1c", "#2f9150", "#9b59b6", "#a07a00", "#6f7a85")
"""Of lines: each stands out by 3 to 1 from the white and from the dark background (WCAG 2.1, 1.4.11)."""
_LOOK: Any = {
    "svg.fonttype": "none",  # text stays text, in the page's own font and colour
    "svg.hashsalt": "raypipe",  # the same chart has the same names of parts
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib measures with it; the only one that it brings
    "axes.autolimit_mode": "round_numbers",
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{f"{tick}.{side}": False for tick, side in (("xtick", "bottom"), ("ytick", "left"))},
    "grid.color": "#80808050",
}


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: for the legend.
        x, y: of equal lengths; x ascends.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]


def render(template: str, **values: Any) -> str:
    """The HTML that a template of this folder makes of values; text among them may come from anywhere."""
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = number
    return templates.get_template(template).render(colours=COLOURS, **values)


def chart(title: str, lines: Iterable[Series], x_name: str = "step", *, from_zero: bool = True) -> str:
    """A chart of lines over one another, for a template; nothing without a finite value.

    Args:
        title: with the unit.
        lines: values that are not finite are left out.
        x_name: what x counts.
        from_zero: whether y begins at 0, where no value is below.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [(line, points) for line in lines if len(points := thinned(line))]
    if not drawn:
        return ""
    with matplotlib.rc_context(_LOOK):
        figure = Figure((4.6, 2.1))
        axes = figure.add_axes((0.16, 0.12, 0.78, 0.83))  # room for 1,281,167 at the left
        axes.grid(axis="y", clip_on=False)
        for (_, points), colour in zip(drawn, itertools.cycle(COLOURS), strict=False):
            style = ".-" if len(points) <= _MAX_MARKED else "-"
            axes.plot(*points.T, style, color=colour, markersize=5, clip_on=False)
        if from_zero:
            axes.update_datalim([(drawn[0][1][0, 0], 0)])
        axes.locator_params(nbins=5)
        axes.locator_params(axis="x", integer=True)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,.10g}")
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    svg = file.getvalue()
    # Without the text before the element, and without names that the page's other charts have as well.
    svg = re.sub(r' id="[\w.]+_\d+"', "", svg[svg.index("<svg") :])
    names = [line.name for line, _ in drawn]
    return render("chart.html", title=title, x_name=x_name, names=names, svg=svg)


def thinned(line: Series) -> np.ndarray:
    """Return a line's finite points, float (N, 2); with more than 400, the means of neighbours."""
    points = np.array([line.x, line.y], float).T
    points = points[np.isfinite(points).all(1)]
    if len(points) <= _MAX_POINTS:
        return points
    return np.array([neighbours.mean(0) for neighbours in np.array_split(points, _MAX_POINTS)])
