from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest

from raypipe.pages import COLOURS, Series, chart, render, thinned
from raypipe.pages.report import Recorded

SVG = "{http://www.w3.org/2000/svg}"


def drawn(made: str) -> ET.Element:
    return ET.fromstring(made[made.index("<svg") : made.index("</svg>") + 6])


def points(svg: ET.Element) -> list[list[tuple[float, float]]]:
    """Of each line, in the colours of lines."""
    paths = [path for path in svg.iter(f"{SVG}path") if any(c in path.get("style", "") for c in COLOURS)]
    found = [
        re.findall(r"[ML] (\S+) (\S+)", path.attrib["d"]) for path in paths if "fill: none" in path.attrib["style"]
    ]
    return [[(float(x), float(y)) for x, y in line] for line in found]


def page_of(text: str = "", charts: Any = ()) -> str:
    return render(
        "report.html",
        **{
            "runs": [Recorded(text, {}, [], [])],
            "summaries": [],
            "charts": charts,
            "stages": [""],
            "differences": [],
        },
        **{"configuration": text, "max_rows": 1, "told": None},
    )


def test_a_chart_is_well_formed_and_its_lines_go_where_the_values_go() -> None:
    made = chart("loss <1>", [Series("a & b", [0, 1, 2], [3, 1, 2]), Series("flat", [0, 2], [1, 1])])
    first, second = points(drawn(made))
    assert [x for x, _ in first] == sorted(x for x, _ in first) and second[0][1] == second[1][1] == first[1][1]
    assert first[0][1] < first[2][1] < first[1][1], "y grows downwards in SVG"
    assert "0" in [text.text for text in drawn(made).iter(f"{SVG}text")]
    text = page_of(charts=[made])
    assert made in text
    assert "<b>loss &lt;1&gt;</b> by step" in text and "a &amp; b" in text and ">flat<" in text


def test_all_of_a_chart_lies_inside_of_it() -> None:
    for values in ([1e-9, 2e-9], [-5, 1e6], [7, 7], [0, 0]):
        svg = drawn(chart("t", [Series("", [1, 2], values)], from_zero=False))
        *_, width, height = map(float, svg.attrib["viewBox"].split())
        (line,) = points(svg)
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line)


@pytest.mark.parametrize("values", [[3, 5], [101, 103], [0.001, 0.002], [-2, 5]])
def test_a_chart_begins_at_zero_where_no_value_is_below(values: list[float]) -> None:
    svg = drawn(chart("t", [Series("", [0, 1], values)]))
    labels = [
        float(str(t.text).replace(",", "").replace("−", "-"))
        for t in svg.iter(f"{SVG}text")
        if "end" in t.attrib["style"]
    ]
    assert min(labels) == 0 if min(values) > 0 else min(labels) <= -2
    assert max(labels) >= max(values) and 3 <= len(labels) <= 7


def test_without_a_value_there_is_no_chart() -> None:
    assert chart("t", []) == chart("t", [Series("", [1, 2], [math.nan, math.inf])]) == ""


def test_one_value_is_a_dot() -> None:
    assert len(list(drawn(chart("t", [Series("", [5], [1])])).iter(f"{SVG}use"))) == 1


def test_the_same_values_make_the_same_chart() -> None:
    lines = [Series("", [1, 2, 3], [1, 2, 3])]
    assert chart("t", lines) == chart("t", lines)


@pytest.mark.parametrize("num", [1, 399, 400, 401, 100_000])
def test_many_points_are_drawn_by_the_means_of_neighbours(num: int) -> None:
    found = thinned(Series("", range(num), [3.0] * num))
    assert len(found) == min(num, 400) and set(found[:, 1]) == {3.0}
    assert thinned(Series("", range(800), range(800))).mean(0).tolist() == [399.5, 399.5]


def test_what_a_page_is_given_is_text_and_it_needs_no_network() -> None:
    evil = "<script>alert(1)</script>\ud800$x$"
    made = [chart(evil, [Series(evil, [1], [1]), Series(evil, [1], [1])], evil)]
    text = page_of(evil, made)
    assert "<script" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;\\ud800$x$" in text
    assert not re.search(r"(src|href)=[\"'](?!data:|#)", text) and "@import" not in text and "url(" not in text
    text.encode()


def test_elements_are_closed_and_have_names_of_their_own() -> None:
    class Checker(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag not in ("meta", "link", "img"):
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    lines = [Series(name, [1, 2], [1, value]) for name, value in (("a", 3), ("b", 4))]
    text = page_of("t", [chart("one", lines), chart("two", lines[::-1])])
    Checker().feed(text)
    assert Checker.open == []
    assert all(name.startswith("m") for name in re.findall(r' id="([^"]*)"', text)), "markers alone, by their look"


def luminance(colour: str) -> float:
    """Relative, as WCAG 2.1 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_lines_stand_out_from_the_light_and_from_the_dark_background() -> None:
    light, dark = re.findall(r"--card: (#\w+)", page_of())[:2]
    for colour in COLOURS:
        for card in (light.replace("#fff", "#ffffff"), dark):
            lower, higher = sorted((luminance(colour), luminance(card)))
            assert (higher + 0.05) / (lower + 0.05) >= 3, (colour, card)
