"""Text of answers is one line where it should be."""

from __future__ import annotations

from dask_gpurt.observe.render.text import text_table


def test_a_name_with_a_line_break_is_in_one_row() -> None:
    assert text_table(["run", "name", "s"], [["1", "a\nb\x1b[31m", "5"], ["2", "\u00fc", "6"]], 2, indent="") == [
        "run  name      s",
        "1    a b [31m  5",
        "2    \u00fc         6",
    ]
