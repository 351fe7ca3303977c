"""The grammar of conditions: SQL92 comparisons, arithmetic, BETWEEN, IN, LIKE, IS NULL, AND, OR and NOT.

The grammar is closed: there are no functions, and names are fields of a message. Parsing neither recurses nor
backtracks, and the length, the depth and the number of nodes have limits.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from lark import Lark, Transformer, v_args
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError

from plait.errors import InvalidArgument, InvalidFilter
from plait.filter.comparisons import Literals
from plait.filter.patterns import compile_pattern
from plait.limits import FILTER_DEPTH_MAX, FILTER_LENGTH_MAX, FILTER_NODES_MAX, FILTER_WILDCARDS_MAX
from plait.model import names

#: Fields of a message that are not headers. A header of the same name is written in double quotes.
FIELDS: Final = ("key", "send_time", "store_time")

_GRAMMAR: Final = r"""
    ?start: disjunction
    ?disjunction: conjunction (_OR conjunction)*
    ?conjunction: negation (_AND negation)*
    ?negation: _NOT negation -> not_
        | predicate
    ?predicate: sum
        | sum COMPARE sum -> compare
        | sum _BETWEEN sum _AND sum -> between
        | sum _NOT _BETWEEN sum _AND sum -> not_between
        | sum _IN "(" member ("," member)* ")" -> in_
        | sum _NOT _IN "(" member ("," member)* ")" -> not_in
        | sum _IN _TAGS -> tagged
        | sum _NOT _IN _TAGS -> not_tagged
        | sum _LIKE STRING -> like
        | sum _NOT _LIKE STRING -> not_like
        | sum _LIKE STRING _ESCAPE STRING -> like
        | sum _NOT _LIKE STRING _ESCAPE STRING -> not_like
        | sum _IS _NULL -> is_null
        | sum _IS _NOT _NULL -> is_not_null
    ?sum: product
        | sum SIGN product -> arithmetic
    ?product: unary
        | product FACTOR unary -> arithmetic
    ?unary: atom
        | SIGN unary -> sign
    ?atom: literal
        | NAME -> name
        | QUOTED -> quoted
        | _NULL -> null
        | "(" disjunction ")"
    ?literal: STRING -> string
        | NUMBER -> number
        | _TRUE -> true
        | _FALSE -> false
        | _TIMESTAMP STRING -> timestamp
    ?member: literal
        | SIGN NUMBER -> signed
    COMPARE: "<=" | ">=" | "<>" | "!=" | "=" | "<" | ">"
    SIGN: "+" | "-"
    FACTOR: "*" | "/" | "%"
    STRING: /'(?:[^']|'')*'/
    QUOTED: /"(?:[^"]|"")+"/
    NUMBER: /(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![\w.])/
    NAME: /[^\W\d][\w.$]*/
    %import common.WS
    %ignore WS
