"""Evaluates conditions on whole columns, with the three-valued logic of SQL.

A bool is the number 1 or 0. Operations on values of different types, on null, with an integer overflow or with a
division by zero give null (unknown), and a row is wanted only if the whole condition is true.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plait.filter.arithmetic import ARITHMETIC, calculate
from plait.filter.comparisons import among, compare, like
from plait.filter.grammar import Term
from plait.filter.values import Fields, Number, Text, Values, both, either, opposite, truth

_ZERO = Values(whole=Number(0, True))


def evaluate(node: Term, fields: Fields) -> Values:
    """The value of a condition or of a part of it, by row."""
    match node.op:
        case "header":
            return fields.header(node.value)
        case "field":
            return fields.field(node.value)
        case "text":
            return Values(text=Text(node.value, True))
        case "number":
            number = Number(node.value, True)
            return Values(whole=number) if isinstance(node.value, int) else Values(real=number)
        case "null":
            return Values()
        case "tagged":
            return truth(fields.tagged(node.value), True)
        case "and" | "or":
            return _junction(node, fields)
        case "not":
            true, known = _condition(evaluate(node.parts[0], fields))
            return truth(both(opposite(true), known), known)
        case "is null":
            return truth(opposite(_known(evaluate(node.parts[0], fields))), True)
        case "in":
            return among(evaluate(node.parts[0], fields), node.value)
        case "like":
            return like(evaluate(node.parts[0], fields), node.value)
        case "negate":
            return calculate("-", _ZERO, evaluate(node.parts[0], fields))
    left, right = (evaluate(part, fields) for part in node.parts)
    return calculate(node.op, left, right) if node.op in ARITHMETIC else compare(node.op, left, right)


def wanted(node: Term, fields: Fields) -> Any:
    """Flags of the rows for which the condition is true."""
    return both(*_condition(evaluate(node, fields)))


def _known(value: Values) -> Any:
    """Which rows have a value."""
    known: Any = False
    for part in value:
        if part is not None:
            known = either(known, part.valid)
    return known


def _condition(value: Values) -> tuple[Any, Any]:
    """(true, known) of a value that is used as a condition: a number is true unless it is 0, a text is unknown."""
    true: Any = False
    known: Any = False
    for number in (value.whole, value.real):
        if number is not None:
            nonzero = number.data if _is_truth(number.data) else np.not_equal(number.data, 0)
            true, known = either(true, both(nonzero, number.valid)), either(known, number.valid)
    return true, known


def _is_truth(data: Any) -> bool:
    return isinstance(data, bool) or (isinstance(data, np.ndarray) and data.dtype == bool)


def _junction(node: Term, fields: Fields) -> Values:
    """AND and OR: known as soon as one part decides the result, or if all parts are known."""
    is_or = node.op == "or"
    #: The rows that one part has decided, and the rows for which all parts say the opposite.
    decided: Any = False
    undone: Any = True
    for part in node.parts:
        true, known = _condition(evaluate(part, fields))
        false = both(known, opposite(true))
        decided = either(decided, true if is_or else false)
        undone = both(undone, false if is_or else true)
        if decided is True or (decided is not False and decided.all()):
            break
    return truth(decided if is_or else undone, either(decided, undone))
