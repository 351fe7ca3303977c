"""``SubjectPatterns``: the subjects that one consumer gets messages of, as names and prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from plait.errors import InvalidArgument, InvalidName, LimitExceeded
from plait.limits import RESERVED, SUBSCRIBED_SUBJECTS_MAX
from plait.model import names

#: Ends a prefix.
ANY = "*"


class SubjectPatterns(NamedTuple):
    """Exact names, and prefixes of names. Names that begin with ``%`` are reserved, and no prefix covers them."""

    names: tuple[str, ...]
    prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: str | Iterable[str]) -> SubjectPatterns:
        """The patterns of an argument: a name, a prefix with ``*`` at its end, or several of both."""
        listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
        if not listed:
            raise InvalidArgument("an empty list names no subject; give a name, or a prefix such as 'order.*'")
        if len(listed) > SUBSCRIBED_SUBJECTS_MAX:
            raise LimitExceeded(
                f"{len(listed)} subjects are over the limit of {SUBSCRIBED_SUBJECTS_MAX} (SUBSCRIBED_SUBJECTS_MAX); "
                "use a prefix, or several consumers",
                limit="SUBSCRIBED_SUBJECTS_MAX",
                value=SUBSCRIBED_SUBJECTS_MAX,
            )
        exact = dict.fromkeys(each for each in listed if not (isinstance(each, str) and each.endswith(ANY)))
        prefixes = dict.fromkeys(each.removesuffix(ANY) for each in listed if each not in exact)
        for name in exact:
            if isinstance(name, str) and ANY in name:
                raise _misplaced(name)
            names.check("subject", name)
        for prefix in prefixes:
            if ANY in prefix:
                raise _misplaced(prefix + ANY)
            if prefix:
                names.check("subject", prefix)
        return cls(tuple(exact), tuple(prefixes))

    @property
    def single(self) -> str | None:
        """The name of the only subject; None: there are several, or a prefix."""
        return self.names[0] if len(self.names) == 1 and not self.prefixes else None

    def covers(self, name: str) -> bool:
        return name in self.names or (not name.startswith(RESERVED) and name.startswith(self.prefixes))

    def overlaps(self, other: SubjectPatterns) -> bool:
        """Whether some subject may be covered by both."""
        return (
            any(other.covers(name) for name in self.names)
            or any(self.covers(name) for name in other.names)
            or any(one.startswith(two) or two.startswith(one) for one in self.prefixes for two in other.prefixes)
        )

    @property
    def texts(self) -> list[str]:
        """The patterns as users write them."""
        return [*self.names, *(prefix + ANY for prefix in self.prefixes)]

    def __str__(self) -> str:
        return ", ".join(self.texts)


def _misplaced(pattern: str) -> InvalidName:
    return InvalidName(
        f"subject pattern {pattern!r} is not allowed: * stands for the rest of a name, so it may only be the last "
        "character, as in 'order.*'",
        kind="subject",
        name=pattern,
    )
