"""The list of lines that only a GPU can prove is one of lines that are there, and a short one. See `unproven`."""

from __future__ import annotations

import pytest

from tests.gpu import unproven

MOST = 40
LINES = unproven.LIST.read_text().splitlines()


def test_it_is_short() -> None:
    assert 0 < len(LINES) <= MOST


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_there_and_calls_a_library(line: str) -> None:
    name, _, words = line.partition(": ")
    assert words in [text for _, text in unproven.statements(unproven.BACKENDS / f"{name}.py").values()]
