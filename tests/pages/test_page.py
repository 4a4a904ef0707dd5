from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from raypipe.pages.page import Series, chart, number, page, section, table, thinned, ticks


def points(svg: str) -> list[list[tuple[float, float]]]:
    lines = ET.fromstring(svg).iter("polyline")
    return [[tuple(map(float, one.split(","))) for one in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def test_a_chart_is_well_formed_and_its_lines_go_where_the_values_go() -> None:
    svg = chart("loss <1>", [Series("a & b", [0, 1, 2], [3, 1, 2]), Series("flat", [0, 2], [1, 1])])
    first, second = points(svg)
    assert [x for x, _ in first] == sorted(x for x, _ in first) and second[0][1] == second[1][1] == first[1][1]
    assert first[0][1] < first[2][1] < first[1][1], "y grows downwards in SVG"
    text = [element.text for element in ET.fromstring(svg).iter() if element.text]
    assert "loss <1>" in text and "a & b" in text and "0" in text


def test_all_of_a_chart_lies_inside_of_it() -> None:
    for values in ([1e-9, 2e-9], [-5, 1e6], [7, 7], [0, 0]):
        root = ET.fromstring(chart("t", [Series("", [1, 2], values)], from_zero=False))
        (line,) = points(ET.tostring(root, encoding="unicode").replace("ns0:", ""))
        assert all(0 <= x <= 460 and 0 <= y <= 220 for x, y in line)


def test_without_a_value_there_is_no_chart_and_no_section() -> None:
    assert chart("t", []) == chart("t", [Series("", [1, 2], [math.nan, math.inf])]) == ""
    assert section("nothing", "", "") == table([]) == ""


def test_one_value_is_a_dot() -> None:
    svg = chart("t", [Series("", [5], [1])])
    assert len(list(ET.fromstring(svg).iter("circle"))) == 1


@pytest.mark.parametrize("num", [1, 399, 400, 401, 100_000])
def test_many_points_are_drawn_by_the_means_of_neighbours(num: int) -> None:
    found = thinned(range(num), [3.0] * num)
    assert min(num, 200) <= len(found) <= 400 and {y for _, y in found} == {3.0}
    assert sum(x for x, _ in thinned(range(800), range(800))) / 400 == 399.5


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (-3, 7), (1e-7, 9e-7), (0, 123_456), (5, 5), (-2, -1)])
def test_ticks_are_round_and_enclose_the_range(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 7
    step = found[1] - found[0]
    assert round(step / 10 ** math.floor(math.log10(step) + 1e-9)) in (1, 2, 5, 10)


def test_figures_are_short() -> None:
    assert [number(v) for v in (0, 3.0, 1234.5, 0.123456, 1e-5, math.nan)] == [
        *("0", "3", "1,234", "0.1235", "1e-05", "none")
    ]


def test_what_a_page_is_given_is_text_and_it_needs_no_network() -> None:
    evil = "<script>alert(1)</script>"
    text = page(evil, evil, [table([[evil]], [evil]), section(evil, chart(evil, [Series(evil, [1], [1])]))])
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=[\"'](?!data:)", text) and "@import" not in text and "url(" not in text
