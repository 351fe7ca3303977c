"""LIKE patterns: ``%`` is any text, ``_`` any character.

A text with ``%`` before or after it is matched by a search. Other patterns become regular expressions for Arrow (RE2),
which do not backtrack, but whose states may double with each wildcard after a ``%``; the number of those has a limit.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import NamedTuple


class Form(Enum):
    """How a pattern is matched."""

    WHOLE = auto()
    START = auto()
    END = auto()
    PART = auto()
    REGEX = auto()


class Pattern(NamedTuple):
    """A compiled pattern."""

    form: Form
    #: A text, or a regular expression.
    text: str
    #: The wildcards that count towards ``FILTER_WILDCARDS_MAX``.
    wildcards: int = 0


def compile_pattern(pattern: str, escape: str | None) -> Pattern | None:
    """None: the pattern ends with the escape character, which has to stand before another one."""
    #: Wildcards, and literal characters, which have the escape character before them here.
    pieces: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            following = next(characters, None)
            if following is None:
                return None
            pieces.append("!" + following)
        elif character not in "%_":
            pieces.append("!" + character)
        elif not (character == "%" and pieces and pieces[-1] == "%"):
            pieces.append(character)
    starts_open, ends_open = pieces[:1] == ["%"], pieces[-1:] == ["%"]
    inner = pieces[starts_open : len(pieces) - ends_open if len(pieces) > 1 else None]
    if all(len(piece) == 2 for piece in inner):
        text = "".join(piece[1] for piece in inner)
        if starts_open and ends_open:
            return Pattern(Form.PART, text)
        return Pattern(Form.END if starts_open else Form.START if ends_open else Form.WHOLE, text)
    parts = [{"%": ".*", "_": "."}.get(piece) or re.escape(piece[1]) for piece in pieces]
    expression = "(?s)^" + "".join(parts[:-1] if ends_open else [*parts, "$"])
    wildcards = [piece for piece in pieces[: len(pieces) - ends_open] if len(piece) == 1]
    # Without a % before it, a wildcard does not multiply the states.
    return Pattern(Form.REGEX, expression, len(wildcards) if "%" in wildcards else 0)
