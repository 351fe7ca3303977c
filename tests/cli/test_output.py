"""Control characters in names and addresses do not reach the terminal."""

from __future__ import annotations

import pytest

from plait.cli.output import print_facts, print_table


def test_control_characters_are_shown_as_escapes(capsys: pytest.CaptureFixture[str]):
    print_table(["address"], [["plait://\x1b]0;owned\x07host\r\n:1"]])
    print_facts([("broker", "\x1b[2Jgone")])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "plait://\\x1b]0;owned\\x07host\\r\\n:1" in shown
    assert "\\x1b[2Jgone" in shown
