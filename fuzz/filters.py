"""Filters by chance, and what plain Python finds for each sample, one at a time."""

from __future__ import annotations

import ast
import operator
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from raypipe.errors import ConfigError
from raypipe.stores.filter import matching
from raypipe.stores.memory import MemoryStore

NUM = 12

COLUMNS: dict[str, Any] = {
    "whole": [3, -7, 0, 12, 5, 1, 0, -2, 9, 4, 2, 8],
    "gaps": [None, None, None, None, None, 1, 0, None, 2, -3, None, 7],
    "real": [
        0.5,
        -0.0,
        0.0,
        2.0,
        3.25,
        float("nan"),
        float("inf"),
        -1.5,
        1e300,
        4.0,
        5e-324,
        2.0,
    ],
    "holes": [None, 0.5, None, 1, -2, None, 0, 3.5, None, None, None, None],
    "byte": np.array([0, 1, 255, 3, 4, 128, 6, 7, 200, 9, 10, 11], np.uint8),
    "large": [(1 << 62) + i for i in range(NUM)],
    "text": ["a", "b", "", "é", "1", "A", "a", "true", "0", "None", "z", "b"],
    "words": [None, None, None, None, None, None, "a", None, "b", "", "1", None],
    "flag": [True, False, True, None, None, False, True, None, True, False, None, True],
    "nothing": [None] * NUM,
    "lists": [[1], [2, 3], None, [], [1], [1], [1], [1], [1], [1], [1], [1]],
}

STORE = MemoryStore([b""] * NUM, [i % 3 for i in range(NUM)], columns=COLUMNS)

ROWS = [
    {"label": i % 3}
    | {
        name: np.asarray(values, object)[i]
        for name, values in COLUMNS.items()
        if name != "lists"
    }
    for i in range(NUM)
]

for row, value in zip(ROWS, COLUMNS["lists"], strict=True):
    row["lists"] = value

_CONSTANTS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "-7",
        "3",
        "255",
        "0.5",
        "-0.0",
        "2.0",
        "1e300",
        "1e999",
        "'a'",
        "'1'",
        "''",
        "'é'",
        "True",
    ]
) | st.sampled_from(
    [
        "False",
        "None",
        "9223372036854775807",
        "-9223372036854775808",
        "4611686018427387905",
    ]
)

_NUMBERS = st.sampled_from(["whole", "gaps", "real", "holes", "byte", "label", "large"])

_NAMES = st.sampled_from(list(ROWS[0]))

_LISTS = st.lists(_CONSTANTS, max_size=4).map(lambda values: f"[{', '.join(values)}]")


def _joined(parts: Any, words: list[str]) -> Any:
    return st.builds("({} {} {})".format, parts, st.sampled_from(words), parts)


_VALUES = st.recursive(
    _NUMBERS | _NAMES | _CONSTANTS,
    lambda inner: _joined(inner, ["+", "-", "*", "/"]) | inner.map("(-{})".format),
    max_leaves=4,
)

_TESTS = (
    _joined(_VALUES, ["==", "!=", "<", "<=", ">", ">="])
    | st.builds("({} {} {})".format, _VALUES, st.sampled_from(["in", "not in"]), _LISTS)
    | st.builds("({} < {} <= {})".format, _VALUES, _VALUES, _VALUES)
    | st.just("flag")
)

_EXPRESSIONS = st.recursive(
    _TESTS,
    lambda inner: _joined(inner, ["and", "or"]) | inner.map("(not {})".format),
    max_leaves=6,
)

_PUT = [*"()[]'+-*/<=!.,:0 9e\0\n\\@é", " in ", " not ", "10" * 40]

_DAMAGE = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 6), st.sampled_from(_PUT)),
    min_size=1,
    max_size=4,
)

# plain Python has no answer: types that do not compare
Unknown = type("Unknown", (Exception,), {})

_COMPARISONS: dict[type, Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluated(node: ast.expr, row: dict[str, Any]) -> Any:
    """The value of an expression for one sample; None = it has none. Raises Unknown."""
    match node:
        case ast.Name(id=name):
            return row[name]
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _truth(evaluated(operand, row))
            return None if value is None else not value
        case ast.UnaryOp(operand=operand):
            value = evaluated(operand, row)
            return None if value is None else _whole(-_number(value))
        case ast.BoolOp(op=op, values=values):
            found = [_truth(evaluated(each, row)) for each in values]
            decides = isinstance(op, ast.Or)
            return (
                decides if decides in found else None if None in found else not decides
            )
        case ast.BinOp(left=left, op=op, right=right):
            one, two = evaluated(left, row), evaluated(right, row)
            if (
                one is None
                or two is None
                or (isinstance(op, ast.Div) and _number(two) == 0)
            ):
                return None
            return _whole(_ARITHMETIC[type(op)](_number(one), _number(two)))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            sides = [left, *comparators]
            found = [
                _compared(a, op, b, row)
                for a, op, b in zip(sides, ops, comparators, strict=False)
            ]
            return False if False in found else None if None in found else True
    raise Unknown


def _compared(
    left: ast.expr, op: ast.cmpop, right: ast.expr, row: dict[str, Any]
) -> bool | None:
    one = evaluated(left, row)
    if isinstance(op, ast.In | ast.NotIn):
        assert isinstance(right, ast.List)
        try:
            values = [ast.literal_eval(value) for value in right.elts]
        except ValueError:
            raise Unknown from None
        if one is None:
            # a None that is written is compared as by ==
            is_known = None in values or not values or isinstance(left, ast.Constant)
            found = None in values if is_known else None
        else:
            found = any(
                _same_kind(one, value) and one == value
                for value in values
                if value is not None
            )
        return found if found is None or isinstance(op, ast.In) else not found
    two = evaluated(right, row)
    for side, other in ((right, one), (left, two)):
        if (
            isinstance(op, ast.Eq | ast.NotEq)
            and isinstance(side, ast.Constant)
            and side.value is None
        ):
            return (other is None) == isinstance(op, ast.Eq)
    if one is None or two is None:
        return None
    _same_kind(one, two)
    return _COMPARISONS[type(op)](one, two)


def _same_kind(one: Any, two: Any) -> bool:
    kinds = {float if type(value) is int else type(value) for value in (one, two)}
    if len(kinds) > 1 or list in kinds:
        raise Unknown
    return True


def _number(value: Any) -> int | float:
    if type(value) not in (int, float):
        raise Unknown
    return value


def _whole(value: float) -> float:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Unknown
    return value


def _truth(value: Any) -> bool | None:
    if value is not None and type(value) is not bool:
        raise Unknown
    return value


def check(expression: str) -> str:
    """What became of it: it is compared with `evaluated`, or its error is looked at."""
    start = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            keep = matching(STORE, expression)
            tree = ast.parse(expression.strip(), mode="eval").body
    except ConfigError as error:
        assert "store.filter" in str(error) and len(str(error)) < 1500, error
        if "is true for none" not in str(error):
            return "refused"
        keep, tree = (
            np.zeros(NUM, bool),
            ast.parse(expression.strip(), mode="eval").body,
        )
    assert time.process_time() - start < 30
    try:
        expected = [_truth(evaluated(tree, row)) is True for row in ROWS]
    except Unknown:
        return "no answer"  # of a part that is not looked at, as of `False and 1 < 'a'`
    assert keep.tolist() == expected, expression
    return "equal"
