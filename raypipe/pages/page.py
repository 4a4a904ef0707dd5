"""HTML pages that need nothing else: no network, no scripts, charts as SVG. Knows nothing of what they show.

All functions return HTML; text that they are given is escaped.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from raypipe.logs import printable

_WIDTH, _HEIGHT = 460, 220  # of a chart, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 24
_MAX_POINTS = 400  # of a line: more would not be told apart
_MOST = {"line": _MAX_POINTS, "marked": _MAX_POINTS, "dots": 1 << 30}
_COLOURS = ("#2563a8", "#c2541b", "#2f8f4e", "#8a4fa3", "#a67c00", "#5b6470")

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2126;--faint:#66707a;--rule:#dfe3e7;--card:#ffffff;--page:#f5f6f8}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7ea;--faint:#98a2ac;--rule:#363d45;--card:#1e2328;--page:#14181b}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;max-width:1000px;
padding:24px}
h1{font-size:22px;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:16px;margin:28px 0 8px}
p{margin:6px 0}.faint{color:var(--faint)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:16px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:6px;padding:8px}
svg,img{max-width:100%;height:auto;display:block}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .faint{fill:var(--faint)}svg .rule{stroke:var(--rule)}
table{border-collapse:collapse;background:var(--card);border:1px solid var(--rule);width:100%}
td,th{padding:4px 10px;border-top:1px solid var(--rule);text-align:left;vertical-align:top;overflow-wrap:anywhere}
th{color:var(--faint);font-weight:normal}td:first-child{color:var(--faint)}
.bar{width:70%}.bar i{display:inline-block;height:10px;background:#2563a8;border-radius:2px}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:10px}
figure{margin:0;font-size:12px;color:var(--faint);overflow-wrap:anywhere}figure img{border-radius:4px}
pre{background:var(--card);border:1px solid var(--rule);padding:10px;overflow:auto;font-size:13px}
"""


Form = Literal["line", "marked", "dots"]


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for the legend.
        x, y: of equal lengths; x ascends, but for dots.
        form: a line, a line with a dot at every value, for few of them, or dots alone, in any order.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    form: Form = "line"


def page(title: str, note: str, body: Iterable[str]) -> str:
    """A whole page."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<link rel="icon" href="data:,">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p class="faint">{escape(note)}</p>'
        f"{''.join(body)}</body></html>\n"
    )


def section(title: str, *body: str) -> str:
    """A part of a page under a heading; nothing for nothing."""
    return f"<h2>{escape(title)}</h2>{''.join(body)}" if any(body) else ""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def text_block(text: str) -> str:
    """Text as it stands, such as YAML."""
    return f"<pre>{escape(text)}</pre>"


def cards(parts: Iterable[str]) -> str:
    """Charts or pictures side by side."""
    found = "".join(f'<div class="card">{part}</div>' for part in parts if part)
    return f'<div class="cards">{found}</div>' if found else ""


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Rows of cells; nothing without any."""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>" if header else ""
    return f"<table>{head}{body}</table>" if body else ""


def bars(values: Sequence[tuple[str, float]]) -> str:
    """A bar for each name, as long as its value is large, none of which is negative."""
    most = max((value for _, value in values), default=0) or 1
    rows = "".join(
        f'<tr><td>{escape(name)}</td><td class="bar"><i style="width:{70 * value / most:.2f}%"></i>'
        f" {number(value)}</td></tr>"
        for name, value in values
    )
    return f"<table>{rows}</table>" if rows else ""


def figure(address: str, caption: str) -> str:
    """A picture, by a data: address, and what it is; without an address, the caption alone."""
    picture = f'<img src="{escape(address)}" alt="{escape(caption)}">' if address else ""
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def gallery(figures: Iterable[str]) -> str:
    """Figures side by side."""
    return f'<div class="gallery">{"".join(figures)}</div>'


def chart(title: str, lines: Iterable[Series], x_name: str = "step", *, from_zero: bool = True) -> str:
    """A line chart; values that are no finite numbers are left out, and without any there is no chart.

    Args:
        title: with the unit.
        lines: drawn over one another.
        x_name: what x counts.
        from_zero: whether y begins at 0, where no value is below.
    """
    points = [(line, thinned(line.x, line.y, _MOST[line.form])) for line in lines]
    points = [(line, found) for line, found in points if found]
    if not points:
        return ""
    xs, ys = ([value[axis] for _, found in points for value in found] for axis in (0, 1))
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min([*ys, *[0.0] * from_zero]), max(ys))
    x_low, x_high, y_low, y_high = min(xs), max(xs), y_ticks[0], y_ticks[-1]

    def across(x: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((x - x_low) / (x_high - x_low) if x_high > x_low else 0.5)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (y - y_low) / (y_high - y_low)

    parts = [f'<text x="4" y="16">{escape(title)}</text>']
    for y in y_ticks:
        parts.append(
            f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>'
            f'<text class="faint" text-anchor="end" x="{_LEFT - 6}" y="{down(y) + 4:.1f}">{number(y)}</text>'
        )
    for x in x_ticks:
        if x_low <= x <= x_high:
            parts.append(
                f'<text class="faint" text-anchor="middle" x="{across(x):.1f}" y="{_HEIGHT - 8}">'
                f"{number(x)}</text>"
            )
    for (line, found), colour in zip(points, itertools.cycle(_COLOURS), strict=False):
        if line.form == "dots":
            dots = "".join(f"M{across(x):.1f} {down(y):.1f}h0" for x, y in found)
            parts.append(f'<path d="{dots}" stroke="{colour}" stroke-width="2.2" stroke-linecap="round"/>')
            continue
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in found)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
        if line.form == "marked" or len(found) == 1:
            parts += [
                f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="2.6" fill="{colour}">'
                f"<title>{escape(line.name)}: {number(y)} at {escape(x_name)} {number(x)}</title></circle>"
                for x, y in found
            ]
    if len(points) > 1:
        names = zip((line.name for line, _ in points), itertools.cycle(_COLOURS), strict=False)
        legend = " ".join(f'<tspan style="fill:{colour}">{escape(name)}</tspan>' for name, colour in names)
        parts.append(f'<text text-anchor="end" x="{_WIDTH - _RIGHT}" y="16">{legend}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img"'
        f' aria-label="{escape(title)} by {escape(x_name)}">{"".join(parts)}</svg>'
    )


def thinned(x: Sequence[float], y: Sequence[float], most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """The finite points, by the means of neighbours where there are more than `most`."""
    found = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(a) and math.isfinite(b)]
    together = -(-len(found) // most)
    if together <= 1:
        return found
    groups = (found[first : first + together] for first in range(0, len(found), together))
    return [(sum(a for a, _ in group) / len(group), sum(b for _, b in group) / len(group)) for group in groups]


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers that enclose a range: multiples of 1, 2 or 5 times a power of ten, at least two."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / about))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude * about >= span)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * n for n in range(first, max(last, first + 1) + 1)]


def escape(text: str) -> str:
    """Text as a page may have it, also where it holds what is no character."""
    return html.escape(printable(text))


def number(value: float) -> str:
    """A figure as people write it, of about four digits."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "none"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