"""
_KEYWORDS: Final = (
    "AND", "BETWEEN", "ESCAPE", "FALSE", "IN", "IS", "LIKE", "NOT", "NULL", "OR", "TAGS", "TIMESTAMP", "TRUE",
)  # fmt: skip
_INTEGER_MAX: Final = (1 << 63) - 1
#: The number 2^63, which is valid only after a minus sign.
_TOO_LARGE: Final = "too large"


class Term(NamedTuple):
    """A part of a condition: an operation on its parts, or a value."""

    op: str
    parts: tuple[Term, ...] = ()
    value: Any = None
    #: Number of nodes, and the longest way down to a leaf.
    size: int = 1
    depth: int = 1
    #: Wildcards that count towards ``FILTER_WILDCARDS_MAX``.
    wildcards: int = 0
    #: Where its last name or literal begins.
    position: int = 0


def _leaf(op: str, token: Any, value: Any, wildcards: int = 0) -> Term:
    return Term(op, value=value, wildcards=wildcards, position=token.start_pos)


def _node(op: str, *parts: Term, value: Any = None) -> Term:
    position = max(part.position for part in parts)
    for part in parts:
        _check_number(part)
    size, depth = 1 + sum(part.size for part in parts), 1 + max(part.depth for part in parts)
    wildcards = sum(part.wildcards for part in parts)
    for found, most, what in (
        (depth, FILTER_DEPTH_MAX, "the filter is nested deeper than {} (FILTER_DEPTH_MAX)"),
        (size, FILTER_NODES_MAX, "the filter has more than {} parts (FILTER_NODES_MAX)"),
        (wildcards, FILTER_WILDCARDS_MAX, "the patterns have more than {} wildcards (FILTER_WILDCARDS_MAX)"),
    ):
        if found > most:
            raise _refused(position, what.format(most))
    return Term(op, parts, value, size, depth, wildcards, position)


def _check_number(term: Term) -> None:
    if term.op == _TOO_LARGE:
        raise _refused(term.position, f"the number {term.value} is over {_INTEGER_MAX}")


def _chain(op: str, parts: tuple[Term, ...]) -> Term:
    """``a AND b AND c`` as one node: a long chain is not deep."""
    return parts[0] if len(parts) == 1 else _node(op, *parts)


def _refused(position: int, text: str) -> InvalidFilter:
    return InvalidFilter(f"{text}, at character {position + 1} of the filter", position=position)


def _unquoted(token: Any) -> str:
    text = str(token)
    return text[1:-1].replace(text[0] * 2, text[0])


@v_args(inline=True)
class _Builder(Transformer[Any, Term]):
    """Builds nodes while the parser runs."""

    def disjunction(self, *parts: Term) -> Term:
        return _chain("or", parts)

    def conjunction(self, *parts: Term) -> Term:
        return _chain("and", parts)

    def not_(self, part: Term) -> Term:
        return _node("not", part)

    def compare(self, left: Term, operator: Any, right: Term) -> Term:
        return _node("!=" if operator == "<>" else str(operator), left, right)

    def between(self, value: Term, low: Term, high: Term) -> Term:
        return _node("and", _node(">=", value, low), _node("<=", value, high))

    def not_between(self, value: Term, low: Term, high: Term) -> Term:
        return _node("not", self.between(value, low, high))

    def in_(self, value: Term, *literals: Term) -> Term:
        return _node("in", value, *literals, value=Literals.of([literal.value for literal in literals]))

    def not_in(self, value: Term, *literals: Term) -> Term:
        return _node("not", self.in_(value, *literals))

    def tagged(self, tag: Term) -> Term:
        if tag.op != "text":
            raise _refused(tag.position, "only a text, such as 'new', can be IN tags")
        try:
            names.check_tag(tag.value)
        except InvalidArgument as error:
            raise _refused(tag.position, error.message) from None
        return tag._replace(op="tagged")

    def not_tagged(self, tag: Term) -> Term:
        return _node("not", self.tagged(tag))

    def like(self, value: Term, pattern: Any, escape: Any = None) -> Term:
        character = None if escape is None else _unquoted(escape)
        if character is not None and len(character) != 1:
            raise _refused(escape.start_pos, f"ESCAPE takes one character, not {character!r}")
        compiled = compile_pattern(_unquoted(pattern), character)
        if compiled is None:
            raise _refused(pattern.start_pos, f"the pattern ends with its escape character {character!r}")
        return _node("like", value, _leaf("pattern", pattern, None, compiled.wildcards), value=compiled)

    def not_like(self, value: Term, pattern: Any, escape: Any = None) -> Term:
        return _node("not", self.like(value, pattern, escape))

    def is_null(self, value: Term) -> Term:
        return _node("is null", value)

    def is_not_null(self, value: Term) -> Term:
        return _node("not", self.is_null(value))

    def arithmetic(self, left: Term, operator: Any, right: Term) -> Term:
        return _node(str(operator), left, right)

    def sign(self, sign: Any, value: Term) -> Term:
        if sign == "+":
            _check_number(value)
            return value
        # So that the lowest integer can be written.
        if value.op in ("number", _TOO_LARGE) and -value.value <= _INTEGER_MAX:
            return value._replace(op="number", value=-value.value)
        return _node("negate", value)

    def name(self, name: Any) -> Term:
        if name.upper() in _KEYWORDS:
            raise _refused(name.start_pos, f"{name} is a keyword; write a header of this name in double quotes")
        return _leaf("field" if name in FIELDS else "header", name, str(name))

    def quoted(self, name: Any) -> Term:
        return _leaf("header", name, _unquoted(name))

    def null(self) -> Term:
        return Term("null")

    def string(self, text: Any) -> Term:
        return _leaf("text", text, _unquoted(text))

    def number(self, text: Any) -> Term:
        if not text.isdecimal():
            return _leaf("number", text, float(text))
        value = int(text)
        if value > _INTEGER_MAX + 1:
            raise _refused(text.start_pos, f"the number {text} is over {_INTEGER_MAX}")
        return _leaf("number" if value <= _INTEGER_MAX else _TOO_LARGE, text, value)

    def signed(self, sign: Any, text: Any) -> Term:
        return self.sign(sign, self.number(text))

    def true(self) -> Term:
        return Term("number", value=1)

    def false(self) -> Term:
        return Term("number", value=0)

    def timestamp(self, text: Any) -> Term:
        try:
            moment = datetime.fromisoformat(_unquoted(text))
        except ValueError:
            raise _refused(text.start_pos, f"{text} is not an ISO 8601 time such as '2025-01-31T12:00:00Z'") from None
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        since = moment - datetime(1970, 1, 1, tzinfo=UTC)
        return _leaf("number", text, (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)


@lru_cache(1)
def _parser() -> Lark:
    # A keyword ends where a name would: ANDY is a name.
    keywords = "".join(f"    _{word}.2: /{word}(?![\\w.$])/i\n" for word in _KEYWORDS)
    return Lark(_GRAMMAR + "\n" + keywords, parser="lalr", transformer=_Builder())


def parse(text: str) -> Term:
    """The condition as a tree. Raises ``InvalidFilter`` with the position of the first mistake."""
    if len(text) > FILTER_LENGTH_MAX:
        raise InvalidFilter(
            f"the filter of {len(text)} characters is over the limit of {FILTER_LENGTH_MAX} (FILTER_LENGTH_MAX)",
            position=FILTER_LENGTH_MAX,
        )
    try:
        node: Any = _parser().parse(text)
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        position = len(text) if ended or error.pos_in_stream is None else error.pos_in_stream
        found = repr(text[position : position + 20]) if position < len(text) else "the end"
        raise InvalidFilter(
            f"the filter is not understood at character {position + 1}: {found} is not expected there",
            position=position,
        ) from None
    except VisitError as error:
        raise error.orig_exc from None
    _check_number(node)
    return node  # type: ignore[no-any-return]
