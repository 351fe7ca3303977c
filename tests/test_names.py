"""The format of names and counts in messages for users."""

from __future__ import annotations

import pytest

from plait.model.names import counted


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (1_234_567, "1,234,567 files")]
)
def test_counts_are_written_with_the_right_form_of_the_noun(count: int, text: str):
    assert counted(count, "file") == text
