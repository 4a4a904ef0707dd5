"""Any expression as a filter: true for the samples that plain Python finds, one at a time, or one clear error.

`evaluated` is that Python: None is no value, a comparison with it has none, and `and`, `or` and `not` are those of
three-valued logic. Expressions are grown over columns of every kind, and damaged as text.
"""

from __future__ import annotations

from typing import Any

import pytest
from filters import _DAMAGE, _EXPRESSIONS, check
from hypothesis import HealthCheck, example, given, settings

from raypipe.stores import scan


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_CHUNK", 5)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(_EXPRESSIONS)
@example("large == 4611686018427387904.0")
@example("real in [0]")
@example("whole / byte > 1 or words not in ['a', None]")
def test_an_expression_is_true_where_plain_python_finds_it(expression: str) -> None:
    check(expression)


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(_EXPRESSIONS, _DAMAGE)
def test_a_damaged_expression_is_another_one_or_one_error(
    expression: str, damage: list[Any]
) -> None:
    for at, cut, put in damage:
        at %= len(expression) + 1
        expression = expression[:at] + put + expression[at + cut :]
    check(expression)
