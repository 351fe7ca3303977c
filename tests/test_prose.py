"""The language of the repository: phrases that docs/GLOSSARY.md has better words for.

Each pattern below was once used for a thing of the domain, or leaves out who does what. A true use, such as a word
of a library, is listed in `ALLOWED` with the text that may stand.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Where prose is written for readers of the code and for users.
PLACES = ("plait", "tests", "docs", "benchmarks", "examples", "tools", "README.md", "CHANGELOG.md")


def word(*forms: str) -> str:
    """The word by itself or between underscores of a name."""
    return rf"(?<![A-Za-z])(?:{'|'.join(forms)})(?![A-Za-z])"


# The strings are cut in two so that this file passes its own check.
OWNER = r"(?:its|their|whose|his|her|a|the|my|our|your|\w+'s|\w+s')"
PAST = r"(?:is|are|was|were|be|been|being)"
PHRASES = {
    rf"\bin (?:{OWNER} )?(?:own )?han" + r"ds\b": "in flight, held by",
    word("ane" + "w"): "again",
    r"\bonce mor" + r"e\b": "again",
    r"\bfor goo" + r"d\b": "permanently",
    r"\bfor eve" + r"r\b": "permanently, without limit",
    r"\b[Ww]hat (?:has |had )?(?:became|becomes|become|came|comes) o" + r"f\b": "the outcome of",
    word("[Ww]hoeve" + "r", "[Nn]obod" + "y", "[Ss]omebod" + "y", "[Ee]verybod" + "y"): "the actor's name",
    r"\b(?:goes|go|going|went|gone|carry|carries|carried) o" + r"n\b(?! (?:the|disk|a |to ))": "continues, resumes",
    r"\b(?:[Aa]s|[Ss]o) far a" + r"s\b": "up to, where",
    word("hear" + "d", "hear" + "s"): "is notified, receives",
    rf"\b{PAST} tol" + r"d\b": "is notified, receives",
    rf"\b{PAST} sai" + r"d\b": "is reported, is recorded",
    r"\b(?:spoken|speaks?) o" + r"f\b": "named, means",
    r'"""The same\.|# The same' + r"\.": "the sentence itself",
    r'"""See the modul' + "e": "the sentence itself",
    r"\b[Tt]wice is as onc" + r"e\b": "idempotent",
    word("[Ss]tran" + "ds?"): "cursor",
    word("[Oo]utle" + "ts?"): "subject sender",
    word("[Kk]eepe" + "rs?"): "lease renewer",
    word("[Ll]an" + "es?"): "partition sender",
    word("[Ff]a" + "n"): "partitioner",
    word("[Ss]tead" + "y"): "resumable",
    word("[Ss]cope" + "d"): "the domain's word",
    word("[Bb]eate" + "n", "[Bb]ea" + "ts?"): "heartbeat",
    word("[Uu]nfile" + "d", "[Ff]ile" + "d", "[Ff]ilin" + "g"): "bucketed",
    r"\bkept lo" + r"g\b": "retained log",
}
PATTERNS = {re.compile(pattern): better for pattern, better in PHRASES.items()}

#: File -> texts in which a pattern has its everyday meaning.
ALLOWED: dict[str, tuple[str, ...]] = {
    # A Unix user.
    "tests/support/mariadb.py": ('"nobo' + 'dy"',),
    "tests/support/postgres.py": ('"nobo' + 'dy"',),
    # Names of SQLAlchemy.
    "plait/outbox/outbox.py": ("scope" + "d_session",),
    "tests/outbox/test_outbox.py": ("scope" + "d_session",),
    "docs/outbox.md": ("scope" + "d_session",),
    # A public limit.
    "plait/limits.py": ("reconnect_stead" + "y_seconds",),
    "plait/client/net/node.py": ("reconnect_stead" + "y_seconds",),
    "tests/client/test_reconnecting.py": ("reconnect_stead" + "y_seconds",),
}


def findings(name: str, text: str) -> list[str]:
    """Each use of a phrase, with its line and the better word."""
    for allowed in ALLOWED.get(name, ()):
        text = text.replace(allowed, " " * len(allowed))
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r} -> {better}"
        for pattern, better in PATTERNS.items()
        for match in pattern.finditer(text)
    ]


def texts() -> dict[str, str]:
    found = {}
    for place in PLACES:
        path = ROOT / place
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".md") and "__pycache__" not in file.parts:
                found[file.relative_to(ROOT).as_posix()] = file.read_text()
    return found


def test_the_repository_uses_the_words_of_its_glossary():
    assert [line for name, text in texts().items() for line in findings(name, text)] == []


def test_every_allowed_text_is_still_there():
    assert [
        name for name, allowed in ALLOWED.items() for text in allowed if text not in (ROOT / name).read_text()
    ] == []


@pytest.mark.parametrize(
    "text",
    ["in its han" + "ds", "the stran" + "d", "self._lan" + "es", "made ane" + "w", "it is tol" + "d of it"],
)
def test_a_refused_phrase_is_found(text: str):
    assert findings("page.md", text)


@pytest.mark.parametrize("text", ["the broker hands the frame to the log", "profiled", "a plane"])
def test_a_similar_text_is_not_refused(text: str):
    assert findings("page.md", text) == []
