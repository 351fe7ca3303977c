"""docs/formats.md names every packet, its kind, and its fields with their defaults, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from plait.wire.messages import PacketHead

DOC = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
ROWS = {
    name: (int(kind), fields) for kind, name, fields in re.findall(r"^\| (\d+) \| ([A-Z]\w+) \| (.+) \|$", DOC, re.M)
}
MESSAGES = {kind.__name__: kind for kind in PacketHead.__subclasses__()}


def fields_of(text: str) -> list[str]:
    """``name`` or ``name = default`` of each field, without its description."""
    text = re.sub(r"\([^()]*\)", "", re.sub(r"`[^`]*`", "", text)).split(";")[0]
    return [] if text.strip() == "none" else [" ".join(field.split()) for field in text.split(", ")]


def as_written(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"{field.name} = {json.dumps(field.default_factory())}"
    if field.default is msgspec.NODEFAULT:
        return field.name
    default = field.default
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return f"{field.name} = {'nil' if default is None else json.dumps(default)}"


def test_every_packet_has_a_row() -> None:
    assert {name: kind for name, (kind, _) in ROWS.items()} == {name: kind.KIND for name, kind in MESSAGES.items()}


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_row_has_the_fields_of_its_packet(name: str) -> None:
    assert fields_of(ROWS[name][1]) == [as_written(field) for field in msgspec.structs.fields(MESSAGES[name])]
