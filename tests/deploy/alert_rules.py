"""Evaluate deploy/alerts.yaml on series as promtool's tests give them: the part of PromQL that the rules use."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

RULES = Path(__file__).parents[2] / "deploy/alerts.yaml"
_LOOKBACK_S = 300.0

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]


def rules() -> list[dict[str, Any]]:
    """The alerts, in their order."""
    return [
        rule
        for group in yaml.safe_load(RULES.read_text())["groups"]
        for rule in group["rules"]
    ]


def selectors() -> Iterator[Any]:
    """All selectors of the rules."""
    found: list[Any] = []
    for rule in rules():
        promql.walk(promql.parse(rule["expr"]), found.append)
    return (node for node in found if isinstance(node, promql.VectorSelector))


def seconds(text: str) -> float:
    """Of a duration such as 1h30m."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(
        float(number) * units[unit]
        for number, unit in re.findall(r"([\d.]+)([hms])", text)
    )


class Series(NamedTuple):
    """A metric's samples: their times and values; NaN = it is stale from here on."""

    name: str
    labels: Labels
    samples: list[tuple[float, float]]


def series_of(test: dict[str, Any]) -> list[Series]:
    """The input of one of promtool's tests."""
    interval, found = seconds(test["interval"]), []
    for given in test["input_series"]:
        name, _, labels = given["series"].partition("{")
        values: list[str] = []
        for text in str(given["values"]).split():
            if step := re.fullmatch(r"(-?[\d.]+(?:e\d+)?)([+-][\d.]+)?x(\d+)", text):
                start, by = float(step[1]), float(step[2] or 0)
                values += [str(start + by * i) for i in range(int(step[3]) + 1)]
            else:
                values += ["_"] * int(text[2:]) if text.startswith("_x") else [text]
        samples = [
            (i * interval, math.nan if v == "stale" else float(v))
            for i, v in enumerate(values)
            if v != "_"
        ]
        found.append(
            Series(name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels)), samples)
        )
    return found


def firing(
    test: dict[str, Any], every_s: float, until_s: float
) -> list[dict[str, str]]:
    """The alerts that fire at a time of a test, by their labels."""
    series, since = series_of(test), {}
    fire: list[dict[str, str]] = []
    for turn in range(int(until_s // every_s) + 1):
        now, active, fire = turn * every_s, {}, []
        for rule in rules():
            for labels in _Evaluation(series, now).of(promql.parse(rule["expr"])):
                key = rule["alert"], labels
                active[key] = since.get(key, now)
                if now - active[key] >= seconds(rule.get("for", "0s")):
                    fire.append(
                        {**dict(labels), **rule["labels"], "alertname": rule["alert"]}
                    )
        since = active
    return fire


class _Evaluation:
    """Of expressions at one time."""

    def __init__(self, series: list[Series], now: float) -> None:
        self._series, self._now = series, now

    def of(self, node: Any) -> Any:
        return _OF[type(node)](self, node)

    def _matching(self, node: Any) -> list[Series]:
        wanted = [(m.name, m.op, m.value) for m in node.matchers.matchers]
        assert all(op == promql.MatchOp.Equal for _, op, _ in wanted), wanted
        pairs = {(name, value) for name, _, value in wanted}
        return [
            each
            for each in self._series
            if each.name == node.name and pairs <= each.labels
        ]

    def selector(self, node: Any) -> Vector:
        at, found = self._now - (node.offset or timedelta()).total_seconds(), {}
        for each in self._matching(node):
            last = [
                value for time, value in each.samples if at - _LOOKBACK_S < time <= at
            ][-1:]
            if last and not math.isnan(last[0]):
                found[each.labels] = last[0]
        return found

    def call(self, node: Any) -> Any:
        if node.func.name == "time":
            return self._now
        ((matrix,), range_s) = node.args, node.args[0].range.total_seconds()
        found = {}
        for each in self._matching(matrix.vector_selector):
            inside = [
                s
                for s in each.samples
                if self._now - range_s <= s[0] <= self._now and not math.isnan(s[1])
            ]
            value = _OVER_TIME[node.func.name](inside, self._now - range_s, self._now)
            if value is not None:
                found[each.labels] = value
        return found

    def aggregate(self, node: Any) -> Vector:
        groups: dict[Labels, list[float]] = {}
        for labels, value in self.of(node.expr).items():
            by = frozenset(
                (name, of) for name, of in labels if name in node.modifier.labels
            )
            groups.setdefault(by, []).append(value)
        return {
            labels: float(_AGGREGATES[str(node.op)](values))
            for labels, values in groups.items()
        }

    def binary(self, node: Any) -> Any:
        left, right, op = self.of(node.lhs), self.of(node.rhs), str(node.op)
        if op == "and":  # labels are the same on both sides of the rules
            return {labels: value for labels, value in left.items() if labels in right}
        if op == "or":
            return right | left
        if isinstance(left, float) and isinstance(right, float):
            return _OPERATORS[op](left, right)
        if isinstance(right, float):
            pairs = {labels: (value, right) for labels, value in left.items()}
        elif isinstance(left, float):
            pairs = {labels: (left, value) for labels, value in right.items()}
        else:
            pairs = {
                labels: (value, right[labels])
                for labels, value in left.items()
                if labels in right
            }
        if op in _COMPARISONS:
            return {
                labels: a for labels, (a, b) in pairs.items() if _COMPARISONS[op](a, b)
            }
        return {labels: _OPERATORS[op](a, b) for labels, (a, b) in pairs.items()}


def _rate(samples: list[tuple[float, float]], start: float, end: float) -> float | None:
    """As Prometheus has it: the increase, resets included, drawn out to the ends of the range."""
    if len(samples) < 2:
        return None
    values = [value for _, value in samples]
    increase = (
        values[-1] - values[0] + sum(a for a, b in itertools.pairwise(values) if b < a)
    )
    (first, _), (last, _) = samples[0], samples[-1]
    between = (last - first) / (len(samples) - 1)
    to_start, to_end = first - start, end - last
    if increase > 0 and values[0] >= 0:
        # a counter is not drawn out below 0
        to_start = min(to_start, (last - first) * values[0] / increase)
    drawn = sum(to if to < between * 1.1 else between / 2 for to in (to_start, to_end))
    return increase * (last - first + drawn) / (last - first) / (end - start)


def _most(samples: list[tuple[float, float]], *_: float) -> float | None:
    return max((value for _, value in samples), default=None)


_OVER_TIME: dict[str, Callable[..., float | None]] = {
    "rate": _rate,
    "max_over_time": _most,
}
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "sum": sum,
    "max": max,
    "count": len,
}
_OPERATORS: dict[str, Callable[[float, float], float]] = {
    "-": operator.sub,
    "*": operator.mul,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "==": operator.eq,
}
_OF: dict[type, Callable[[_Evaluation, Any], Any]] = {
    promql.VectorSelector: _Evaluation.selector,
    promql.Call: _Evaluation.call,
    promql.AggregateExpr: _Evaluation.aggregate,
    promql.BinaryExpr: _Evaluation.binary,
    promql.ParenExpr: lambda evaluation, node: evaluation.of(node.expr),
    promql.NumberLiteral: lambda _, node: float(node.val),
}
